"""LoRA: a `Linear` that learns through two thin matrices while its own weights stand still.

    y = W x + b + s · B A x            A (rank, d_in) drawn, B (d_out, rank) 0 at first
    DoRA: y = b + m ⊙ (W x + s · B A x) / ‖W + s B A‖,  the norm held constant going backward

A layer is adapted by giving it a subclass of its class, whatever Linear that is: weights, names in
the state dict and identity stay, `lora_A.NAME` and `lora_B.NAME` join them. A layer can hold
several adapters; those that are active add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scratchlm import acceleration
from scratchlm.config.lora import LoRA
from scratchlm.errors import ScratchLMError
from scratchlm.model import Linear
from scratchlm.ops.lora import merged_weight, row_norms
from scratchlm.quantization.layers import QuantizedLinear

DEFAULT = "default"
LINEARS = (Linear, QuantizedLinear)  # what can be adapted, and subclasses of it
PARTS = ("lora_A", "lora_B", "lora_magnitude")


@dataclass(frozen=True)
class Term:
    """One adapter of one layer."""

    a: Tensor  # (rank, d_in)
    b: Tensor  # (d_out, rank)
    scale: float
    magnitude: Tensor | None = None
    dropout: float = 0.0


class LoRALayer(nn.Module):
    """y = W x + b + Σ s · B A x over the active adapters; W x + b is that of the class it joins."""

    weight: Tensor
    bias: nn.Parameter | None
    ops: Any
    lora_A: nn.ParameterDict
    lora_B: nn.ParameterDict
    lora_magnitude: nn.ParameterDict
    adapters: dict[str, LoRA]
    scales: dict[str, float]
    active: tuple[str, ...]
    kept_weight: Tensor | None  # of a merged layer: W as it was

    def terms(self) -> list[Term]:
        """Return the adapters that are active and not merged into W."""
        if self.kept_weight is not None:
            return []
        return [self.term(name) for name in self.active if name in self.adapters]

    def term(self, name: str) -> Term:
        """Return one adapter."""
        magnitude = self.lora_magnitude.get(name)
        dropout = self.adapters[name].dropout if self.training else 0.0
        return Term(self.lora_A[name], self.lora_B[name], self.scales[name], magnitude, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to the last dimension."""
        y = super().forward(x)
        base = y
        for term in self.terms():
            y = y + self._change(x, base, term)
        return y

    def _change(self, x: Tensor, base: Tensor, term: Term) -> Tensor:
        """Return what one adapter adds."""
        dropped = F.dropout(x, term.dropout) if term.dropout else x
        linear = self.ops.linear
        low = dropped.to(term.a.dtype) if not torch.is_autocast_enabled(x.device.type) else dropped
        change = linear(linear(low, term.a) * term.scale, term.b)
        if term.magnitude is None:
            return change.to(base.dtype)
        # The direction's norm is a constant going backward: arXiv:2402.09353, section 4.3.
        with torch.no_grad():
            norms = row_norms(self.weight.to(term.a.dtype), term.a, term.b, term.scale)
        factor = term.magnitude / norms
        if term.dropout:
            plain = linear(dropped, self.weight)
        else:
            plain = base if self.bias is None else base - self.bias
        return ((factor - 1) * plain + factor * change).to(base.dtype)


@cache
def adapted_class(kind: type[nn.Module]) -> type[LoRALayer]:
    """Return the class of an adapted layer, whatever kind of Linear it was."""
    made = type(f"LoRA{kind.__name__}", (LoRALayer, kind), {})
    acceleration.register_adapted(made)
    return made


# Applying


def apply_lora(
    model: nn.Module,
    config: LoRA,
    *,
    name: str = DEFAULT,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    freeze: bool = True,
) -> list[str]:
    """Give every layer the config names an adapter, and make it the active one; return their names.

    `freeze` stops all other weights from learning. The adapter's first values are a function of
    seed and layer alone.
    """
    if not name or "." in name:
        raise ValueError(f"an adapter's name must be a word without dots; got {name!r}")
    targets = list(find_targets(model, config))
    if freeze:
        for p in model.parameters():
            p.requires_grad_(False)
    acceleration.plain(model)
    for order, (_, layer) in enumerate(targets):
        _adapt(layer)
        add_adapter(layer, name, config, dtype)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + order)
        bound = 1 / math.sqrt(layer.weight.shape[1])
        drawn = torch.empty(layer.lora_A[name].shape).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            layer.lora_A[name].copy_(drawn)
    set_adapters(model, [name])
    return [found for found, _ in targets]


def find_targets(model: nn.Module, config: LoRA) -> Iterator[tuple[str, Any]]:
    """Yield the Linear layers a config names; a word that names none is refused."""
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, LINEARS)]
    for word in config.targets:
        alone = LoRA(targets=(word,))
        if not any(alone.matches(name) for name, _ in linears):
            known = ", ".join(sorted({name.rpartition(".")[2] for name, _ in linears}))
            raise ScratchLMError(f"targets: no Linear is called {word!r}; there are {known}")
    found = [(name, m) for name, m in linears if config.matches(name)]
    if not found:
        raise ScratchLMError("the model has no Linear layer to adapt")
    yield from found


def _adapt(layer: Any) -> None:
    if isinstance(layer, LoRALayer):
        return
    kind: Any = type(layer)
    layer.__class__ = adapted_class(kind)
    for part in PARTS:
        setattr(layer, part, nn.ParameterDict())
    layer.adapters, layer.scales, layer.active = {}, {}, ()
    layer.kept_weight, layer.unadapted_class = None, kind


def add_adapter(layer: Any, name: str, config: LoRA, dtype: torch.dtype = torch.float32) -> None:
    """Give a layer an adapter that changes nothing yet: B is 0, a magnitude that of W."""
    if layer.kept_weight is not None:
        raise ScratchLMError("the layer is merged: unmerge before another adapter joins")
    if name in layer.adapters:
        raise ScratchLMError(f"there is an adapter {name!r} already")
    d_out, d_in = layer.weight.shape
    where: dict[str, Any] = {"device": layer.weight.device, "dtype": dtype}
    layer.lora_A[name] = nn.Parameter(torch.zeros(config.rank, d_in, **where))
    layer.lora_B[name] = nn.Parameter(torch.zeros(d_out, config.rank, **where))
    if config.dora:
        a, b = layer.lora_A[name].detach(), layer.lora_B[name].detach()
        norms = row_norms(layer.weight.detach().to(dtype), a, b, config.scale)
        layer.lora_magnitude[name] = nn.Parameter(norms)
    layer.adapters[name], layer.scales[name] = config, config.scale


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    """Return the adapted layers by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALayer)}


def set_adapters(model: nn.Module, names: Sequence[str]) -> None:
    """Choose which adapters act; none leaves the model as it was before it had any."""
    layers = lora_layers(model)
    known = {name for layer in layers.values() for name in layer.adapters}
    for name in names:
        if name not in known:
            raise ScratchLMError(f"no adapter {name!r}; there are {', '.join(sorted(known))}")
    if any(layer.kept_weight is not None for layer in layers.values()):
        raise ScratchLMError("the model is merged: unmerge before adapters are chosen")
    for layer in layers.values():
        layer.active = tuple(names)


# Merging


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Put the active adapters into the weights; `unmerge` takes them out again, to the bit."""
    layers = {n: layer for n, layer in lora_layers(model).items() if layer.kept_weight is None}
    for name, layer in layers.items():
        terms = layer.terms()
        if len(terms) > 1 and any(term.magnitude is not None for term in terms):
            raise ScratchLMError(f"{name}: several adapters with DoRA do not merge into one matrix")
        if isinstance(layer, QuantizedLinear):
            raise ScratchLMError(f"{name}: an adapter cannot be put into quantised weights")
    for layer in layers.values():
        kept = layer.weight.detach().clone()
        weight = kept
        for term in layer.terms():
            weight = merged_weight(weight, term.a, term.b, term.scale, term.magnitude)
        layer.weight.copy_(weight)
        layer.kept_weight = kept


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Put the weights back as they were before `merge`."""
    for layer in lora_layers(model).values():
        if layer.kept_weight is not None:
            layer.weight.copy_(layer.kept_weight)
            layer.kept_weight = None


def remove_lora(model: nn.Module) -> None:
    """Take all adapters away; what is merged stays in the weights."""
    for layer in lora_layers(model).values():
        for part in PARTS:
            delattr(layer, part)
        kind = layer.unadapted_class
        for word in ("adapters", "scales", "active", "kept_weight", "unadapted_class"):
            delattr(layer, word)
        layer.__class__ = kind  # type: ignore[assignment]


# Tensors


def adapter_tensors(model: nn.Module, name: str = DEFAULT) -> dict[str, Tensor]:
    """Return an adapter's tensors: LAYER.lora_A, LAYER.lora_B and, with DoRA, .lora_magnitude."""
    found = {}
    for path, layer in lora_layers(model).items():
        for part in PARTS:
            held = getattr(layer, part)
            if name in held:
                found[f"{path}.{part}"] = held[name].detach()
    return found


@torch.no_grad()
def load_adapter(
    model: nn.Module,
    config: LoRA,
    tensors: Mapping[str, Tensor],
    *,
    name: str = DEFAULT,
    scales: Mapping[str, float] | None = None,
    freeze: bool = True,
) -> None:
    """Give a model an adapter that was learnt before, and make it the active one.

    `scales`: of layers whose factor is not the config's.
    """
    modules = dict(model.named_modules())
    layers = {path.rpartition(".")[0]: path for path in tensors if path.endswith(".lora_A")}
    for path in layers:
        if not isinstance(modules.get(path), LINEARS):
            raise ScratchLMError(f"the adapter joins {path!r}, which is no Linear of this model")
    if freeze:
        for p in model.parameters():
            p.requires_grad_(False)
    acceleration.plain(model)
    for path in layers:
        layer: Any = modules[path]
        a = tensors[f"{path}.lora_A"]
        own = LoRA(**{**config.to_dict(), "rank": len(a)})
        _adapt(layer)
        add_adapter(layer, name, own, a.dtype)
        for part in PARTS:
            if name in getattr(layer, part):
                held, given = getattr(layer, part)[name], tensors[f"{path}.{part}"]
                if held.shape != given.shape:
                    raise ScratchLMError(
                        f"{path}.{part} must be {list(held.shape)}; got {list(given.shape)}"
                    )
                held.copy_(given)
        layer.scales[name] = (scales or {}).get(path, config.scale)
    set_adapters(model, [name])
