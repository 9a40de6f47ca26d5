"""ZeRO-1 (arXiv:1910.02054, 5.1): every rank computes with all weights, and updates its own.

A step of R ranks, each with its rows of the batch:

    backward         gradients of all weights, of this rank's rows
    reduce-scatter   each rank gets the sums of the rows (of weights) that it owns
    update           float32 weights and moments of those rows: they live nowhere else
    all-gather       everybody gets the updated weights, in the type products compute in

Nothing of it happens inside forward and backward, so those may be recorded in a CUDA graph; where
they are not, a bucket of gradients is sent as soon as it is complete, while the backward pass
goes on. No shape and no number of ranks must divide anything: what a rank owns is whole units of
rows (`rows.py`), and buffers are padded to the longest share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scratchlm.parallel.collectives import all_gather, reduce_scatter
from scratchlm.parallel.rows import Rows, share_out, units_of

BUCKET = 1 << 24  # elements that travel at a time
IN_FLIGHT = 4  # buckets of gradients on their way: each takes memory


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together."""

    names: tuple[str, ...]
    shares: list[list[Rows]]  # by rank
    width: int  # elements of the longest share
    dtype: torch.dtype  # that the weights travel in
    sizes: list[list[int]]  # by rank: elements of its rows, name by name, and of padding

    def places(self, buffer: Tensor) -> list[Tensor]:
        """Cut a buffer of all shares into the rows' places, in order."""
        sizes = [size for share in self.sizes for size in share]
        pieces = iter(buffer.view(-1).split(sizes))
        found = [[next(pieces) for _ in share] for share in self.sizes]
        return [piece for share in found for piece in share[:-1]]

    def own_places(self, buffer: Tensor, rank: int) -> list[Tensor]:
        """Cut the buffer of one share into its rows' places."""
        return list(buffer.split(self.sizes[rank])[:-1])


class Zero1:
    """A model's parameters, whole on every rank, and this rank's rows of them to update."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        low: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
    ) -> None:
        """Share the parameters out.

        Those in `low` become bfloat16, and float32 only where they are updated; those in `whole`
        are not cut. The device's own order of a backward pass, last parameter first, is that of
        the buckets.
        """
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters, self.low = parameters, low
        self.updated: dict[str, nn.Parameter] = {}  # what the optimizers move
        dtypes = {
            name: torch.bfloat16 if name in low else p.dtype for name, p in parameters.items()
        }
        self.buckets = [
            self._bucket(names, dtypes[names[0]], whole) for names in _by_bucket(parameters, dtypes)
        ]
        self.owned = {rows.name: rows for b in self.buckets for rows in b.shares[self.rank]}
        for name, rows in self.owned.items():
            p = parameters[name]
            own = p.data if name in whole else rows.of(p.data)
            self.updated[name] = nn.Parameter(own.clone() if name in low else own)
        for name in low:
            parameters[name].data = parameters[name].data.to(torch.bfloat16)
        # Where weights come from and go to: their storage stays what it is from now on.
        self._updated_flat = [
            [self.updated[rows.name].detach().view(-1) for rows in b.shares[self.rank]]
            for b in self.buckets
        ]
        self._weights_flat = [
            [_flat(parameters[rows.name].data, rows) for share in b.shares for rows in share]
            for b in self.buckets
        ]
        self._sent: list[tuple[Any, Tensor]] = []  # bucket by bucket
        self._ready: set[str] = set()
        self._kept: dict[str, Tensor] = {}  # gradients of micro-batches, added up
        self._norm_order = self._order_of_norms(whole)

    def _bucket(self, names: list[str], dtype: torch.dtype, whole: frozenset[str]) -> Bucket:
        shares = share_out({name: self.parameters[name] for name in names}, self.size, whole)
        sizes = [[self._size(rows) for rows in share] for share in shares]
        width = max(map(sum, sizes))
        padded = [[*share, width - sum(share)] for share in sizes]
        return Bucket(tuple(names), shares, width, dtype, padded)

    def _size(self, rows: Rows) -> int:
        p = self.parameters[rows.name]
        return (rows.stop - rows.start) * (p.shape[-1] if p.ndim > 1 else 1)

    # Gradients

    def send_when_ready(self) -> None:
        """From now on, send a bucket during the backward pass, as soon as it is complete."""
        for name, p in self.parameters.items():
            p.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
        self.is_last_backward = False

    is_last_backward = False  # of the micro-batches of a step

    def _arrived(self, name: str) -> None:
        if not self.is_last_backward:
            return
        self._ready.add(name)
        while len(self._sent) < len(self.buckets):  # in one order on all ranks
            bucket = self.buckets[len(self._sent)]
            if not self._ready.issuperset(bucket.names):
                return
            self._send(bucket)

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """Add a micro-batch's gradients to those before it in float32, and forget them.

        Autograd would add bfloat16 ones up as they are. Where there are none, it may.
        """
        for name, p in self.parameters.items() if self.low else ():
            if p.grad is not None and name in self._kept:
                self._kept[name].add_(p.grad)
            elif p.grad is not None:
                self._kept[name] = p.grad.to(torch.float32, copy=True)
            p.grad = None

    def _gradient(self, name: str) -> Tensor | None:
        kept, last = self._kept.get(name), self.parameters[name].grad
        return last if kept is None else kept if last is None else kept + last

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        first = self.parameters[bucket.names[0]]
        if len(self._sent) >= IN_FLIGHT and (before := self._sent[-IN_FLIGHT][0]) is not None:
            before.wait()
        sums = torch.empty(self.size, bucket.width, device=first.device)  # padding is never read
        found = {name: self._gradient(name) for name in bucket.names}
        if any(grad is None for grad in found.values()):
            sums.zero_()
        places, grads = [], []
        every = (rows for share in bucket.shares for rows in share)
        for rows, place in zip(every, bucket.places(sums), strict=True):
            grad = found[rows.name]
            if grad is not None:
                places.append(place)
                grads.append(_flat(grad, rows))
        _copy(places, grads)
        if self.size == 1:
            self._sent.append((None, sums[0]))
            return
        own = torch.empty(bucket.width, device=first.device)
        work = reduce_scatter(own, sums.view(-1), group=self.group, async_op=True)
        self._sent.append((work, own))

    def reduce_gradients(self) -> None:
        """Give what this rank updates the gradients of all ranks, added up."""
        for bucket in self.buckets[len(self._sent) :]:
            self._send(bucket)
        for bucket, (work, own) in zip(self.buckets, self._sent, strict=True):
            if work is not None:
                work.wait()
            places = bucket.own_places(own, self.rank)
            for rows, place in zip(bucket.shares[self.rank], places, strict=True):
                p = self.updated[rows.name]
                p.grad = place.view_as(p)
        self._sent, self._ready, self._kept = [], set(), {}

    def norms(self) -> Tensor:
        """Return the norms of all units of the gradient, in one order, on every rank."""
        own = [unit for p in self.updated.values() for unit in units_of(_present(p.grad))]
        places, longest = self._norm_order
        padded = torch.zeros(longest, device=places.device)
        if own:
            padded[: len(own)] = torch.stack(torch._foreach_norm(own))
        found = torch.empty(self.size * longest, device=places.device)
        all_gather(found, padded, group=self.group)
        return found[places]

    def _order_of_norms(self, whole: frozenset[str]) -> tuple[Tensor, int]:
        """Return where in the gathered norms each unit's lies, parameter by parameter."""
        device = next(iter(self.parameters.values())).device
        shares = [[rows for b in self.buckets for rows in b.shares[r]] for r in range(self.size)]
        counts: list[list[tuple[str, int, int]]] = []  # by rank: name, first row, units
        for share in shares:
            counts.append([])
            for rows in share:
                p = self.parameters[rows.name]
                cut = p.detach() if rows.name in whole else rows.of(p.detach())
                counts[-1].append((rows.name, rows.start, len(units_of(cut))))
        longest = max(1, max(sum(n for *_, n in share) for share in counts))
        places: dict[str, list[tuple[int, int, int]]] = {}
        for rank, counted in enumerate(counts):
            at = rank * longest
            for name, start, units in counted:
                places.setdefault(name, []).append((start, at, units))
                at += units
        order = [
            at + index
            for name in self.parameters
            for _, at, units in sorted(places[name])
            for index in range(units)
        ]
        return torch.tensor(order, dtype=torch.long, device=device), longest

    # Weights

    @torch.no_grad()
    def share_weights(self) -> None:
        """Give every rank the weights that the others have updated."""
        waiting: tuple[int, Any, Tensor] | None = None
        for number, bucket in enumerate(self.buckets):
            first = self.parameters[bucket.names[0]]
            own = torch.empty(bucket.width, dtype=bucket.dtype, device=first.device)
            _copy(bucket.own_places(own, self.rank), self._updated_flat[number])
            every, work = own[None], None
            if self.size > 1:
                every = own.new_empty(self.size, bucket.width)
                work = all_gather(every.view(-1), own, group=self.group, async_op=True)
            if waiting is not None:  # one bucket travels while another is put in its place
                self._receive(*waiting)
            waiting = number, work, every
        if waiting is not None:
            self._receive(*waiting)

    def _receive(self, number: int, work: Any, every: Tensor) -> None:
        if work is not None:
            work.wait()
        _copy(self._weights_flat[number], self.buckets[number].places(every))

    def after_evaluation(self) -> None:
        """Do nothing: weights are whole."""


def _flat(tensor: Tensor, rows: Rows) -> Tensor:
    """Return rows of a tensor of a parameter's shape, laid out in one dimension."""
    row = tensor.shape[-1] if tensor.ndim > 1 else 1
    return tensor.reshape(-1)[rows.start * row : rows.stop * row]


def _copy(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy many tensors with few kernels: of small ones, launching is what takes time."""
    if places:
        torch._foreach_copy_(places, values)


def _present(grad: Tensor | None) -> Tensor:
    assert grad is not None, "reduce_gradients comes first"
    return grad


def _by_bucket(
    parameters: dict[str, nn.Parameter], dtypes: dict[str, torch.dtype]
) -> Iterable[list[str]]:
    """Lay parameters together, last first, in buckets of one dtype and about this many elements."""
    open_: dict[torch.dtype, list[str]] = {}
    for name in reversed(parameters):
        names = open_.setdefault(dtypes[name], [])
        names.append(name)
        if sum(parameters[each].numel() for each in names) >= BUCKET:
            yield open_.pop(dtypes[name])
    yield from open_.values()
