"""One table of fusions: what stands for which modules and ops, when, and at what gain.

A fusion computes at once what a module and some of its submodules compute one after the other. It
is declared here and nowhere else: selective checkpointing, the account's `--verify`, `explain` and
the benchmarks' classes of kernels read this table.

A module that is hooked, replaced, subclassed, patched or parametrised is called as it is, on every
path. `why_not_plain` decides that for all fusions and decoders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from scratchlm.model import (
    MLP,
    ExpertLinear,
    LayerNorm,
    MoE,
    RotaryEmbedding,
    SinusoidalPositions,
    TiedHead,
)
from scratchlm.ops import FastOps, Ops
from scratchlm.quantization.layers import QuantizedLayer

Condition = Callable[[Any, Tensor, Any], str | None]


@dataclass(frozen=True, eq=False)
class Fusion:
    """What is computed at once, and when."""

    name: str
    what: str  # in one line
    takes: type[nn.Module]  # the module it takes over
    absorbs: tuple[str, ...]  # submodules that are not called when it runs
    ops: tuple[str, ...]  # ops it stands for
    condition: Condition  # (module, x, context) -> why it does not apply, or None
    operators: tuple[str, ...] = ()  # custom operators it calls
    saved: tuple[str, ...] = ()  # those whose results selective checkpointing keeps
    keeps: str = ""  # for the backward pass
    kernels: tuple[str, ...] = ()  # their names in a profile
    gain: str = ""  # of a whole step, by preset: bench/RESULTS.md, "Fusions"
    adds_adapters: bool = False  # whether it adds the low-rank adapters of what it absorbs

    def why_not(self, module: Any, x: Tensor, context: Any = None) -> str | None:
        """Return why this fusion does not run for such a call, or None when it does."""
        if self.name in module.left_out:
            return "left out by `accelerate(without=…)`"
        # first: conditions look at parts
        reason = why_not_plain(module, self.absorbs, self.ops, self.adds_adapters)
        return self.condition(module, x, context) if reason is None else reason

    def runs(self, module: Any, x: Tensor, context: Any = None) -> bool:
        """Whether this fusion runs for such a call."""
        return self.why_not(module, x, context) is None


FUSIONS: list[Fusion] = []
ACCELERATED: dict[type[nn.Module], type[nn.Module]] = {}  # our class -> its accelerated subclass
FUSIONS_OF: dict[type[nn.Module], list[Fusion]] = {}  # accelerated class -> in order of preference
# Classes whose instances are as we wrote them; the accelerated ones enter themselves.
PLAIN_TYPES: list[type[nn.Module]] = [
    *(LayerNorm, MLP, MoE, ExpertLinear, TiedHead),
    *(RotaryEmbedding, SinusoidalPositions, nn.Identity),
]

# Classes of Linear layers with low-rank adapters: `terms()` says what they add to W x.
ADAPTED_TYPES: list[type[nn.Module]] = []

T = TypeVar("T", bound=type[nn.Module])


def accelerates(plain: type[nn.Module], *fusions: Fusion) -> Callable[[T], T]:
    """Enter a class as the accelerated form of ours, with its fusions in order of preference."""

    def enter(cls: T) -> T:
        ACCELERATED[plain] = cls
        FUSIONS_OF[cls] = list(fusions)
        FUSIONS.extend(fusions)
        PLAIN_TYPES.extend((plain, cls))
        return cls

    return enter


# Plain: as we wrote it, and observed by nobody


def why_not_plain(
    module: nn.Module,
    absorbs: tuple[str, ...] = (),
    ops: tuple[str, ...] = (),
    adds_adapters: bool = False,
) -> str | None:
    """Return why these submodules and ops must be called one by one, or None if nobody can tell."""
    if type(module) not in PLAIN_TYPES:
        return f"a {type(module).__name__} is not ours"
    if has_global_hooks():
        return "global hooks are registered"
    if not has_fast_ops(module, ops):
        return f"one of the ops {', '.join(ops)} is user-provided"
    for name in absorbs:
        part = getattr(module, name)
        if part is None:
            continue
        if not is_plain(part) and not (adds_adapters and has_plain_adapters(part)):
            kind = "adapted" if type(part) in ADAPTED_TYPES else "replaced"
            return f"{name} is hooked, {kind}, patched or parametrised"
        if isinstance(part, QuantizedLayer):
            return f"{name} is quantised"
        if not has_fast_ops(part, ops):
            return f"{name} has user-provided ops"
    return None


def is_plain(module: nn.Module) -> bool:
    """Whether a module is of our own class, and has neither hooks nor a patched `forward`."""
    return type(module) in PLAIN_TYPES and _is_unobserved(module)


def has_plain_adapters(module: Any) -> bool:
    """Whether a module is a Linear of ours whose adapters just add s B A x to its product."""
    return (
        type(module) in ADAPTED_TYPES
        and module.unadapted_class in PLAIN_TYPES
        and _is_unobserved(module)
        and all(term.magnitude is None and not term.dropout for term in module.terms())
    )


def _is_unobserved(module: nn.Module) -> bool:
    return (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
    )


def is_patched(module: nn.Module) -> bool:
    """Whether a module has a method of its own, in the place of its class's."""
    names = methods(type(module))  # type: ignore[arg-type]
    return not module.__dict__.keys().isdisjoint(names)


def is_class_patched(cls: type[nn.Module]) -> bool:
    """Whether a method of a class of ours was written elsewhere."""
    return any(
        method.__module__.partition(".")[0] != base.__module__.partition(".")[0]
        for base in cls.__mro__[: cls.__mro__.index(nn.Module)]
        for method in vars(base).values()
        if isinstance(method, FunctionType)
    )


@cache
def methods(cls: type[nn.Module]) -> frozenset[str]:
    """Return the methods of a class that are not every module's."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return frozenset(n for base in bases for n, value in vars(base).items() if callable(value))


def has_fast_ops(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether these ops of a module are the fast ones (a module without ops has no others)."""
    ops: Ops | None = getattr(module, "ops", None)
    if ops is None or type(ops) is FastOps:
        return True
    return all(getattr(type(ops), name) is getattr(FastOps, name) for name in names)


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules."""
    return bool(
        nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )
