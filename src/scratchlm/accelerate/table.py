"""One table of fusions: what stands for which modules and ops, when, and at what gain.

A fusion computes at once what a module and some of its submodules compute one after the other. It
is declared here and nowhere else: selective checkpointing, the account's `--verify`, `explain` and
the benchmarks' classes of kernels read this table.

A module that is hooked, replaced, subclassed, patched or parametrised is called as it is, on every
path. `why_not_plain` decides that for all fusions and decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import is_
from types import FunctionType, GetSetDescriptorType
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
from scratchlm.ops.ranges import constant_in_graphs
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
    skips: tuple[str, ...] = ()  # the module's own methods that are not called when it runs

    def why_not(self, module: Any, x: Tensor, context: Any = None) -> str | None:
        """Return why this fusion does not run for such a call, or None when it does."""
        if self.name in module.left_out:
            return "left out by `accelerate(without=…)`"
        # first: conditions look at parts
        reason = why_not_plain(module, self.absorbs, self.ops, self.adds_adapters, self.skips)
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

# Packages whose decorators leave a function what it is.
WRAPPERS = ("torch", "jaxtyping", "beartype", "typing_extensions", "warnings")

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
    skips: tuple[str, ...] = (),
) -> str | None:
    """Return why these parts, ops and methods must be called one by one, or None if none tells."""
    if type(module) not in PLAIN_TYPES:
        return f"a {type(module).__name__} is not ours"
    if has_global_hooks():
        return "global hooks are registered"
    if is_class_patched(type(module)):
        return f"the class {type(module).__name__} is patched"
    for name in skips:
        if has_own_method(module, name):
            return f"{name} is patched"
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
    """Whether a module is of our own class, and nobody has hooks on it or its `forward` patched."""
    return type(module) in PLAIN_TYPES and _is_unobserved(module)


def has_plain_adapters(module: Any) -> bool:
    """Whether a module is a Linear of ours whose adapters just add s B A x to its product."""
    return (
        type(module) in ADAPTED_TYPES
        and module.unadapted_class in PLAIN_TYPES
        and _is_unobserved(module)
        and not has_own_method(module, "_change")
        and all(term.magnitude is None and not term.dropout for term in module.terms())
    )


def _is_unobserved(module: nn.Module) -> bool:
    return (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not has_own_method(module, "forward")
        and not is_class_patched(type(module))
    )


def has_own_method(module: nn.Module, name: str) -> bool:
    """Whether a module has this method of its own."""
    getattr(module, name)  # compiled code then looks again before it runs
    return name in module.__dict__


def is_patched(module: nn.Module) -> bool:
    """Whether a module has a method of its own, in the place of its class's."""
    names = methods(type(module))  # type: ignore[arg-type]
    return not module.__dict__.keys().isdisjoint(names)


@cache
def methods(cls: type[nn.Module]) -> frozenset[str]:
    """Return the methods of a class that are not every module's."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return frozenset(n for base in bases for n, value in vars(base).items() if callable(value))


_AS_WRITTEN: dict[type, list[object]] = {}  # classes that were not patched, with what they had


@constant_in_graphs  # a compiler asks once, and does not look inside
def is_class_patched(cls: type) -> bool:
    """Whether a method of a class of ours, or of a base, was written elsewhere."""
    bases = _own_bases(cls)
    found = list(chain.from_iterable(own.values() for own in bases))
    written = _AS_WRITTEN.get(cls, [])
    if len(written) == len(found) and all(map(is_, written, found)):
        return False
    for own in bases:
        package = own["__module__"].partition(".")[0]
        if not all(_is_by(package, value) for value in own.values()):
            return True
    _AS_WRITTEN[cls] = found
    return False


@cache
def _own_bases(cls: type) -> list[Mapping[str, Any]]:
    """Return what a class and its bases that are not torch's have, as it is now and later."""
    return [vars(base) for base in cls.__mro__ if base not in nn.Module.__mro__]


def _is_by(package: str, value: Any) -> bool:
    """Whether what stands in a class is data, or a function that this package has written.

    By its globals, not its name: `functools.wraps` gives another function the name of ours.
    """
    if isinstance(value, property):
        return all(_is_by(package, part) for part in (value.fget, value.fset, value.fdel))
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    while isinstance(value, FunctionType):
        written = value.__globals__.get("__name__", "builtins").partition(".")[0]
        if written not in (package, *WRAPPERS):
            return False
        if not hasattr(value, "__wrapped__"):
            return written == package
        value = value.__wrapped__
    if isinstance(value, (type, GetSetDescriptorType)):
        return True
    return not callable(value) and not hasattr(type(value), "__get__")


def has_fast_ops(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether these ops of a module are the fast ones (a module without ops has no others)."""
    ops: Ops | None = getattr(module, "ops", None)
    if ops is None:
        return True
    if is_class_patched(FastOps):
        return False
    if type(ops) is FastOps:
        return True
    return all(getattr(type(ops), name) is getattr(FastOps, name) for name in names)


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules, or their call itself is patched."""
    return bool(
        nn.Module.__call__ is not nn.Module._wrapped_call_impl
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )
