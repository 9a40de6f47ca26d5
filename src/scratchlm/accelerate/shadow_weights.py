"""The layers' matrices once more in bfloat16: what products read, and what gradients are of.

Under autocast every step rounds every matrix for its products, and widens every gradient again: 12
bytes a parameter to and fro, in hundreds of small kernels. A twin is that rounded copy, kept beside
the matrix; Q, K and V have one together, and so have W1 and W3, since they multiply together. The
update that moves a matrix writes its twin as well (`kernel_adamw.py`), and reads the gradient as
the product left it, in bfloat16. The numbers are those of autocast.

A twin is an attribute of the first matrix it is of, and there for the length of a backward pass
alone: `ops/fast.py` finds it by `twin_of`; evaluation, generation and anybody's own loop see the
model as it is. A matrix that somebody else has changed is rounded anew before the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from scratchlm.model import TransformerLM
from scratchlm.model.layers import MLP, Linear, SwiGLU
from scratchlm.ops import OPS

LOW = torch.bfloat16


class Twins:
    """Rounded copies of the matrices of a model's layers, and the gradients that reach them."""

    def __init__(self, model: TransformerLM, *, low_gradients: bool = False) -> None:
        self.low_gradients = low_gradients  # whether the optimizer reads them in bfloat16
        self.groups: list[tuple[list[Any], Tensor]] = []  # matrices, and their twin
        self.parts: dict[Tensor, Tensor] = {}  # a matrix -> its rows of a twin
        self._versions: dict[Tensor, int] = {}  # of the matrix, when the two were equal
        for weights in multiplied_together(model):
            rows = [len(weight) for weight in weights]
            width, device = weights[0].shape[1], weights[0].device
            twin = torch.empty(sum(rows), width, dtype=LOW, device=device, requires_grad=True)
            self.groups.append((weights, twin))
            self.parts.update(zip(weights, twin.detach().split(rows), strict=True))
            for weight in weights:
                cast(Any, weight).grad_dtype = None  # a gradient may be bfloat16 or float32
        self.refresh()

    def refresh(self) -> None:
        """Round those matrices that have changed since somebody wrote their twins."""
        old = [p for p in self.parts if self._versions.get(p) != p._version]
        if old:
            with torch.no_grad():
                torch._foreach_copy_([self.parts[p] for p in old], old)
            self.are_equal(old)

    def are_equal(self, parameters: Iterable[Tensor]) -> None:
        """Take note that these matrices' twins hold what they hold."""
        for p in parameters:
            if p in self.parts:
                self._versions[p] = p._version

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the ops find the twins; afterwards, hand the gradients to the matrices.

        A matrix whose gradient somebody listens to gets it from autograd, as without twins.
        """
        shown = [group for group in self.groups if not any(map(_is_listened_to, group[0]))]
        for weights, twin in shown:
            weights[0].twin = twin
        try:
            yield
        finally:
            for weights, _ in shown:
                del weights[0].twin
        self._hand_over()

    def _hand_over(self) -> None:
        for weights, twin in self.groups:
            gradient, twin.grad = twin.grad, None
            if gradient is None:
                continue
            parts = gradient.split([len(weight) for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                if weight.grad is not None:  # a sum of several is float32, as autocast's is
                    weight.grad = weight.grad.float().add_(part)
                else:
                    weight.grad = part if self.low_gradients else part.float()


def multiplied_together(model: TransformerLM) -> Iterator[list[nn.Parameter]]:
    """Name the layers' matrices that learn, together those that multiply one input."""
    layers: list[Any] = list(model.layers)  # blocks, to a type checker plain modules
    for layer in layers:
        attn, ffn = layer.attn, layer.ffn
        groups: list[list[Linear]]
        groups = [[attn.q_proj, attn.k_proj, attn.v_proj], [attn.output_proj]]
        if isinstance(ffn, SwiGLU):
            groups += [[ffn.w1, ffn.w3], [ffn.w2]]
        elif isinstance(ffn, MLP):
            groups += [[ffn.w1], [ffn.w2]]
        for maps in groups:
            if all(type(m) is Linear and m.ops in (OPS["fast"], OPS["fp8"]) for m in maps) and all(
                m.weight.requires_grad for m in maps
            ):
                yield [m.weight for m in maps]


def _is_listened_to(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))
