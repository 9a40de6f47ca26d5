"""The optimizers from their formulas, the fast implementation of each, and gradient clipping.

AdamW (arXiv:1711.05101, algorithm 2; bias correction from arXiv:1412.6980), at step t:

    θ ← θ − lr·λ·θ
    m ← β₁m + (1 − β₁)g        v ← β₂v + (1 − β₂)g²
    θ ← θ − lr · m̂ / (√v̂ + ε),  m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)

Muon (Jordan et al., 2024), for matrices of hidden layers; O is the momentum with all its singular
values brought near 1, found by a few matrix products and no decomposition:

    B ← μB + (1 − μ)g,  U = (1 − μ)g + μB
    O = NewtonSchulz(U / ‖U‖),  X ← aX + (bA + cA²)X with A = XXᵀ, five times
    θ ← θ − lr·λ·θ − lr · 0.2·√max(rows, columns) · O

The factor gives an update the size AdamW's has (arXiv:2502.16982), so one learning rate serves
the matrices and the rest, which AdamW moves.

Weight decay acts on what has two dimensions or more (projections, experts, embedding tables);
gains and biases, of one dimension, are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scratchlm import acceleration
from scratchlm.parallel.rows import units_of

CLIP_EPS = 1e-6
# Newton-Schulz: steep at 0, so that small singular values grow fast; near 1 they stay within ±0.3.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer that multiplies gradients, of any float dtype, by a factor as it reads them."""

    def prepare(self) -> Any:
        """Return what a step can do before the gradients are computed."""

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: Tensor | None = None,
        prepared: Any = None,
    ) -> Any:
        """Move every parameter that has a gradient once."""


@runtime_checkable
class WritesShadowWeights(Protocol):
    """An optimizer that writes the bf16 shadow weights of what it moves."""

    def write_shadow_weights(self, shadow: Any) -> None:
        """From now on, write them too."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay, written out.

    `moment` is the type m is kept in, None for the parameter's: it is a mean of gradients that are
    replaced by a tenth every step, and bears fewer bits. Sums are in the parameter's type.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        moment: torch.dtype | None = None,
    ) -> None:
        _check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1); got betas={tuple(betas)}")
        chosen = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**chosen, "moment": moment})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up a state that may be torch's; loading has widened every m to its parameter."""
        super().__setstate__(state)
        for group in self.param_groups:
            moment = group.setdefault("moment", None)
            for p in group["params"]:
                if moment is not None and "exp_avg" in self.state.get(p, {}):
                    self.state[p]["exp_avg"] = self.state[p]["exp_avg"].to(moment)

    def _state_of(self, p: Tensor, moment: torch.dtype | None) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, dtype=moment)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state

    def prepare(self) -> Any:
        """Return what a step can do before the gradients are computed: here, nothing."""
        return None

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: Tensor | None = None,
        prepared: Any = None,
    ) -> Any:
        """Move every parameter that has a gradient once; `scale` multiplies the gradients."""
        loss = run_closure(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self._state_of(p, group["moment"])
                m, v, g = state["exp_avg"].to(p.dtype), state["exp_avg_sq"], p.grad
                g = g if scale is None else g * scale
                state["step"] += 1
                t = state["step"].item()

                p.mul_(1 - lr * group["weight_decay"])
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                denominator = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
                p.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))
                state["exp_avg"].copy_(m)  # itself, as a rule
        return loss


class Muon(Optimizer):
    """Momentum, orthogonalised; for matrices, or stacks of them such as experts."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        _check_not_negative(lr=lr, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1); got momentum={momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim < 2:
                raise ValueError(f"Muon moves matrices only; got shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient once."""
        loss = run_closure(closure)
        for group in self.param_groups:
            lr, mu = group["lr"], group["momentum"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - mu)
                update = newton_schulz(p.grad.lerp(buffer, mu))
                size = 0.2 * math.sqrt(max(p.shape[-2:]))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * size)
        return loss


def newton_schulz(
    matrix: Tensor, steps: int = NS_STEPS, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Bring all singular values of a matrix (…, rows, columns) near 1, keeping their vectors."""
    a, b, c = NS_COEFFICIENTS
    x = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller side makes the smaller product
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure computes, gradients and all, where there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and >= 0; got {name}={value}")


# Which parameters, and which implementation


def make_optimizers(
    model: nn.Module | Mapping[str, nn.Parameter],
    kind: str = "adamw",
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    moment: torch.dtype | None = None,
    fast: bool = True,
) -> list[Optimizer]:
    """Make what moves a model's parameters, or those of a table by name.

    `fast=False` takes the classes above.
    """
    if kind not in ("adamw", "muon"):
        raise ValueError(f"optimizer must be one of adamw, muon; got {kind!r}")
    table = model.items() if isinstance(model, Mapping) else model.named_parameters()
    named = [(name, p) for name, p in table if p.requires_grad]
    hidden = [p for name, p in named if kind == "muon" and is_hidden_matrix(name, p)]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    made: list[Optimizer] = []
    if groups:
        choices: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        kind_of_adamw = _fast_adamw(rest) if fast else AdamW
        if moment is not None:  # which torch's has no place for
            choices["moment"] = moment
            kind_of_adamw = AdamW if isinstance(kind_of_adamw, partial) else kind_of_adamw
        made.append(kind_of_adamw(groups, **choices))
    if hidden and fast and all(p.ndim == 2 for p in hidden):
        made.append(
            torch.optim.Muon(
                hidden,
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    elif hidden:
        made.append(Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay))
    return made


def _fast_adamw(parameters: Iterable[Tensor]) -> Callable[..., Optimizer]:
    """Return the kernel's, where it can move all of them; torch's elsewhere.

    The kernel sees addresses, and a tensor that torch has cut over ranks (a DTensor) has none.
    """
    if all(
        acceleration.launches_for(p)
        and not hasattr(p, "to_local")
        and p.dtype == torch.float32
        and p.is_contiguous()
        for p in parameters
    ):
        from scratchlm.training.kernel_adamw import KernelAdamW

        return KernelAdamW
    return partial(torch.optim.AdamW, fused=True)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Say whether a parameter is a matrix between hidden states, not a table or the head."""
    outer = ("token_embeddings.", "position_embeddings.", "lm_head.")
    return parameter.ndim >= 2 and not name.startswith(outer)


# Clipping


@torch.no_grad()
def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, eps: float = CLIP_EPS
) -> Tensor:
    """Scale all gradients, in place, so that together their norm is at most `max_norm`.

    Return the norm they had. Nothing waits for the device: where the norm is small enough, the
    gradients are multiplied by exactly 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be greater than 0; got {max_norm}")
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(grads)
    if grads:
        torch._foreach_mul_(grads, clip_factor(norm, max_norm, eps))
    return norm


def clip_factor(norm: Tensor, max_norm: float, eps: float = CLIP_EPS) -> Tensor:
    """Return what gradients of this norm are multiplied by to have `max_norm` at most."""
    return (max_norm / (norm + eps)).clamp(max=1.0)


def global_norm(tensors: list[Tensor]) -> Tensor:
    """Return √Σ‖t‖² over all tensors: the norm of their norms.

    On a CPU, of the norms of their units: the same to the bit where ranks have some units each.
    """
    if not tensors:
        return torch.tensor(0.0)
    if tensors[0].device.type == "cpu":
        tensors = [unit for tensor in tensors for unit in units_of(tensor)]
    kinds = {tensor.dtype for tensor in tensors}  # one pass for each: bfloat16 summed in float32
    norms: list[Tensor] = []
    for kind in sorted(kinds, key=str):
        wide = torch.float32 if kind.itemsize == 2 else kind
        norms += torch._foreach_norm([t for t in tensors if t.dtype == kind], 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(norms))
