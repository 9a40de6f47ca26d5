"""How a model lies over ranks: tensor parallelism across a row of them, ZeRO-1 or FSDP2 down.

One object that a training step talks to. `updated` is what this rank's optimizers move; `boxes_of`
says where each of those numbers lies in the whole tensor, which is all that a checkpoint needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.parallel.context import ContextParallel
from scratchlm.parallel.fsdp import FullyShard, first_row, move_to
from scratchlm.parallel.ranks import Ranks
from scratchlm.parallel.rows import as_rows, boxes, local, units_of
from scratchlm.parallel.tensor import Box, TensorParallel
from scratchlm.parallel.zero1 import Zero1


class Layout:
    """A model spread over ranks."""

    def __init__(
        self,
        model: TransformerLM,
        ranks: Ranks,
        kind: str = "zero1",
        *,
        low: bool = False,
        whole: Callable[[str, Tensor], bool] = lambda name, p: False,
    ) -> None:
        """Spread it. `low`: weights that products read are bfloat16; `whole`: is never cut."""
        self.ranks, self.tensor = ranks, None
        self.context = ContextParallel(model, ranks) if ranks.context_size > 1 else None
        if ranks.tensor_size > 1:
            self.tensor = TensorParallel(model, ranks)
        if kind == "zero1":
            move_to(model, ranks.device)  # what was on `meta` has other parameters then
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        uncut = frozenset(n for n, p in self.parameters.items() if whole(n, p))
        if uncut and (self.tensor is not None or kind != "zero1"):
            raise ScratchLMError("train.optimizer=muon needs whole matrices: train.parallel=zero1")
        self.shapes = {n: tuple(p.shape) for n, p in self.parameters.items()}  # on this row
        self.data: Zero1 | FullyShard
        if kind != "zero1":
            self.data = FullyShard(model, ranks, low=low, per_machine=kind == "hsdp")
        else:
            read_low = (n for n, p in self.parameters.items() if low and is_read_low(n, p))
            self.data = Zero1(
                self.parameters, ranks.data_group, low=frozenset(read_low), whole=uncut
            )

    @property
    def updated(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizers move, under the names of the state dict."""
        return self.data.updated

    # A step

    def begin_backward(self, is_last: bool) -> None:
        """Say whether the next backward pass completes the gradients."""
        # Where layers talk too, nothing is sent between: all ranks must do it in one order.
        alone = self.tensor is None and self.context is None
        self.data.is_last_backward = is_last and alone

    def end_backward(self, is_last: bool) -> None:
        """Put the gradients of a micro-batch aside, unless they are the last."""
        if self.keeps_gradients and not is_last:
            assert isinstance(self.data, Zero1)
            self.data.keep_gradients()

    @property
    def keeps_gradients(self) -> bool:
        """Whether micro-batches are added up here, in float32, not by autograd."""
        return isinstance(self.data, Zero1) and bool(self.data.low) and self.tensor is None

    def reduce_gradients(self) -> None:
        """Add up the gradients of all ranks, each of what this rank updates."""
        if self.tensor is not None:
            whole = self.parameters if isinstance(self.data, Zero1) else self.updated
            self.tensor.reduce_gradients(whole)
        self.data.reduce_gradients()

    def sum(self, loss: Tensor) -> Tensor:
        """Add up what each rank's rows contribute to the loss."""
        total = loss.clone()
        dist.all_reduce(total, group=self.ranks.data_group)
        return total

    def gradients(self) -> list[Tensor]:
        """Return the gradients this rank updates with, as plain tensors."""
        return [local(p.grad) for p in self.updated.values() if p.grad is not None]

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient."""
        if isinstance(self.data, Zero1):
            norms = self.data.norms()
            if self.tensor is None:
                return torch.linalg.vector_norm(norms)
            counts = [len(units_of(p.detach())) for p in self.parameters.values()]
            each = dict(zip(self.parameters, norms.split(counts), strict=True))
            squares = {name: found.square().sum() for name, found in each.items()}
        else:
            squares = {
                name: local(p.grad).float().square().sum()
                for name, p in self.updated.items()
                if p.grad is not None
            }
        return self._add_up(squares).sqrt()

    def _add_up(self, squares: dict[str, Tensor]) -> Tensor:
        """Add squares up: over the row those of cut weights; with FSDP down the column."""
        zero = torch.zeros((), device=self.ranks.device)
        kinds: dict[bool, list[Tensor]] = {True: [zero], False: [zero]}
        for name, square in squares.items():
            kinds[self.tensor is not None and self.tensor.is_cut(name)].append(square)
        cut, same = (torch.stack(kinds[kind]).sum() for kind in (True, False))
        if self.tensor is not None:
            dist.all_reduce(cut, group=self.ranks.tensor_group)
        total = cut + same
        if isinstance(self.data, FullyShard):
            dist.all_reduce(total, group=self.data.group)
        return total

    def share_weights(self) -> None:
        """Let every rank have the updated weights it computes with."""
        self.data.share_weights()

    def after_evaluation(self) -> None:
        """Give back what an evaluation has gathered."""
        self.data.after_evaluation()

    # What a checkpoint holds

    def boxes_of(self, name: str, value: Tensor) -> Iterable[tuple[Box, Tensor]]:
        """Yield the boxes of a whole tensor that this rank is to write, and their values.

        `value` belongs to `updated[name]` and has its shape, or is one number.
        """
        if self.tensor is not None and not self.tensor.is_cut(name) and self.ranks.tensor_rank:
            return  # the first rank of the row writes it
        if isinstance(self.data, FullyShard) and self.data.copy:
            return  # the first copy is written
        value = local(value)
        start, stop = self._row_bounds(name)
        if value.ndim == 0:
            if start == 0 and stop > 0 and self.ranks.tensor_rank == 0:
                yield Box((), (), ()), value
            return
        laid, begin = as_rows(value.contiguous()), 0
        for offsets, rows in boxes(self.shapes[name], start, stop):
            box = self._in_whole(name, offsets, rows)
            yield box, laid[begin : begin + rows].reshape(box.lengths)
            begin += rows

    def _row_bounds(self, name: str) -> tuple[int, int]:
        """Return which rows of this row's part of a parameter this rank updates."""
        if isinstance(self.data, Zero1):
            owned = self.data.owned[name]
            return owned.start, owned.stop
        p, shape = self.updated[name], self.shapes[name]
        inner = 1  # rows in one step of the first dimension
        for side in shape[1:-1]:
            inner *= side
        start = first_row(p) * inner
        return start, start + local(p.data).shape[0] * inner

    def _in_whole(self, name: str, offsets: tuple[int, ...], rows: int) -> Box:
        shape = self.shapes[name]
        lengths = [1] * len(shape)
        lengths[-1] = shape[-1]
        lengths[max(0, len(shape) - 2)] = rows
        whole, shift = shape, (0,) * len(shape)
        if self.tensor is not None:
            box = self.tensor.boxes[name]
            whole, shift = box.shape, box.offsets
        moved = tuple(a + b for a, b in zip(offsets, shift, strict=True))
        return Box(tuple(whole), moved, tuple(lengths))

    def wanted(self, name: str) -> list[Box]:
        """Return the boxes of a whole tensor that make up what this rank updates, in order."""
        start, stop = self._row_bounds(name)
        found = boxes(self.shapes[name], start, stop)
        return [self._in_whole(name, offsets, rows) for offsets, rows in found]


def is_read_low(name: str, p: Tensor) -> bool:
    """Whether products alone read a weight, and so may read it in bfloat16.

    Embeddings begin the residual stream and norms multiply it: those stay float32.
    """
    return p.ndim >= 2 and not name.startswith(("token_embeddings.", "position_embeddings."))
