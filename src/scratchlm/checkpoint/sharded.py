"""Write a checkpoint from several ranks, each its own pieces: all of them, or none.

    every rank   tells which boxes it holds; rank 0 also makes the directory, beside its place
    every rank   sees that all boxes together cover each tensor exactly once
    every rank   writes model-00002-of-00004.safetensors, fsync'd, and tells size and sha256
    rank 0       writes config, tokenizer and, last, the manifest; renames; fsyncs; tells it

Ranks talk through an `Exchange` alone, never through the collectives of a training step, so that a
thread can write while the step goes on. Where one fails, all raise the same error, which names it;
where one vanishes, the exchange raises. In both cases rank 0 removes what was written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from scratchlm.checkpoint.finding import step_in
from scratchlm.checkpoint.manifest import MODEL, TRAINING_STATE, manifest_text
from scratchlm.checkpoint.pieces import (
    Piece,
    assemble,
    describe,
    join,
    keyed,
    parse_table,
    shard_file,
)
from scratchlm.checkpoint.writing import (
    could_not,
    refuse_overwriting,
    tokenizer_bytes,
    write_checkpoint,
    write_config,
    write_manifest,
    write_tensors,
)
from scratchlm.config import ModelConfig
from scratchlm.durable import whole_directory
from scratchlm.errors import ScratchLMError


class Exchange(Protocol):
    """How ranks tell each other small things; not a collective of the training step.

    Every rank calls `gather` with the same keys in the same order; a key may come again with the
    next checkpoint. Where a rank does not answer in time, `gather` raises.
    """

    rank: int
    size: int

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank, on every rank."""


def write_sharded(
    directory: str | os.PathLike[str],
    *,
    exchange: Exchange,
    model: Mapping[str, Sequence[Piece]],
    training_state: Mapping[str, Sequence[Piece]] | None,
    config: ModelConfig,
    tokenizer_file: str | os.PathLike[str] | bytes | None = None,
    tokenizer_config: bytes | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint with all ranks, whole or not at all; return its path on every rank.

    Each rank gives its pieces; those of all ranks cover each tensor exactly once. What is not a
    tensor is taken from rank 0. Arguments as of `write_checkpoint`.
    """
    directory = Path(directory)
    held = {MODEL: model}
    if training_state is not None:
        held[TRAINING_STATE] = training_state
    if exchange.size == 1:
        whole = {file: _assembled(directory, pieces) for file, pieces in held.items()}
        return write_checkpoint(
            directory,
            model=whole[MODEL],
            training_state=whole.get(TRAINING_STATE),
            config=config,
            tokenizer_file=tokenizer_file,
            tokenizer_config=tokenizer_config,
            metadata=metadata,
        )
    ranks, first = _Ranks(exchange, directory), exchange.rank == 0
    with contextlib.ExitStack() as place:

        def begin() -> dict[str, Any]:
            pieces = {file: describe(pieces) for file, pieces in held.items()}
            if not first:
                return {"pieces": pieces}
            refuse_overwriting(directory)
            beside = place.enter_context(whole_directory(directory))
            return {"pieces": pieces, "beside": beside.name}

        begun = ranks.agree("pieces", begin)
        tables = _join_all(directory, [told["pieces"] for told in begun])
        beside = directory.parent / begun[0]["beside"]

        def write_shards() -> dict[str, Any]:
            if not beside.is_dir():
                raise ScratchLMError(f"{beside} is not there; all ranks need one file system")
            names = {file: shard_file(file, exchange.rank + 1, exchange.size) for file in held}
            return {
                name: write_tensors(beside / name, keyed(held[file]))
                for file, name in names.items()
            }

        written = ranks.agree("shards", write_shards)

        def finish() -> None:
            if not first:
                return
            files = {name: entry for one in written for name, entry in one.items()}
            tokenizer = tokenizer_bytes(tokenizer_file)
            files.update(write_config(beside, config, tokenizer, tokenizer_config))
            text = manifest_text(
                step_in(directory), files, dict(metadata or {}), exchange.size, tables
            )
            write_manifest(beside, text, directory)
            place.close()  # renames the directory into its place

        ranks.agree("manifest", finish)
    return directory


class _Ranks:
    """All ranks of one checkpoint, which go on together or fail together."""

    def __init__(self, exchange: Exchange, directory: Path) -> None:
        self._exchange, self._directory = exchange, directory

    def agree(self, stage: str, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's work and return what all ranks' gave; where one failed, raise on all."""
        failure: Exception | None = None
        said: dict[str, Any] = {}
        try:
            said["value"] = work()
        except Exception as error:
            failure = error
            said["error"] = _reason(error)
        told = self._exchange.gather(f"checkpoint {self._directory.name}: {stage}", said)
        if failure is not None and not isinstance(failure, (OSError, ScratchLMError)):
            raise failure  # a bug of ours shows its traceback
        for rank, one in enumerate(told):
            if "error" in one:
                reason = ScratchLMError(f"rank {rank}: {one['error']}")
                raise ScratchLMError(could_not(self._directory, reason)) from None
        return [one["value"] for one in told]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, ScratchLMError) else f"{type(error).__name__}: {error}"


def _join_all(directory: Path, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the ranks' boxes to the manifest's tables, checked; every rank finds the same."""
    tables = {}
    try:
        for rank, one in enumerate(told):
            if one.keys() != told[0].keys():
                raise ScratchLMError(f"rank {rank} and rank 0 must both have a training state")
        for file in told[0]:
            tables[file] = join([one[file] for one in told])
            parse_table(tables[file], file, len(told))
    except ScratchLMError as error:
        raise ScratchLMError(could_not(directory, error)) from None
    return tables


def _assembled(directory: Path, pieces: Mapping[str, Sequence[Piece]]) -> dict[str, Any]:
    try:
        return assemble(pieces)
    except ScratchLMError as error:
        raise ScratchLMError(could_not(directory, error)) from None
