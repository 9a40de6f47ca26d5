"""A run directory: one writer at a time, the run's progress, and how it is saved.

RUN/config.toml              everything the run was made from, resolved
RUN/metrics.jsonl            see `metrics.py`
RUN/checkpoints/step-…/      see `checkpoint.py`
RUN/.lock                    locked while a trainer runs
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scratchlm.checkpoint import (
    TRAINING_STATE,
    best_step,
    checkpoint_path,
    clean_leftovers,
    find_checkpoints,
    newest_valid,
    prune_checkpoints,
    read_config,
    read_manifest,
    read_tensors,
    set_aside_after,
    step_of,
    verify_checkpoint,
    write_checkpoint,
)
from scratchlm.data import TokenFile
from scratchlm.errors import ScratchLMError
from scratchlm.training.learner import Learner
from scratchlm.training.metrics import NAME, MetricsFile


@dataclass
class Progress:
    """How far a run is: saved in every checkpoint's manifest, numbers to the last bit."""

    step: int = 0  # updates made
    evaluated: int = -1  # the step of the last evaluation
    best_loss: float | None = None  # on held-out data
    best_step: int | None = None
    evaluations_since_best: int = 0
    seconds: float = 0.0  # of training, summed over all sessions of the run


@dataclass
class Run:
    """A run directory held by this process."""

    directory: Path
    data: Mapping[str, Any]  # fingerprints of the token files
    tokenizer_file: Path | None = None
    progress: Progress = field(default_factory=Progress)
    eos_token_ids: tuple[int, ...] = ()  # of a model that came with its own
    metrics: MetricsFile = field(init=False)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self, "metrics"):
            self.metrics.close()

    def restore(self, learner: Learner, warn: Callable[[str], None] | None = None) -> Path | None:
        """Load the newest valid checkpoint, if any, and cut the log back to its step."""
        clean_leftovers(self.directory)
        path = newest_valid(self.directory, warn)
        if path is not None:
            self._check_same(path, learner)
            metadata = read_manifest(path)["metadata"]
            state = read_tensors(path, learner.device, TRAINING_STATE)
            learner.load(read_tensors(path, learner.device), state)
            self.progress = Progress(**metadata["reached"])
            self.eos_token_ids = tuple(metadata.get("eos_token_ids", ()))
            set_aside_after(self.directory, self.progress.step)
        self.metrics = MetricsFile(
            self.directory / NAME, self.progress.step, self.progress.evaluated
        )
        return path

    def _check_same(self, path: Path, learner: Learner) -> None:
        if read_config(path) != learner.model.config:
            raise ScratchLMError(f"{path} holds another model than the run's config.toml says")
        then = read_manifest(path)["metadata"]["data"]
        for name in sorted({*then, *self.data}):
            if then.get(name) != self.data.get(name):
                raise ScratchLMError(
                    f"the {name} token file has changed since {path.name} was written: then "
                    f"{_describe(then.get(name))}, now {_describe(self.data.get(name))}"
                )

    def save(self, learner: Learner) -> Path:
        """Write a checkpoint of the current step, verify it, then prune the old ones."""
        path = checkpoint_path(self.directory, self.progress.step)
        self.metrics.sync()
        write_checkpoint(
            path,
            model=learner.model_tensors(),
            config=learner.model.config,
            tokenizer_file=self.tokenizer_file,
            training_state=learner.training_state(),
            metadata={
                "reached": asdict(self.progress),
                "data": dict(self.data),
                "train": learner.settings.to_dict(),
                **({"eos_token_ids": list(self.eos_token_ids)} if self.eos_token_ids else {}),
            },
        )
        verify_checkpoint(path)
        keep_last = learner.settings.keep_last
        best = {_best_step(path) for path in find_checkpoints(self.directory)[-keep_last:]}
        prune_checkpoints(self.directory, keep_last, best - {None})  # type: ignore[arg-type]
        return path

    @property
    def is_saved(self) -> bool:
        """Whether the current step has a checkpoint."""
        return self.progress.step in map(step_of, find_checkpoints(self.directory))


def _best_step(path: Path) -> int | None:
    """The best step recorded in a checkpoint; None if it is damaged."""
    try:
        return best_step(path)
    except ScratchLMError:
        return None


def _describe(fingerprint: Mapping[str, Any] | None) -> str:
    if fingerprint is None:
        return "none"
    return f"{fingerprint['count']:,} ids, CRC-32 {fingerprint['crc32']:08x}"


def fingerprint(tokens: TokenFile) -> dict[str, Any]:
    """Identify the ids a token file holds."""
    info = tokens.info
    return {"count": info.count, "crc32": info.crc32, "tokenizer": info.tokenizer}


@contextlib.contextmanager
def hold_run(directory: Path) -> Iterator[Path]:
    """Create the run directory and lock it against other trainers.

    The lock belongs to the open file: however this process ends, the system releases it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / ".lock"
    with open(lock, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            pid = file.read().strip() or "unknown"
            raise ScratchLMError(
                f"{directory}: another trainer (process {pid}) is at work on this run"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield directory
