"""`accelerate` applies the table of fusions, `plain` takes it back, `explain` says what runs.

A module is accelerated by giving it the accelerated subclass of its class: weights, names of the
state dict, hooks and identity stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scratchlm.accelerate.decoding import why_not_runner
from scratchlm.accelerate.table import ACCELERATED, FUSIONS, FUSIONS_OF, PLAIN_TYPES
from scratchlm.errors import ScratchLMError
from scratchlm.model import ForwardContext, TransformerLM

M = TypeVar("M", bound=nn.Module)


def accelerate(model: M, without: Collection[str] | None = None) -> M:
    """Give every module of ours its accelerated class, in place.

    `without` names fusions to leave out; None: those left out before, at first none.
    """
    unknown = set(without or ()) - {fusion.name for fusion in FUSIONS}
    if unknown:
        known = ", ".join(fusion.name for fusion in FUSIONS)
        raise ScratchLMError(f"no fusion is called {min(unknown)!r}; there are {known}")
    for module in model.modules():
        if type(module) in ACCELERATED:
            module.__class__ = ACCELERATED[type(module)]
        if without is not None and type(module) in FUSIONS_OF:
            module.left_out = frozenset(without)  # type: ignore[assignment]
    return model


def plain(model: M) -> M:
    """Give every accelerated module its plain class back, in place."""
    for module in model.modules():
        module.__class__ = _plain_class(type(module))  # type: ignore[arg-type]
        for name in ("left_out", "shadow", "fp8", "low_precision"):
            module.__dict__.pop(name, None)
    return model


@cache
def _plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class with accelerated bases replaced by plain ones: itself if it has none."""
    for base, accelerated in ACCELERATED.items():
        if cls is accelerated:
            return base
    if cls not in PLAIN_TYPES or not any(base in FUSIONS_OF for base in cls.__mro__):
        return cls  # a user's subclass, too: none of its fusions runs, and its `super()` holds
    # A class that training made from an accelerated one: recomputed in the backward pass
    bases = tuple(_plain_class(base) for base in cls.__bases__)
    body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    made: type[nn.Module] = type(cls.__name__, bases, body)
    PLAIN_TYPES.append(made)
    return made


@dataclass(frozen=True)
class Row:
    """A fusion of a layer."""

    layer: str
    fusion: str
    reason: str | None  # why it does not run; None: it does


@torch.no_grad()
def explain(
    model: nn.Module,
    *,
    batch: int = 8,
    seq: int | None = None,
    training: bool = True,
    dtype: torch.dtype | None = None,
) -> list[Row]:
    """Say, layer by layer, which fusions run and why the others do not.

    For a batch of so many sequences, with gradients where `training`, under autocast to `dtype`
    (None: bfloat16 on a GPU that trains, none elsewhere).
    """
    config = model.config
    seq = int(config.context_length if seq is None else seq)  # type: ignore[union-attr,arg-type]
    weight = next(model.parameters())
    if dtype is None and weight.is_cuda and training:
        dtype = torch.bfloat16
    autocast = torch.autocast(weight.device.type, dtype) if dtype else contextlib.nullcontext()
    context = ForwardContext(positions=range(seq))
    rows = []
    with autocast, torch.set_grad_enabled(training):
        for name, module in model.named_modules():
            rows += _rows_of(name, module, _example(module, weight, batch, seq), context)
    if isinstance(model, TransformerLM):
        rows += [Row("", runner, reason) for runner, reason in why_not_runner(model).items()]
    return rows


def _rows_of(name: str, module: nn.Module, x: Tensor, context: ForwardContext) -> list[Row]:
    if type(module) in ACCELERATED:
        fusions = FUSIONS_OF[ACCELERATED[type(module)]]
        return [Row(name, fusion.name, "not accelerated") for fusion in fusions]
    kind = next((base for base in type(module).__mro__ if base in FUSIONS_OF), None)
    rows: list[Row] = []
    running = ""
    for fusion in FUSIONS_OF[kind] if kind is not None else ():
        reason = fusion.why_not(module, x, context)
        if reason is None and running:
            reason = f"{running} runs instead"
        rows.append(Row(name, fusion.name, reason))
        running = running or (fusion.name if reason is None else "")
    return rows


def _example(module: nn.Module, weight: Tensor, batch: int, seq: int) -> Tensor:
    """Return a tensor like the module's input, without memory of its own."""
    inner = getattr(module, "weight", None)
    width = inner.shape[-1] if isinstance(inner, Tensor) else getattr(module, "d_model", 0)
    for part in ("w1", "ln2", "lm_head"):  # of a feed-forward layer, a block, a model
        found = getattr(getattr(module, part, None), "weight", None)
        width = width or (found.shape[-1] if isinstance(found, Tensor) else 0)
    with FakeTensorMode():
        return torch.empty(batch, seq, max(int(width), 1), device=weight.device, dtype=weight.dtype)
