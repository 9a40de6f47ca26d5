"""Examples in one file, packed into rows, batches as a pure function of (seed, step, rank).

    ids, learns   the tokens of all examples, end to end, and which of them are learnt
    ends          where each example ends

An example of n tokens gives n − 1 transitions from a token to the next. Rows of `row_length`
transitions are filled with whole examples, the longest first, each into the fullest row it fits;
the examples of a row carry numbers (`document_ids`) and do not see each other. Which rows a step
takes is, as for text (`batches.py`), a keyed permutation of each epoch.
"""

from __future__ import annotations

import bisect
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scratchlm.data.batches import IGNORE_INDEX, Batch
from scratchlm.data.conversations import Example
from scratchlm.data.permutation import derive_key, permute
from scratchlm.data.prefetch import prefetch
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import open_regular

_ORDER = 5  # the purpose a key is derived for
_ARRAYS = {"ends": np.int64, "ids": np.int32, "learns": np.uint8}
_MAGIC = b"scratchlm examples 1\n"


@dataclass(frozen=True)
class Examples:
    """Examples of token ids."""

    ids: np.ndarray
    learns: np.ndarray
    ends: np.ndarray
    fingerprint: dict[str, Any]  # as of a token file: count, crc32, tokenizer

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """The transitions of each example."""
        return np.diff(self.ends, prepend=0) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one example's ids, and which of them are learnt."""
        end = int(self.ends[index])
        begin = int(self.ends[index - 1]) if index else 0
        return self.ids[begin:end].astype(np.int64), self.learns[begin:end].astype(bool)


def gather_examples(examples: Iterable[Example], tokenizer: str) -> Examples:
    """Put examples end to end."""
    ids: list[int] = []
    learns: list[bool] = []
    ends: list[int] = []
    for example in examples:
        ids += example.ids
        learns += example.learns
        ends.append(len(ids))
    arrays = {
        name: np.array(values, dtype=_ARRAYS[name])
        for name, values in (("ends", ends), ("ids", ids), ("learns", learns))
    }
    head = {"tokens": len(ids), "crc32": zlib.crc32(_bytes(arrays)), "tokenizer": tokenizer}
    return _examples(head, arrays)


def save_examples(path: Path, examples: Examples) -> None:
    """Write examples into one file, whole or not at all."""
    known = examples.fingerprint
    head = {"examples": len(examples), "tokens": known["count"], "tokenizer": known["tokenizer"]}
    head["crc32"] = known["crc32"]
    data = _bytes({name: getattr(examples, name) for name in _ARRAYS})
    write_atomically(path, _MAGIC + json.dumps(head).encode() + b"\n" + data)


def write_examples(path: Path, examples: Iterable[Example], tokenizer: str) -> Examples:
    """Gather examples and write them."""
    gathered = gather_examples(examples, tokenizer)
    save_examples(path, gathered)
    return gathered


def _bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    return b"".join(arrays[name].tobytes() for name in _ARRAYS)


def read_examples(path: str | os.PathLike[str]) -> Examples:
    """Read what `write_examples` wrote."""
    with open_regular(path) as file:
        content = file.read()
    line, _, data = content.removeprefix(_MAGIC).partition(b"\n")
    try:
        head = json.loads(line) if content.startswith(_MAGIC) else {}
        counts = {"ends": head["examples"], "ids": head["tokens"], "learns": head["tokens"]}
        arrays, at = {}, 0
        for name, dtype in _ARRAYS.items():
            arrays[name] = np.frombuffer(data, dtype, counts[name], at)
            at += arrays[name].nbytes
        whole = at == len(data) and zlib.crc32(data) == head["crc32"]
        whole = whole and isinstance(head["tokenizer"], str)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        whole = False
    if not whole:
        raise ScratchLMError(f"{os.fspath(path)} is damaged: it is not what was written")
    return _examples(head, arrays)


def _examples(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> Examples:
    known = {"count": head["tokens"], "crc32": head["crc32"], "tokenizer": head["tokenizer"]}
    return Examples(arrays["ids"], arrays["learns"], arrays["ends"], known)


# Rows


def pack(lengths: np.ndarray, row_length: int) -> list[list[int]]:
    """Fill rows with examples, the longest first, each into the fullest row it fits."""
    order = np.argsort(-lengths, kind="stable")
    if len(order) and lengths[order[0]] > row_length:
        raise ScratchLMError(
            f"example {order[0] + 1}: {lengths[order[0]] + 1:,} tokens do not fit in rows of "
            f"{row_length:,}"
        )
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for index in order:
        need = int(lengths[index])
        at = bisect.bisect_left(free, (need, -1))
        if at == len(free):
            rows.append([int(index)])
            bisect.insort(free, (row_length - need, len(rows) - 1))
        else:
            room, row = free.pop(at)
            rows[row].append(int(index))
            bisect.insort(free, (room - need, row))
    return rows


class Rows:
    """Rows of examples: packed, or one to each."""

    def __init__(
        self,
        examples: Examples,
        row_length: int,
        *,
        packed: bool = True,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not len(examples):
            raise ScratchLMError("there are no examples")
        self.examples, self.row_length = examples, row_length
        self.packed, self.pin_memory = packed, pin_memory
        self.rank, self.world_size = rank, world_size
        singles = [[index] for index in range(len(examples))]
        self.rows = pack(examples.lengths, row_length) if packed else singles

    def own(self, batch: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's part of a batch's rows."""
        size, rank, world = len(batch), self.rank, self.world_size
        return batch[size * rank // world : size * (rank + 1) // world]

    def read(self, chosen: Iterable[int | None]) -> Batch:
        """Return these rows; None gives one of padding."""
        return self.lay_out([[] if row is None else self.rows[row] for row in chosen])

    def lay_out(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Return rows of these examples."""
        shape = (len(rows), self.row_length)
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int64)
        for at, row in enumerate(rows):
            start = 0
            for number, index in enumerate(row):
                ids, learns = self.examples[index]
                end = start + len(ids) - 1
                inputs[at, start:end] = ids[:-1]
                targets[at, start:end] = np.where(learns[1:], ids[1:], IGNORE_INDEX)
                start = end
                documents[at, start:] = number + 1  # of the next example, or of padding
        # One example to a row needs no numbers: padding comes after it, and attention is causal.
        return Batch(
            self._tensor(inputs),
            self._tensor(targets),
            self._tensor(documents) if self.packed else None,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.pin_memory else tensor


class ExampleBatches(Rows):
    """Training batches: every row once an epoch, indefinitely."""

    def __init__(
        self, examples: Examples, row_length: int, batch_size: int, seed: int, **options: Any
    ) -> None:
        super().__init__(examples, row_length, **options)
        self.batch_size, self.seed = batch_size, seed

    def chosen(self, step: int) -> list[int]:
        """Return the rows of a step."""
        index = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        count = len(self.rows)
        found: list[int] = []
        for epoch in range(int(index[0]) // count, int(index[-1]) // count + 1):
            places = index[index // count == epoch] % count
            found += permute(places, count, derive_key(self.seed, epoch, _ORDER)).tolist()
        return found

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of the batch at `step`."""
        return self.read(self.own(self.chosen(step)))

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> Iterator[Batch]:
        """Yield the batches from `start_step` on, read ahead in the background, in order."""
        return prefetch(self.batch, start_step, stop_step)


class ExampleValidation(Rows):
    """Every row once, in order; the last batch is filled up with padding."""

    def __init__(
        self, examples: Examples, row_length: int, batch_size: int, **options: Any
    ) -> None:
        super().__init__(examples, row_length, **options)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def keep_first(self, rows: int) -> None:
        """Take no more than the first rows."""
        self.rows = self.rows[:rows]

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of batch number `step`."""
        first = step * self.batch_size
        wanted = self.own(range(first, first + self.batch_size))
        return self.read([row if row < len(self.rows) else None for row in wanted])

    def __iter__(self) -> Iterator[Batch]:
        return prefetch(self.batch, 0, len(self))
