"""Keep a run's checkpoints tidy: prune old ones, set a left future aside, remove leftovers."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from scratchlm.checkpoint.finding import find_checkpoints, step_of
from scratchlm.durable import PREFIX, remove_abandoned


def set_aside(path: Path, why: str) -> Path:
    """Take a checkpoint out of the scan with one rename; a leftover from then on."""
    aside = path.with_name(f".{why}-{path.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def set_aside_after(run: str | os.PathLike[str], step: int) -> list[Path]:
    """Take the checkpoints after `step` out of the scan: the run goes on from `step`.

    They stay on disk, as `.damaged-…`, until the run has a new checkpoint of its own.
    """
    late = [path for path in find_checkpoints(run) if step_of(path) > step]
    return [set_aside(path, "damaged") for path in late]


def prune_checkpoints(
    run: str | os.PathLike[str], keep_last: int, keep_steps: Iterable[int] = ()
) -> list[Path]:
    """Remove all but the last `keep_last` checkpoints and those of `keep_steps`; return them.

    Call it only once the newest has been verified.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be >= 1; got {keep_last}")
    found, wanted = find_checkpoints(run), set(keep_steps)
    gone = [path for path in found[:-keep_last] if step_of(path) not in wanted]
    for path in gone:
        shutil.rmtree(set_aside(path, "old"))
    return gone


def remove_damaged(run: str | os.PathLike[str]) -> None:
    """Remove what `set_aside_after` has set aside: the run has a new checkpoint of its own."""
    for path in (Path(run) / "checkpoints").glob(".damaged-step-*"):
        shutil.rmtree(path, ignore_errors=True)


def clean_leftovers(run: str | os.PathLike[str]) -> None:
    """Remove what a crash left half-written or half-removed.

    The caller must be the run's only writer.
    """
    directory = Path(run) / "checkpoints"
    remove_abandoned(directory, f"{PREFIX}*")
    # `.tmp-…` is what they were called by 0.2.0
    left = [path for kind in ("tmp", "old") for path in directory.glob(f".{kind}-*")]
    for path in left:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
