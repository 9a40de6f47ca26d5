"""Where a run keeps its checkpoints, and which of them to take: found by scanning their names."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from scratchlm.checkpoint.manifest import CONFIG, MANIFEST, read_manifest
from scratchlm.checkpoint.reading import verify_checkpoint
from scratchlm.errors import ScratchLMError

T = TypeVar("T")

_STEP = re.compile(r"step-(\d{8,})")
PATIENCE = 60.0  # seconds a reader tries to be faster than a trainer that replaces checkpoints
RESCANS = 100  # how often a reader looks again at a run whose checkpoints come and go


def checkpoint_path(run: str | os.PathLike[str], step: int) -> Path:
    """Return where a run keeps its checkpoint of `step`."""
    return Path(run) / "checkpoints" / f"step-{step:08d}"


def step_of(path: str | os.PathLike[str]) -> int:
    """Read the step from a checkpoint's name."""
    match = _STEP.fullmatch(Path(path).name)
    if match is None:
        raise ValueError(f"a checkpoint is named step-NNNNNNNN; got {Path(path).name}")
    return int(match[1])


def step_in(path: Path) -> int | None:
    """Read the step from a checkpoint's name; None where it has another kind of name."""
    return step_of(path) if _STEP.fullmatch(path.name) else None


def find_checkpoints(run: str | os.PathLike[str]) -> list[Path]:
    """List a run's checkpoints, oldest first, whole or damaged."""
    directory = Path(run) / "checkpoints"
    if not directory.is_dir():
        return []
    found: list[Path] = []
    for _ in range(RESCANS):
        names = os.listdir(directory)
        found = [directory / name for name in names if _STEP.fullmatch(name)]
        found = [path for path in found if path.is_dir()]
        if found or not names:
            break  # a list read while one is renamed may show neither the old nor the new one
    return sorted(found, key=step_of)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Say whether a directory is one of our checkpoints (it may still be damaged)."""
    return (Path(path) / MANIFEST).is_file() and (Path(path) / CONFIG).is_file()


def newest_valid(
    run: str | os.PathLike[str], warn: Callable[[str], None] | None = None
) -> Path | None:
    """Return a run's newest whole checkpoint, or None where it has none at all.

    Damaged ones on the way are named through `warn`. Where all are damaged that is an error:
    starting afresh would bury what may still be repaired. One that its trainer removes meanwhile
    is not a damaged one: the run is looked at again.
    """
    damaged: set[str] = set()
    for _ in range(RESCANS):
        found, vanished = find_checkpoints(run), False
        for path in reversed(found):
            try:
                verify_checkpoint(path)
                return path
            except ScratchLMError as error:
                if not path.exists():
                    vanished = True
                elif path.name not in damaged:
                    damaged.add(path.name)
                    message = f"{error}; trying the checkpoint before it"
                    warnings.warn(message, stacklevel=2) if warn is None else warn(message)
        if not vanished:
            break
    else:
        raise ScratchLMError(f"{run}: checkpoints are replaced faster than they can be read")
    if found:
        raise ScratchLMError(f"{run}: all {len(found)} checkpoints are damaged")
    return None


def read_chosen(
    run: str | os.PathLike[str],
    read: Callable[[Path], T],
    which: str | int = "best",
    warn: Callable[[str], None] | None = None,
) -> T | None:
    """Read a run's checkpoint (`choose_checkpoint`), or the next where it vanishes meanwhile."""
    patience = time.monotonic() + PATIENCE
    while time.monotonic() < patience:
        before = find_checkpoints(run)
        try:
            path = choose_checkpoint(run, which, warn)
            return None if path is None else read(path)
        except (ScratchLMError, OSError):
            if find_checkpoints(run) == before:  # nothing has been removed meanwhile
                raise
    raise ScratchLMError(f"{run}: checkpoints are replaced faster than they can be read")


def choose_checkpoint(
    run: str | os.PathLike[str],
    which: str | int = "best",
    warn: Callable[[str], None] | None = None,
) -> Path | None:
    """Return a run's checkpoint: the best on held-out data, the last, or that of a step.

    `best` is the last where nothing was held out. None where the run has no checkpoint at all.
    """
    word = str(which)
    if word not in ("best", "last") and not word.isdecimal():
        raise ScratchLMError(f"a checkpoint is best, last or a step; got {word!r}")
    if word.isdecimal():
        path = checkpoint_path(run, int(word))
        if not path.is_dir():
            steps = ", ".join(str(step_of(found)) for found in find_checkpoints(run)) or "none"
            raise ScratchLMError(f"{run} keeps no checkpoint of step {word}; it has {steps}")
        verify_checkpoint(path)
        return path
    newest = newest_valid(run, warn)
    best = None if newest is None or word == "last" else best_step(newest)
    if newest is None or best is None or best == step_of(newest):
        return newest
    path = checkpoint_path(run, best)
    if best == 0 and not path.is_dir():  # random weights were the best, and are not kept
        return newest
    try:
        verify_checkpoint(path)
        return path
    except ScratchLMError as error:
        message = f"the best checkpoint cannot be used ({error}); taking the last, {newest.name}"
        warnings.warn(message, stacklevel=2) if warn is None else warn(message)
        return newest


def best_step(path: str | os.PathLike[str]) -> int | None:
    """Return the step whose held-out loss was the best when a checkpoint was written."""
    return read_manifest(path)["metadata"].get("reached", {}).get("best_step")
