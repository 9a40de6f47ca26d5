"""Which models the runners take, and when they must step aside.

A runner reads a step of many requests (`scratchlm/paged.py`) without calling a module. It takes a
model by an explicit list of what it handles: a field of the config that is not on the list, a
module that is not plain (`table.py`) or not the one that the config names, is refused by name, and
the model itself reads the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scratchlm import config as kinds
from scratchlm.accelerate.table import (
    has_fast_ops,
    has_global_hooks,
    is_class_patched,
    is_patched,
    is_plain,
)
from scratchlm.config import ModelConfig
from scratchlm.model import Embedding, ExpertLinear, Linear, TransformerLM
from scratchlm.model.layers import PositionTables
from scratchlm.ops import OP_NAMES, native
from scratchlm.paged import PagedCache, Runner
from scratchlm.quantization.layers import (
    QuantizedEmbedding,
    QuantizedExpertLinear,
    QuantizedLayer,
    QuantizedLinear,
)
from scratchlm.quantization.layouts import PANELS, PLANES

# Fields of a config and of its parts that both runners handle, by the part they belong to.
HANDLED: dict[type, set[str]] = {
    ModelConfig: {
        *("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff"),
        *("rope_theta", "num_kv_heads", "d_head", "positions", "ffn", "norm", "attention"),
        *("norm_placement", "tie_embeddings"),
    },
    kinds.Rotary: {"theta", "layout", "scaling"},  # by the tables of the model's RoPE
    kinds.Learned: set(),
    kinds.Sinusoidal: set(),
    kinds.NoPositions: set(),
    kinds.SwiGLU: {"bias"},
    kinds.MLP: {"activation", "bias"},
    kinds.RMSNorm: {"eps"},
    kinds.LayerNorm: {"eps", "bias"},
    kinds.NoNorm: set(),
    kinds.Attention: {"qk_norm", "sliding_window", "bias"},
}
# Of the CPU runner alone:
EXPERTS: dict[type, set[str]] = {
    kinds.MoE: {"num_experts", "experts_per_token", "renormalize", "load_balance_weight"},
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What runners take from the config, and the model from its modules:
SETTINGS = (
    *("activation", "experts_per_token", "renormalize", "post_norm"),
    *("num_heads", "num_kv_heads", "d_head"),
)
OF_MODULES = ("eps", "sliding_window", "layer", "layout")  # what both take from modules
QUANTIZED = {
    QuantizedLinear: Linear,
    QuantizedEmbedding: Embedding,
    QuantizedExpertLinear: ExpertLinear,
}


def why_not_config(config: ModelConfig, handled: Mapping[type, set[str]] = HANDLED) -> str | None:
    """Return what of a config a runner does not handle, or None."""
    if config.norm_placement != "pre":
        return "post-norm blocks"
    for part in (config, config.positions, config.ffn, config.norm, config.attention):
        if type(part) not in handled:
            return f"{type(part).__name__} in the config"
        unknown = {field.name for field in fields(part)} - handled[type(part)]
        if unknown:
            return f"the config's field {min(unknown)}, which it does not know"
    return None


def why_not_model(model: TransformerLM, handled: Mapping[type, set[str]] = HANDLED) -> str | None:
    """Return why a runner cannot stand for this model's modules, or None."""
    reason = why_not_config(model.config, handled)
    if reason is not None:
        return reason
    if has_global_hooks():
        return "global hooks"
    for cls in set(map(type, model.modules())):
        if is_class_patched(cls):
            return f"a class {cls.__name__} that is patched"
    for name, module in model.named_modules():
        if type(module) is nn.ModuleList:
            continue
        if not is_plain(module) or is_patched(module):
            return f"{name or 'a model'} that is hooked, replaced, patched or parametrised"
        if not has_fast_ops(module, OP_NAMES):
            return f"user-provided ops in {name or 'the model'}"
        is_table = isinstance(module, PositionTables)
        if is_table and len(next(module.buffers())) < model.config.context_length:
            return "a context longer than its tables of positions"
    reason = why_not_as_configured(model)
    if reason is not None:
        return reason
    for layer in model.layers:
        attn: Any = layer.attn
        biased = {proj.bias is not None for proj in (attn.q_proj, attn.k_proj, attn.v_proj)}
        if len(biased) > 1:
            return "a bias on some of the projections of queries, keys and values"
        if attn.q_norm is not None and attn.q_norm.eps != attn.k_norm.eps:
            return "norms of queries and keys with two different ε"
    weights = list(model.parameters())
    if any(type(weight) is not nn.Parameter or not weight.is_contiguous() for weight in weights):
        return "weights that are not plain contiguous parameters"
    dtypes = {weight.dtype for weight in (*weights, model.token_embeddings.weight)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return "weights that are not all bfloat16, all float16 or all float32"
    return None


def why_not_as_configured(model: TransformerLM) -> str | None:
    """Return which module is of another kind, size or setting than the config says, or None."""
    config, layers = model.config, model.layers
    if len(layers) != config.num_layers:
        return f"{len(layers)} layers, where the config has {config.num_layers}"
    roles: list[str] = []
    expected = _as_configured(config)
    for name, role, module in _modules_by_role(model):
        if expected.get(role) != _facts(module, role):
            return f"{name} that is not as the config says"
        roles.append(role)
    if len(roles) != sum(config.num_layers if "layers" in role else 1 for role in expected):
        return "a module that is missing"
    for i, layer in enumerate(layers):
        attn: Any = layer.attn
        if attn.layer != i or attn.rope is not model.rope:
            return "layers that are shared or moved, or have RoPE tables of their own"
        if getattr(getattr(layer.ffn, "router", None), "bias", None) is not None:
            return "a router with a bias"
    return None


@lru_cache(maxsize=16)
def _as_configured(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Return the facts of every module of a model of one layer, by role."""
    model = TransformerLM(config.replace(num_layers=1), device="meta")
    return {role: _facts(module, role) for _, role, module in _modules_by_role(model)}


def _modules_by_role(model: TransformerLM) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every module with its name, and the name it has in the first layer."""
    for name, module in model.named_children():
        if name != "layers":
            yield name, name, module
    for i, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            yield f"layers.{i}.{name}", f"layers.0.{name}", module


def _facts(module: Any, role: str) -> tuple[Any, ...]:
    """Return of a module what its config decides: class, shapes, settings."""
    kind: Any = None
    if role != "lm_head":  # which is tied or not
        kind = _kind(type(module))  # type: ignore[arg-type]
    weight = module if isinstance(module, QuantizedLayer) else getattr(module, "weight", None)
    shape = None if weight is None else weight.shape
    bias = getattr(module, "bias", None)
    fits = bias is None or (shape is not None and bias.shape == shape[:1])
    tables = [t.shape for t in module.buffers()] if isinstance(module, PositionTables) else ()
    return kind, shape, fits, *tables, *map(module.__dict__.get, SETTINGS)


@cache
def _kind(cls: type[nn.Module]) -> type:
    """Return the class of `model/` that a class is, or stands for."""
    bases = (QUANTIZED.get(base, base) for base in cls.__mro__)
    return next(b for b in bases if b.__module__.startswith(("scratchlm.model", "torch.nn")))


def why_not_layout(model: TransformerLM, layout: str) -> str | None:
    """Return which quantised layer a device's kernels cannot read, or None."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer) and module.layout != layout:
            return f"{name} in {module.format.name}, not in {layout}"
    return None


def is_quantized(model: TransformerLM) -> bool:
    """Whether some layers are stored in few bits."""
    return any(isinstance(module, QuantizedLayer) for module in model.modules())


def why_not_cpu(model: TransformerLM) -> str | None:
    """Return why the CPU runner cannot take this model here, or None when it can."""
    from scratchlm.accelerate.quantized import SOURCE

    if model.token_embeddings.weight.device.type != "cpu":
        return "a model that is not on a CPU"
    reason = why_not_model(model, HANDLED | EXPERTS) or why_not_layout(model, PANELS)
    if reason is None and native.library(SOURCE) is None:
        return f"a model without C++ kernels ({native.why_not(SOURCE)})"
    return reason


def why_not_gpu(model: TransformerLM) -> str | None:
    """Return why the GPU runner cannot take this model here, or None when it can."""
    device = model.token_embeddings.weight.device
    if device.type != "cuda":
        return f"a model on {device.type}"
    if device.index != torch.cuda.current_device():
        return "a model on another GPU than the current one"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    if find_spec("triton") is None:
        return "an installation without triton"
    return why_not_model(model) or why_not_layout(model, PLANES)


def why_not_runner(model: TransformerLM) -> dict[str, str | None]:
    """Return for each runner why it does not take this model; None where it does."""
    return {"cpu_runner": why_not_cpu(model), "gpu_runner": why_not_gpu(model)}


def make_runner(
    model: TransformerLM, cache: PagedCache, *, max_rows: int, exact: bool
) -> Runner | None:
    """Return what reads steps over the pages of a cache, where something takes this model."""
    if why_not_cpu(model) is None:
        from scratchlm.accelerate.cpu_runner import CPURunner

        return CPURunner(model, cache)
    # The kernels of a few quantised rows and the product of many round differently.
    if why_not_gpu(model) is None and not (exact and is_quantized(model)):
        from scratchlm.accelerate.gpu_runner import GPURunner, why_not_pages

        if why_not_pages(cache) is None:
            return GPURunner(model, cache, max_rows=max_rows, exact=exact)
    return None


class Unchanged:
    """Sees cheaply whether a model's modules are still those a runner was made for.

    Hooks and submodules live in dictionaries that stay where they are: a look at a thousand of them
    takes some tens of microseconds, which a GPU runner hides behind the device's work. Most are
    those of hooks, at which we look again only where torch has given out a handle since.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._handles = -1  # as many as torch had given out when there were no hooks
        self._hooks = [
            hooks
            for m in modules
            for hooks in (
                *(m._forward_hooks, m._forward_pre_hooks),
                *(m._backward_hooks, m._backward_pre_hooks),
            )
        ]
        self._modules = modules
        self._classes = [type(m) for m in modules]
        self._attributes = [m.__dict__ for m in modules]
        self._ops = self._op_sets()
        self._num_attributes = list(map(len, self._attributes))
        named = [(d, n) for d in self._attributes for n in (*SETTINGS, *OF_MODULES) if n in d]
        self._owners, self._names = [d for d, _ in named], [n for _, n in named]
        self._settings = self._setting_values()
        self._kinds = set(self._classes)
        self._children = [m._modules for m in modules if m._modules]
        self._found = self._submodules()

    def _op_sets(self) -> list[object]:
        return list(map(dict.get, self._attributes, repeat("ops")))

    def _setting_values(self) -> list[object]:
        return list(map(dict.get, self._owners, self._names))

    def _is_patched(self) -> bool:
        sizes = list(map(len, self._attributes))
        return sizes != self._num_attributes and any(map(is_patched, self._modules))

    def _submodules(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))

    def _has_hooks(self) -> bool:
        handles = RemovableHandle.next_id
        if handles == self._handles:
            return False
        found = any(self._hooks)
        self._handles = -1 if found else handles
        return found

    def __bool__(self) -> bool:
        return (
            not self._has_hooks()
            and self._submodules() == self._found
            and not self._is_patched()
            and self._setting_values() == self._settings
            and not any(map(is_class_patched, self._kinds))
            and list(map(type, self._modules)) == self._classes
            and self._op_sets() == self._ops
            and not has_global_hooks()
        )
