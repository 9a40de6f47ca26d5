"""Known mistakes in AdamW and in gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from scratchlm.check.mistakes.table import Table

OPTIMIZERS = Table()

# AdamW


def adamw(**knobs: Any) -> Callable[[], type[torch.optim.Optimizer]]:
    """Make a class of AdamW, with something wrong in it or in another right form."""
    return lambda: type("KnownAdamW", (_AdamW,), {"knobs": knobs})


class _AdamW(torch.optim.Optimizer):
    knobs: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, params: Iterable[Any], lr: float, betas: Any, eps: float, weight_decay: float
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)
        self.first = {id(group): dict(group) for group in self.param_groups}
        self.shared_t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group)

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        knobs = self.knobs
        lr, (b1, b2), eps, decay = (group[k] for k in ("lr", "betas", "eps", "weight_decay"))
        lr = self.first[id(group)]["lr"] if knobs.get("first_lr") else lr
        decay = self.defaults["weight_decay"] if knobs.get("default_decay") else decay
        if knobs.get("swapped"):
            b1, b2 = b2, b1
        state = self.state[p]
        if not state:
            state.update(t=knobs.get("t0", 0), m=torch.zeros_like(p), v=torch.zeros_like(p))
        self.shared_t += 1
        state["t"] += 1
        t = self.shared_t if knobs.get("shared_t") else state["t"]
        g: Tensor = p.grad  # type: ignore[assignment]
        if knobs.get("l2"):
            g = g + decay * p
        shrink = {"none": 0.0, "no_lr": decay}.get(knobs.get("decay", ""), lr * decay)
        shrink = 0.0 if knobs.get("l2") else shrink
        if not knobs.get("decay_after"):
            p.mul_(1 - shrink)
        self._moments(state, g, b1, b2)
        first = 1.0 if knobs.get("uncorrected") in ("m", "both") else 1 - b1**t
        second = 1.0 if knobs.get("uncorrected") in ("v", "both") else 1 - b2**t
        p.sub_(lr * _adam_direction(state["m"], state["v"], first, second, eps, knobs))
        if knobs.get("decay_after"):
            p.mul_(1 - shrink)

    def _moments(self, state: dict[str, Any], g: Tensor, b1: float, b2: float) -> None:
        squared = g if self.knobs.get("not_squared") else g * g
        weight1, weight2 = (1.0, 1.0) if self.knobs.get("unweighted") else (1 - b1, 1 - b2)
        state["m"] = b1 * state["m"] + weight1 * g
        state["v"] = b2 * state["v"] + weight2 * squared


def _adam_direction(
    m: Tensor, v: Tensor, first: float, second: float, eps: float, knobs: dict[str, Any]
) -> Tensor:
    if knobs.get("no_root"):
        hat = m * math.sqrt(second) / first / (v + eps)
        return hat if knobs.get("eps") == "hat" else m / first / (v / second + eps)
    if knobs.get("eps") == "inside":
        return m / first / (v / second + eps).sqrt()
    if knobs.get("eps") == "hat":  # arXiv:1412.6980, end of section 2
        return m * math.sqrt(second) / first / (v.sqrt() + eps)
    return m / first / ((v / second).sqrt() + eps)


# Orders and forms that differ by less than a learning rate squared, or by where ε stands
ALSO_RIGHT: dict[str, list[Callable[..., Any]]] = {
    "get_adamw_cls": [
        adamw(decay_after=True),
        adamw(eps="hat"),
        adamw(eps="hat", decay_after=True),
    ]
}


def _adam(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    """Enter a mistake; it may be made in any of the right forms."""
    forms: list[dict[str, Any]] = [{}, {"decay_after": True}, {"eps": "hat"}]
    forms.append({"decay_after": True, "eps": "hat"})
    functions = [adamw(**{**form, **one}) for one in knobs for form in forms]
    OPTIMIZERS.add("get_adamw_cls", name, hints, *functions)


_CORRECTED = "m_hat = m / (1 - beta1**t);  v_hat = v / (1 - beta2**t)"
_adam(
    "no bias correction",
    ("How large is the first step?", "m and v start at 0 and are too small early.", _CORRECTED),
    {"uncorrected": "both"},
    {"uncorrected": "m"},
    {"uncorrected": "v"},
)
_adam(
    "the step count starts at 0 or 2",
    ("What is t in the first step?", "t is 1 in the first step: count before use.", "t += 1"),
    {"t0": 1},
    {"t0": -1},
)
_adam(
    "all parameters share one step count",
    (
        "With two parameters, what is t after one step?",
        "t is counted for every parameter: keep it in self.state[p].",
        "state['t'] += 1",
    ),
    {"shared_t": True},
)
_adam(
    "L2 in the gradient instead of decoupled decay (that is Adam)",
    (
        "Does the decay pass through m and v?",
        "W in AdamW: the decay acts on the weights, beside the gradient.",
        "p.mul_(1 - lr * weight_decay)",
    ),
    {"l2": True},
)
_adam(
    "the decay is not multiplied by the learning rate",
    ("How much does a weight shrink in one step?", "By lr · λ.", "p.mul_(1 - lr * weight_decay)"),
    {"decay": "no_lr"},
)
_adam(
    "no weight decay",
    ("With a gradient of 0, does p move?", "It shrinks by lr · λ.", "p -= lr * weight_decay * p"),
    {"decay": "none"},
)
_adam(
    "ε inside the root",
    ("What happens with a large ε?", "ε is added to the root.", "v_hat.sqrt() + eps"),
    {"eps": "inside"},
)
_adam(
    "the root of v is missing",
    ("Multiply the gradients by 10: do the steps change?", "m̂ / √v̂ has no unit.", "v_hat.sqrt()"),
    {"no_root": True},
)
_adam(
    "the two betas are exchanged",
    ("Which average is the longer one?", "β₁ is for m, β₂ for v.", "beta1, beta2 = betas"),
    {"swapped": True},
)
_adam(
    "v averages g, not g²",
    ("Can your v be negative?", "v is the mean of squares.", "v = beta2*v + (1 - beta2)*g*g"),
    {"not_squared": True},
)
_adam(
    "the factor 1 − β is missing",
    ("What is m after many equal gradients?", "A mean: the weights sum to 1.", "(1 - beta1) * g"),
    {"unweighted": True},
)
_adam(
    "the learning rate of the start is kept",
    ("Change group['lr']: does the step change?", "Read it in step().", "lr = group['lr']"),
    {"first_lr": True},
)
_adam(
    "the groups' own weight decay is ignored",
    (
        "With two groups, which decay does each get?",
        "Read it from the group, in step().",
        "group['weight_decay']",
    ),
    {"default_decay": True},
)

# Clipping


def _clipping(factor: Callable[..., Any]) -> Callable[..., None]:
    """Multiply every gradient by what `factor` says of it, of all of them, and of the limit."""

    def clip(parameters: Iterable[Any], limit: float) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        for g, by in [(g, factor(g, grads, limit)) for g in grads]:
            g.mul_(by)

    return clip


def _norm(grads: list[Tensor]) -> Tensor:
    return torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()


def _limit(norm: Tensor, limit: float) -> Tensor:
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _twice(parameters: Iterable[Any], limit: float) -> None:
    grads = [p.grad for p in parameters if p.grad is not None]
    factor = _limit(_norm(grads), limit)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def _crashes(parameters: Iterable[Any], limit: float) -> None:
    parameters = list(parameters)
    factor = _limit(_norm([p.grad for p in parameters]), limit)
    for p in parameters:
        p.grad.mul_(factor)


def _clip(name: str, hints: tuple[str, str, str], *functions: Callable[..., Any]) -> None:
    OPTIMIZERS.add("run_gradient_clipping", name, hints, *functions)


_clip(
    "each gradient is clipped by itself",
    (
        "With two gradients, what is the norm of both together afterwards?",
        "One norm over all gradients, one factor for all.",
        "norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))",
    ),
    _clipping(lambda g, grads, limit: _limit(g.norm(), limit)),
)
_clip(
    "clipped cell by cell",
    (
        "Does the gradient keep its direction?",
        "All cells are multiplied by one factor.",
        "g.mul_(max_l2_norm / (norm + 1e-6))",
    ),
    lambda ps, limit: [p.grad.clamp_(-limit, limit) for p in ps if p.grad is not None],
)
_clip(
    "gradients below the limit are scaled up",
    ("What happens to a small gradient?", "Nothing: only too large ones.", "if norm > max_norm:"),
    _clipping(lambda g, grads, limit: limit / (_norm(grads) + 1e-6)),
)
_clip(
    "the root of the norm is missing",
    ("What is the norm of (3, 4)?", "√(9 + 16).", "torch.sqrt(total)"),
    _clipping(lambda g, grads, limit: _limit(_norm(grads) ** 2, limit)),
)
_clip(
    "the norms are added, not their squares",
    (
        "What is the norm of 3 and 4 together?",
        "Norms add up like sides of a right triangle.",
        "norm = torch.sqrt(sum(g.norm() ** 2 for g in grads))",
    ),
    _clipping(lambda g, grads, limit: _limit(torch.stack([h.norm() for h in grads]).sum(), limit)),
)
_clip(
    "the L1 norm or the largest cell",
    ("What is the L2 norm of (3, 4)?", "5: √Σ g².", "g.pow(2).sum()"),
    _clipping(
        lambda g, grads, limit: _limit(torch.stack([h.abs().sum() for h in grads]).sum(), limit)
    ),
    _clipping(
        lambda g, grads, limit: _limit(torch.stack([h.abs().max() for h in grads]).max(), limit)
    ),
)
_clip(
    "nothing is changed: the result is a copy",
    (
        "Which tensor do you write to?",
        "p.grad * factor is a new tensor; the old one must change.",
        "p.grad.mul_(factor)",
    ),
    _clipping(lambda g, grads, limit: 1.0),
)
_clip(
    "a parameter without a gradient is an error",
    ("What is p.grad before backward?", "None: leave it out.", "if p.grad is not None"),
    _crashes,
)
_clip(
    "a generator is used up by the first pass",
    (
        "How often can a generator be read?",
        "Once. Make a list of it first.",
        "grads = [p.grad for p in parameters if p.grad is not None]",
    ),
    _twice,
)
