"""bf16 shadow weights: the layers' matrices once more, rounded, as products read them.

Under autocast every step rounds every matrix for its products, and widens every gradient again: 12
bytes a parameter, in hundreds of small kernels. A shadow is that rounded copy, kept beside the
matrix; Q, K and V have one together, and so have W1 and W3, since they multiply together. The
update that moves a matrix writes its shadow as well (`training/kernel_adamw.py`), and reads the
gradient as the product left it, in bfloat16. The numbers are those of autocast.

An accelerated layer has its shadow (`module.shadow`) for the length of a backward pass alone:
evaluation, generation and anybody's own loop see the model as it is. A matrix that other code
has changed is rounded anew before the next step.

Matrices that do not learn (the base of an adapter), are bfloat16 already and lie side by side in
memory are read as one, without a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from scratchlm.accelerate.attention import AcceleratedAttention
from scratchlm.accelerate.joined_weights import as_one_matrix
from scratchlm.accelerate.layers import AcceleratedLinear, AcceleratedSwiGLU
from scratchlm.accelerate.table import has_fast_ops, has_plain_adapters, is_plain
from scratchlm.model import MLP

LOW = torch.bfloat16


class Group:
    """Matrices that multiply one input, the layer that reads them, and their shadow."""

    def __init__(self, owner: Any, weights: list[nn.Parameter]) -> None:
        self.owner, self.weights = owner, weights
        self.rows = [len(weight) for weight in weights]
        width, device = weights[0].shape[1], weights[0].device
        self.shadow = torch.empty(
            sum(self.rows), width, dtype=LOW, device=device, requires_grad=True
        )

    @property
    def is_observed(self) -> bool:
        """Whether a gradient has hooks: it then comes from autograd, as ever."""
        return any(
            w._backward_hooks or getattr(w, "_post_accumulate_grad_hooks", None)
            for w in self.weights
        )


class ShadowWeights:
    """Rounded copies of the matrices of a model's layers, and the gradients that reach them."""

    def __init__(self, model: nn.Module, *, low_gradients: bool = False) -> None:
        self.low_gradients = low_gradients  # whether the optimizer reads them in bfloat16
        self.groups = list(weight_groups(model))
        self.frozen = list(frozen_matrices(model))
        self.parts: dict[Tensor, Tensor] = {}  # a matrix -> its rows of a shadow
        self._versions: dict[Tensor, int] = {}  # of the matrix, when the two were equal
        for group in self.groups:
            parts = group.shadow.detach().split(group.rows)
            self.parts.update(zip(group.weights, parts, strict=True))
            for weight in group.weights:
                cast(Any, weight).grad_dtype = None  # a gradient may be bfloat16 or float32
        self.refresh()

    def refresh(self) -> None:
        """Round those matrices that have changed since their shadows were written."""
        old = [p for p in self.parts if self._versions.get(p) != p._version]
        if old:
            with torch.no_grad():
                torch._foreach_copy_([self.parts[p] for p in old], old)
            self.mark_equal(old)

    def mark_equal(self, parameters: Iterable[Tensor]) -> None:
        """Take note that these matrices' shadows hold what they hold."""
        for p in parameters:
            if p in self.parts:
                self._versions[p] = p._version

    @contextlib.contextmanager
    def visible(self) -> Iterator[None]:
        """Let the layers read the shadows; afterwards, hand the gradients to the matrices."""
        visible = [group for group in self.groups if not group.is_observed]
        lent = [(group.owner, group.shadow) for group in visible] + self.frozen
        for owner, shadow in lent:
            owner.shadow = shadow
        try:
            yield
        finally:
            for owner, _ in lent:
                owner.shadow = None
        self._hand_over()

    def forget_gradients(self) -> None:
        """Drop what a backward pass that failed has left."""
        for group in self.groups:
            group.shadow.grad = None

    def _hand_over(self) -> None:
        for group in self.groups:
            gradient, group.shadow.grad = group.shadow.grad, None
            if gradient is None:
                continue
            for weight, part in zip(group.weights, gradient.split(group.rows), strict=True):
                if weight.grad is not None:  # a sum of several is float32, as autocast's is
                    weight.grad = weight.grad.float().add_(part)
                else:
                    weight.grad = part if self.low_gradients else part.float()


def frozen_matrices(model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    """Return the layers whose joined matrix does not learn, with that matrix as it lies there."""
    layers: list[Any] = list(model.layers)  # type: ignore[arg-type]
    for layer in layers:
        joined: list[tuple[Any, list[Any]]] = []
        if isinstance(layer.attn, AcceleratedAttention):
            attn = layer.attn
            joined.append((attn, [attn.q_proj, attn.k_proj, attn.v_proj]))
        if isinstance(layer.ffn, AcceleratedSwiGLU):
            joined.append((layer.ffn, [layer.ffn.w1, layer.ffn.w3]))
        for owner, linears in joined:
            if any(not (is_plain(m) or has_plain_adapters(m)) for m in linears):
                continue
            weights = [m.weight for m in linears]
            if any(weight.requires_grad or weight.dtype != LOW for weight in weights):
                continue
            matrix = as_one_matrix(weights)
            if matrix is not None:
                yield owner, matrix.detach()


def weight_groups(model: nn.Module) -> Iterator[Group]:
    """Return the layers' matrices that learn, together those that multiply one input."""
    layers: list[Any] = list(model.layers)  # type: ignore[arg-type]
    for layer in layers:
        attn, ffn = layer.attn, layer.ffn
        groups: list[tuple[Any, list[Any]]] = []
        if isinstance(attn, AcceleratedAttention):
            groups += [(attn, [attn.q_proj, attn.k_proj, attn.v_proj])]
            groups += [(attn.output_proj, [attn.output_proj])]
        if isinstance(ffn, AcceleratedSwiGLU):
            groups += [(ffn, [ffn.w1, ffn.w3]), (ffn.w2, [ffn.w2])]
        elif isinstance(ffn, MLP):
            groups += [(ffn.w1, [ffn.w1]), (ffn.w2, [ffn.w2])]
        for owner, linears in groups:
            ours = all(
                type(m) is AcceleratedLinear and has_fast_ops(m, ("linear",)) for m in linears
            )
            if ours and all(m.weight.requires_grad for m in linears):
                yield Group(owner, [m.weight for m in linears])
