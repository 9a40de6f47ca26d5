"""Fully sharded data parallelism, by torch's FSDP2: for models whose states do not fit one device.

Every parameter is cut along its first dimension, and a rank keeps its part of weights, gradients
and moments. A block's weights are gathered when it is called, forward and backward, and its
gradients are reduce-scattered when it is done. Inside a call they are plain tensors: layers and
kernels see nothing of it.

HSDP cuts over the ranks of one machine, whose links are fast, and repeats that on each machine:
gradients are then added up over machines, once a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from scratchlm import acceleration
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.parallel.ranks import Ranks

# Methods of a model that use its weights, besides `forward`.
ENTRIES = ("loss", "hidden", "head_loss")


class FullyShard:
    """A model cut over the ranks of the data dimension, or over those of one machine."""

    def __init__(
        self, model: TransformerLM, ranks: Ranks, *, low: bool = False, per_machine: bool = False
    ) -> None:
        """Cut it; with `low`, blocks are gathered in bfloat16, and gradients added in float32."""
        self.model, self.ranks = model, ranks
        mesh, self.copy = ranks.mesh["data"], 0
        if per_machine:
            mesh = _machines(ranks)
            self.copy = mesh.get_local_rank("copy")
        self.group = mesh.get_group("data")
        inner = MixedPrecisionPolicy(cast_forward_inputs=False)
        if low:
            inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for layer in model.layers:
            _shard(layer, mesh, inner)
            _hide_context(layer)
        _shard(model, mesh, MixedPrecisionPolicy(cast_forward_inputs=False))
        move_to(model, ranks.device)
        _enter_once(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum: targets are weighed beforehand
                module.set_force_sum_reduction_for_comms(True)
        self.updated = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def send_when_ready(self) -> None:
        """Do nothing: FSDP sends a block's gradients when the block is done."""

    is_last_backward = False

    def reduce_gradients(self) -> None:
        """Do nothing: the gradients are sums already."""

    def share_weights(self) -> None:
        """Do nothing: weights are gathered when they are used."""

    def after_evaluation(self) -> None:
        """Give back what a forward without a backward pass has gathered."""
        cast(Any, self.model).reshard()


def move_to(model: nn.Module, device: torch.device) -> None:
    """Move what a rank has of a model to its device; a model without values gets room for them."""
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=device)
    else:
        model.to(device)


def _machines(ranks: Ranks) -> DeviceMesh:
    """Lay the ranks that share a batch out as (copy, data): one copy of the model a machine."""
    inside, rest = divmod(ranks.per_machine, ranks.tensor_size)
    if rest or ranks.data_size % max(1, inside):
        raise ScratchLMError(
            f"train.parallel=hsdp needs machines alike: {ranks.per_machine} ranks on this one do "
            f"not divide {ranks.size} by train.tp={ranks.tensor_size}"
        )
    grid = (ranks.data_size // inside, inside, ranks.tensor_size)
    mesh = init_device_mesh(ranks.device.type, grid, mesh_dim_names=("copy", "data", "tensor"))
    return mesh["copy", "data"]


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Cut a module's weights; it is of a subclass then, with the same forward."""
    kind = type(module)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    acceleration.register_class(type(module), kind)


def _enter_once(model: nn.Module) -> None:
    """Let FSDP know of each entry into a model, and of none inside another.

    FSDP copies the lists it finds among an entry's arguments; one that a model fills must not be.
    """
    is_inside = False

    def guarded(own: Callable[..., Any], entry: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return own(*given, **options)
            is_inside = True
            try:
                return entry(*given, **options)
            finally:
                is_inside = False

        return call

    for name in ENTRIES:
        own = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, guarded(own, getattr(model, name)))


class _Hidden:
    """An argument that FSDP does not look into."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _hide_context(layer: nn.Module) -> None:
    """Hand a layer the context itself: FSDP would hand it a copy, and routes noted there are lost.

    Two hooks, one before FSDP's own and one after it.
    """

    def hide(module: nn.Module, given: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, {name: _Hidden(value) for name, value in options.items()}

    def show(module: nn.Module, given: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, {name: hidden.value for name, hidden in options.items()}

    layer.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)
    layer.register_forward_pre_hook(show, with_kwargs=True)


def first_row(p: nn.Parameter) -> int:
    """Return where this rank's part of a cut parameter begins."""
    if not isinstance(p, DTensor):
        return 0
    # FSDP2 cuts as `chunk` does: all parts but the last ones are equally long
    size, rank = p.device_mesh["data"].size(), p.device_mesh.get_local_rank("data")
    return min(rank * -(-p.shape[0] // size), p.shape[0])
