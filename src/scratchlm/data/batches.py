"""Batches as a pure function of (seed, step, rank): nothing to save, any step at random.

A token file of N ids gives transitions id_t → id_{t+1}. They are laid on a ring of T transitions:
T = N − 1, or T = N where the file ends with the end-of-text id, after which its first id may
rightly follow. Epoch e cuts the ring, from a per-epoch offset, into W = ⌈T / C⌉ windows of
C = context_length transitions, and takes them in a per-epoch order:

    g = step · batch_size + row,  e = ⌊g / W⌋,  w = π_e(g mod W)
    window: transitions o_e + w·C … o_e + w·C + C − 1  (mod T)

π_e is a keyed permutation (`permutation.py`) and o_e a keyed hash modulo T. So in every epoch
every id is a target exactly once (the very first only where T = N); the last window, when C does
not divide T, runs on into the next one and those targets are set to IGNORE_INDEX. The offset
moves the cuts from epoch to epoch: over many epochs an id is seen with every length of context,
as with random crops, without leaving any id out.

Rank r of R takes rows ⌊r·B/R⌋ … ⌊(r+1)·B/R⌋ − 1 of the global batch of B rows, which is the same
for every R. A batch may hold the end of one epoch and the beginning of the next.

Documents: as a *target* the end-of-text id closes its document; as an *input* it opens the next
one, whose first id it predicts. With `document_ids=True` the ids in a row are numbered this way,
from 0, so that attention can be kept within equal numbers; no target is lost by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import itemgetter
from typing import Self

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from scratchlm.data.permutation import derive_key, permute
from scratchlm.data.prefetch import prefetch
from scratchlm.data.token_file import TokenFile

ORDER_BLOCK = 4096
IGNORE_INDEX = -100  # the target that cross-entropy ignores
_ORDER, _OFFSET = 1, 2  # purposes a key is derived for


@dataclass(frozen=True)
class Batch:
    """Rows of input ids, the ids that follow them, and which document each input belongs to."""

    inputs: Int[Tensor, "rows context"]
    targets: Int[Tensor, "rows context"]
    document_ids: Int[Tensor, "rows context"] | None = None

    def num_targets(self) -> int:
        """Count the targets that are not ignored."""
        return int((self.targets != IGNORE_INDEX).sum())

    def cut(self, rows: int) -> Iterator[Self]:
        """Cut into pieces of at most `rows` rows."""
        for start in range(0, len(self.inputs), rows):
            yield self._each(itemgetter(slice(start, start + rows)))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Copy to a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change every tensor, those of a subclass too."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: change(v) for k, v in tensors.items() if v is not None})


class Windows:
    """The ring of transitions of one token file, cut into rows."""

    def __init__(
        self,
        tokens: TokenFile,
        context_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        document_ids: bool = False,
        pin_memory: bool = False,
    ) -> None:
        for name, value in (("context_length", context_length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1; got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0 … world_size−1; got {rank=}, {world_size=}")
        if batch_size < world_size:
            raise ValueError(
                f"batch_size must give every rank a row; got {batch_size=}, {world_size=}"
            )
        if len(tokens) < 2:
            raise ValueError(f"{tokens.path}: batches need at least 2 ids; got {len(tokens)}")
        if document_ids and tokens.info.end_of_text is None:
            raise ValueError(
                f"{tokens.path}: document_ids=True needs an end-of-text id; the file has none"
            )
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs a CUDA device; none is available")
        self.tokens, self.context_length, self.batch_size = tokens, context_length, batch_size
        self.rank, self.world_size = rank, world_size
        self.document_ids, self.pin_memory = document_ids, pin_memory
        self.first_follows_last = tokens.ends_with_end_of_text()
        self.num_transitions = len(tokens) - (not self.first_follows_last)
        self.num_windows = -(-self.num_transitions // context_length)

    @property
    def rows(self) -> int:
        """Rows per batch of this rank."""
        first, last = self._row_bounds()
        return last - first

    def _row_bounds(self) -> tuple[int, int]:
        """Return which rows of a batch are this rank's; ranks differ by one row at most."""
        size, rank, world = self.batch_size, self.rank, self.world_size
        return size * rank // world, size * (rank + 1) // world

    def rank_rows(self, step: int) -> np.ndarray:
        """Return the global row indices of this rank at `step`."""
        if step < 0:
            raise ValueError(f"step must be >= 0; got {step}")
        first, last = (step * self.batch_size + bound for bound in self._row_bounds())
        return np.arange(first, last, dtype=np.int64)

    def read_windows(self, starts: np.ndarray, num_valid: np.ndarray) -> Batch:
        """Read the windows at `starts`; targets of row i from num_valid[i] on are ignored."""
        context = self.context_length
        raw = np.empty((len(starts), context + 1), dtype=self.tokens.dtype)
        wrapped = starts + context + 1 > len(self.tokens)
        for row in np.flatnonzero(~wrapped):
            self.tokens.read_into(int(starts[row]), raw[row])
        raw[wrapped] = 0
        self.tokens.check_ids(raw)
        inputs = raw[:, :-1].astype(np.int64)
        targets = raw[:, 1:].astype(np.int64)
        for row in np.flatnonzero(wrapped):
            inputs[row], targets[row] = self._ring_row(int(starts[row]))
        for row in np.flatnonzero(num_valid < context):
            targets[row, num_valid[row] :] = IGNORE_INDEX
        document_ids = self._number_documents(starts, inputs) if self.document_ids else None
        return Batch(
            self._tensor(inputs),
            self._tensor(targets),
            None if document_ids is None else self._tensor(document_ids),
        )

    def _ring_row(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Read one row that wraps around the end of the file."""
        tokens, inputs, targets, missing = self.tokens, [], [], self.context_length
        while missing:
            run = min(missing, self.num_transitions - start)
            inputs.append(tokens.read(start, run))
            targets.append(tokens.read(start + 1, min(run, len(tokens) - start - 1)))
            if start + run == len(tokens):  # the transition from the last id to the first
                targets.append(tokens.read(0, 1))
            missing, start = missing - run, 0
        row = np.concatenate(inputs), np.concatenate(targets)
        tokens.check_ids(np.stack(row))
        return row

    def _number_documents(self, starts: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        opens = inputs == self.tokens.info.end_of_text
        if not self.first_follows_last:  # wrapping around the ring starts a new document too
            position = starts[:, None] + np.arange(self.context_length)
            opens |= position % self.num_transitions == 0
        opens[:, 0] = False
        return np.cumsum(opens, axis=1, dtype=np.int64)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.pin_memory else tensor


class Batches(Windows):
    """Training batches: shuffled windows, epoch after epoch, indefinitely.

    `batch_size` counts the rows of all ranks together.
    """

    def __init__(
        self,
        tokens: TokenFile,
        context_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        document_ids: bool = False,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            tokens,
            context_length,
            batch_size,
            rank,
            world_size,
            document_ids=document_ids,
            pin_memory=pin_memory,
        )
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be in 0 … 2^64−1; got {seed}")
        self.seed = seed
        # Recent blocks of the order: permuting many positions at once costs little more than one.
        self._order_block = lru_cache(maxsize=4)(self._compute_order_block)

    def _compute_order_block(self, epoch: int, number: int) -> np.ndarray:
        positions = np.arange(
            number * ORDER_BLOCK, min((number + 1) * ORDER_BLOCK, self.num_windows)
        )
        return permute(positions, self.num_windows, derive_key(self.seed, epoch, _ORDER))

    def _order(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Return the windows at positions first … last of an epoch's order."""
        numbers = range(first // ORDER_BLOCK, last // ORDER_BLOCK + 1)
        order = np.concatenate([self._order_block(epoch, number) for number in numbers])
        before = numbers[0] * ORDER_BLOCK
        return order[first - before : last - before + 1]

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of the batch at `step`."""
        index = self.rank_rows(step)
        epochs, positions = index // self.num_windows, index % self.num_windows
        starts, num_valid = np.empty_like(index), np.empty_like(index)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            in_epoch = epochs == epoch
            starts[in_epoch], num_valid[in_epoch] = self.rows_of(epoch, positions[in_epoch])
        return self.read_windows(starts, num_valid)

    def rows_of(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the rows at successive positions of an epoch start, and their lengths."""
        order = self._order(epoch, int(positions[0]), int(positions[-1]))
        offset = derive_key(self.seed, epoch, _OFFSET) % self.num_transitions
        first = order * self.context_length
        return (first + offset) % self.num_transitions, self.num_transitions - first

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> Iterator[Batch]:
        """Yield the batches from `start_step` on, read ahead in the background, in order."""
        return prefetch(self.batch, start_step, stop_step)


class ValidationBatches(Windows):
    """The whole file once, in order, every target once, always the same.

    Every batch has the full shape; the last one is padded with rows whose targets are all ignored.
    Sum the losses and divide by the number of targets: a mean of batch means is not the mean.
    """

    def __len__(self) -> int:
        return -(-self.num_windows // self.batch_size)

    def keep_first(self, rows: int) -> None:
        """Take no more than the first rows."""
        self.num_windows = min(self.num_windows, rows)

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of batch number `step`; rows past the last are padding."""
        if step >= len(self):
            raise IndexError(f"step must be below {len(self)}; got {step}")
        index = self.rank_rows(step)
        padding = index >= self.num_windows
        starts, num_valid = self.rows_at(np.where(padding, 0, index))
        return self.read_windows(starts, np.where(padding, 0, num_valid))

    def rows_at(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where these rows of the file start, and their lengths."""
        first = index * self.context_length
        return first, self.num_transitions - first

    def __iter__(self) -> Iterator[Batch]:
        return prefetch(self.batch, 0, len(self))
