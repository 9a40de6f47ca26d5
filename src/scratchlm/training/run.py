"""A run directory: one writer at a time, the run's progress, and how it is saved.

RUN/config.toml              everything the run was made from, resolved
RUN/metrics.jsonl            see `metrics.py`
RUN/checkpoints/step-…/      see `checkpoint/`
RUN/.lock                    locked while a trainer runs
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scratchlm.checkpoint import (
    TRAINING_STATE,
    Piece,
    best_step,
    checkpoint_path,
    clean_leftovers,
    find_checkpoints,
    newest_valid,
    prune_checkpoints,
    read_config,
    read_manifest,
    read_tensors,
    remove_damaged,
    set_aside_after,
    step_of,
    verify_checkpoint,
    write_checkpoint,
    write_sharded,
)
from scratchlm.data import TokenFile
from scratchlm.durable import naming
from scratchlm.errors import ScratchLMError
from scratchlm.training.learner import Learner
from scratchlm.training.metrics import DAMAGED, NAME, MetricsFile, NoMetrics
from scratchlm.training.parts import load_pieces, model_pieces, training_state_pieces
from scratchlm.training.settings import CHANGEABLE
from scratchlm.training.step import NotFiniteError

if TYPE_CHECKING:
    from scratchlm.parallel.ranks import Ranks


@dataclass
class Progress:
    """How far a run is: saved in every checkpoint's manifest, numbers to the last bit."""

    step: int = 0  # updates made
    evaluated: int = -1  # the step of the last evaluation
    best_loss: float | None = None  # on held-out data
    best_step: int | None = None
    evaluations_since_best: int = 0
    seconds: float = 0.0  # of training, summed over all sessions of the run


LOCK = ".lock"
# What a session writes besides checkpoints. A link in a run from elsewhere may lead anywhere.
WRITTEN = (LOCK, NAME, DAMAGED, "config.toml", "report.html", "loss.png")

# Saving costs time on the disk: what is saved without having been asked for may take this share of
# a session, and a run that is not evaluated is saved as often as this.
SHARE, SECONDS = 0.05, 300.0


@dataclass
class Snapshot:
    """What a checkpoint of one step holds; with several ranks, this one's part of it."""

    progress: Progress
    model: dict[str, Any]
    training_state: dict[str, Any]

    @classmethod
    def of(cls, progress: Progress, learner: Learner) -> Snapshot:
        """Look at a learner's tensors, without copying them."""
        if learner.layout is None:
            return cls(progress, learner.model_tensors(), learner.training_state())
        return cls(progress, model_pieces(learner), training_state_pieces(learner))

    def copied(self) -> Snapshot:
        """Copy them, so that the next step may change the originals."""
        tables = (
            {name: _copied(value) for name, value in table.items()}
            for table in (self.model, self.training_state)
        )
        return Snapshot(copy.copy(self.progress), *tables)


def _copied(value: Tensor | list[Piece]) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [replace(piece, tensor=piece.tensor.to("cpu", copy=True)) for piece in value]


@dataclass
class Run:
    """A run directory held by this process."""

    directory: Path
    data: Mapping[str, Any]  # fingerprints of the token files
    tokenizer: bytes | None = None  # what tokenizer.json held when the session began
    changed: frozenset[tuple[str, Any]] = frozenset()  # settings that were asked for since
    progress: Progress = field(default_factory=Progress)
    eos_token_ids: tuple[int, ...] = ()  # of a model that came with its own
    chat_template: bytes | None = None  # a tokenizer_config.json
    adapter: Mapping[str, Any] | None = None  # of a run that learns an adapter: it and its base
    head: Mapping[str, Any] | None = None  # of a run that trains a task head
    ranks: Ranks | None = None  # that write its checkpoints together
    metrics: MetricsFile = field(init=False)
    unsaved_best: Snapshot | None = None  # copied, and written with the next checkpoint
    _began: float = field(default_factory=lambda: time.perf_counter())
    _saved: float = field(default_factory=lambda: time.perf_counter())
    _saving_seconds: float = 0.0
    _writing: Writing | None = None  # a checkpoint, in the background

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if hasattr(self, "metrics"):
            self.metrics.close()
        if kind is not None and self.ranks is not None and kind is not NotFiniteError:
            self.ranks.has_failed = True  # others may be gone; a checkpoint does not wait for them
        with contextlib.suppress(*([] if kind is None else [ScratchLMError])):
            self.finish_writing()

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that tidies and logs."""
        return self.ranks is None or self.ranks.is_first

    def restore(self, learner: Learner, warn: Callable[[str], None] | None = None) -> Path | None:
        """Load the newest valid checkpoint, if any, and cut the log back to its step."""
        path = self._newest(warn) if self.is_first else None
        if self.ranks is not None:
            told = self.ranks.from_first(None if path is None else path.name)
            path = None if told is None else self.directory / "checkpoints" / told
        if path is not None:
            progress = self._check_same(path, learner)
            if learner.layout is None:
                state = read_tensors(path, learner.device, TRAINING_STATE)
                learner.load(read_tensors(path, learner.device), state)
            else:
                load_pieces(learner, path)
            self.progress = progress
            metadata = read_manifest(path)["metadata"]
            self.eos_token_ids = tuple(metadata.get("eos_token_ids", ()))
            if self.is_first:
                set_aside_after(self.directory, self.progress.step)
                self._prune(learner)  # the last session may have ended just before it did
        self.metrics = NoMetrics()
        if self.is_first:
            self.metrics = MetricsFile(
                self.directory / NAME, self.progress.step, self.progress.evaluated, warn
            )
        return path

    def _newest(self, warn: Callable[[str], None] | None) -> Path | None:
        """Tidy up, and find the checkpoint to go on from."""
        clean_leftovers(self.directory)
        for link in find_checkpoints(self.directory):
            if link.is_symlink():
                raise ScratchLMError(
                    f"{link} is a link, and a run tidies its checkpoints up: put the folder itself "
                    "there, or take the link away"
                )
        return newest_valid(self.directory, warn)

    def _check_same(self, path: Path, learner: Learner) -> Progress:
        """Refuse a checkpoint of another model, data or settings; return how far it was."""
        if read_config(path) != learner.config:
            raise ScratchLMError(f"{path} holds another model than the run's config.toml says")
        metadata = read_manifest(path)["metadata"]
        try:
            then, progress = metadata["data"], Progress(**metadata["reached"])
        except (KeyError, TypeError):
            raise ScratchLMError(f"{path} was not written by a training run") from None
        if metadata.get("adapter") != self.adapter:
            raise ScratchLMError(f"{path} belongs to another adapter, or its base has changed")
        if metadata.get("head") != self.head:
            raise ScratchLMError(f"{path} has another task head than the run's config.toml says")
        self._check_settings(path, metadata.get("train", {}), learner.settings.to_dict())
        for name in sorted({*then, *self.data}):
            if then.get(name) != self.data.get(name):
                raise ScratchLMError(
                    f"the {name} token file has changed since {path.name} was written: then "
                    f"{_describe(then.get(name))}, now {_describe(self.data.get(name))}"
                )
        return progress

    def _check_settings(self, path: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
        """Refuse settings that are not those of the checkpoint, unless a change was asked for.

        A name that the checkpoint does not know is newer than it, and has its default.
        """
        asked = dict(self.changed)
        for name in sorted(then.keys() & now.keys()):
            if now[name] not in (then[name], asked.get(name)):
                raise ScratchLMError(
                    f"train.{name} is {now[name]!r} in config.toml and was {then[name]!r} when "
                    f"{path.name} was written; put it back, or ask for the change on the command "
                    f"line (possible for {', '.join(sorted(CHANGEABLE))})"
                )

    @property
    def may_save(self) -> bool:
        """Whether another checkpoint keeps saving within its share of the session's time."""
        return self._saving_seconds <= SHARE * (time.perf_counter() - self._began)

    @property
    def is_overdue(self) -> bool:
        """Whether the last checkpoint is so old that a new one is due without an evaluation."""
        return time.perf_counter() - self._saved > SECONDS

    def keep_best(self, learner: Learner) -> bool:
        """Copy the current step, to be written later; say whether memory sufficed."""
        try:
            self.unsaved_best = Snapshot.of(self.progress, learner).copied()
        except torch.OutOfMemoryError:
            self.unsaved_best = None
        if self.ranks is not None and self.ranks.any(self.unsaved_best is None):
            self.unsaved_best = None
        return self.unsaved_best is not None

    def save(self, learner: Learner) -> list[Path]:
        """Write checkpoints of the best step, if it waits to be, and of the current one."""
        began, waiting, self.unsaved_best = time.perf_counter(), self.unsaved_best, None
        written = []
        if waiting is not None and waiting.progress.step == self.progress.best_step:
            written.append(self._write(waiting, learner))
        waiting = None
        if not self.is_saved:
            written.append(self._write(Snapshot.of(self.progress, learner), learner))
        self._saved = time.perf_counter()
        self._saving_seconds += self._saved - began
        return written

    def _write(self, snapshot: Snapshot, learner: Learner) -> Path:
        """Write a checkpoint, verify it, then prune the old ones.

        Several ranks write theirs in the background, from a copy; the next step goes on meanwhile.
        """
        path = checkpoint_path(self.directory, snapshot.progress.step)
        self.finish_writing()
        self.metrics.sync()
        if self.ranks is not None:
            snapshot = snapshot.copied()
        contents: dict[str, Any] = {
            "model": snapshot.model,
            "config": learner.config,
            "tokenizer_file": self.tokenizer,
            "tokenizer_config": self.chat_template,
            "training_state": snapshot.training_state,
            "metadata": {
                "reached": asdict(snapshot.progress),
                "data": dict(self.data),
                "train": learner.settings.to_dict(),
                **({"eos_token_ids": list(self.eos_token_ids)} if self.eos_token_ids else {}),
                **({} if self.adapter is None else {"adapter": dict(self.adapter)}),
                **({} if self.head is None else {"head": dict(self.head)}),
            },
        }

        def write() -> None:
            if self.ranks is None:
                write_checkpoint(path, **contents)
            else:
                write_sharded(path, exchange=self.ranks, **contents)
            if self.is_first:
                verify_checkpoint(path)
                self._prune(learner)
                remove_damaged(self.directory)

        if self.ranks is None:
            write()
        else:
            self._writing = Writing(snapshot.progress.step, write)
        return path

    def finish_writing(self) -> None:
        """Wait until a checkpoint that is being written is there; raise what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def _prune(self, learner: Learner) -> None:
        """Remove all checkpoints but the last few and the best one they know of."""
        keep_last = learner.settings.keep_last
        best = {_best_step(path) for path in find_checkpoints(self.directory)[-keep_last:]}
        prune_checkpoints(self.directory, keep_last, best - {None})  # type: ignore[arg-type]

    @property
    def is_saved(self) -> bool:
        """Whether the current step has a checkpoint, or will have."""
        if self._writing is not None and self._writing.step == self.progress.step:
            return True
        found = self.progress.step in map(step_of, find_checkpoints(self.directory))
        return found if self.ranks is None else self.ranks.first_says(found)


class Writing:
    """A checkpoint that a thread writes."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step, self._write = step, write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised where the loop waits for it
            self._error = error

    def finish(self) -> None:
        """Wait for it, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _best_step(path: Path) -> int | None:
    """The best step recorded in a checkpoint; None if it is damaged."""
    try:
        return best_step(path)
    except ScratchLMError:
        return None


def _describe(fingerprint: Mapping[str, Any] | None) -> str:
    if fingerprint is None:
        return "none"
    tokenizer = str(fingerprint.get("tokenizer"))[:16]
    ids = f"{fingerprint['count']:,} ids, CRC-32 {fingerprint['crc32']:08x}"
    return f"{ids}, tokenizer {tokenizer}"


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
    for name in WRITTEN:
        if (directory / name).is_symlink():
            raise ScratchLMError(
                f"{directory / name} is a link, and a run writes that file: put the file itself "
                "there, or take the link away"
            )
    lock = directory / LOCK
    if lock.exists() and not lock.is_file():
        raise ScratchLMError(f"{lock}: not a regular file")
    with open(lock, "ab+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            pid = file.read(20).decode(errors="replace").strip() or "unknown"
            raise ScratchLMError(
                f"{directory}: another trainer (process {pid}) is at work on this run"
            ) from None
        with naming(lock):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield directory
