"""Collectives that a backward pass goes through: each with its counterpart.

    forward                          backward
    copy_in      as it is            sum over ranks             x enters what ranks share
    reduce_out   sum over ranks      as it is                   partial results leave it
    gather_rows  join along seq      sum, then cut along seq    the same, where ranks
    scatter_rows sum, then cut       join along seq             hold a part of each sequence
    cut_rows     cut along seq       join along seq
    join_rows    join along seq      cut along seq

(arXiv:1909.08053, section 3; with sequences cut between the layers, arXiv:2205.05198, section 4.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

# torch renamed them: 2.13 warns of the old names, 2.11 has no others
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SEQ = -2  # the dimension of (…, seq, d_model) that is cut


def _sum(x: Tensor, group: Any) -> Tensor:
    y = x.contiguous().clone()
    dist.all_reduce(y, group=group)
    return y


def _join(x: Tensor, group: Any) -> Tensor:
    size, first = dist.get_world_size(group), x.movedim(SEQ, 0).contiguous()
    every = first.new_empty(size * len(first), *first.shape[1:])
    all_gather(every, first, group=group)
    return every.movedim(0, SEQ).contiguous()


def _sum_and_cut(x: Tensor, group: Any) -> Tensor:
    size, first = dist.get_world_size(group), x.movedim(SEQ, 0).contiguous()
    own = first.new_empty(len(first) // size, *first.shape[1:])
    reduce_scatter(own, first, group=group)
    return own.movedim(0, SEQ).contiguous()


def _cut(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group), SEQ)[dist.get_rank(group)].contiguous()


def _keep(x: Tensor, group: Any) -> Tensor:
    return x


def _pair(name: str, going: Any, back: Any) -> Any:
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return going(x, group).view_as(x) if going is _keep else going(x, group)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return back(grad_output, ctx.group), None

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (Function,), members).apply  # type: ignore[attr-defined]


copy_in = _pair("CopyIn", _keep, _sum)
reduce_out = _pair("ReduceOut", _sum, _keep)
gather_rows = _pair("GatherRows", _join, _sum_and_cut)
scatter_rows = _pair("ScatterRows", _sum_and_cut, _join)
cut_rows = _pair("CutRows", _cut, _join)
join_rows = _pair("JoinRows", _join, _cut)


class _Weaken(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * ctx.factor, None


def weaken_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x; its gradient is multiplied by `factor`."""
    return _Weaken.apply(x, factor)


def join_last(x: Tensor, sizes: list[int], group: Any) -> Tensor:
    """Join along the last dimension, where ranks have parts of these sizes; going back, cut."""
    return _JoinLast.apply(x, sizes, group)


class _JoinLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        padded = x.new_zeros(*x.shape[:-1], max(sizes))
        padded[..., : x.shape[-1]] = x
        every = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(every, padded, group=group)
        return torch.cat([part[..., :n] for part, n in zip(every, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        own = grad_output.split(ctx.sizes, dim=-1)[dist.get_rank(ctx.group)]
        return own.contiguous(), None, None
