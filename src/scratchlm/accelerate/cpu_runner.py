"""Steps of many requests on a CPU: every layer in one call of `kernels/cpu/step.cpp`.

    runner = CPURunner(model, cache)
    if runner.unchanged:
        logits = runner.run(step, tables, last)

Every sum has an order of its own. So the logits of a request are the same to the bit alone or among
others, its prompt read at once or in chunks, its first pages written by another request or not, on
any number of threads.

The C++ code reads the model's weights where they lie, in float32, bfloat16 or float16, and computes
in float32. Whoever calls asks `unchanged` before a step: it is false once a module was hooked or
replaced, and then the model itself must read the step. It also finds weights again that have moved.
"""

from __future__ import annotations

import ctypes
from array import array
from itertools import chain
from operator import is_
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm import config as kinds
from scratchlm.accelerate.decoding import Unchanged, why_not_cpu
from scratchlm.accelerate.quantized import CPU_FORMATS, SOURCE
from scratchlm.model import TransformerLM
from scratchlm.model.layers import TiedHead
from scratchlm.ops import native
from scratchlm.paged import Choice, PagedCache, Step
from scratchlm.quantization.layers import QuantizedLayer

NORMS: dict[type, int] = {kinds.NoNorm: 0, kinds.RMSNorm: 1, kinds.LayerNorm: 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
LAYOUTS = {"interleaved": 1, "half": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_KINDS = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}

# The structures of step.cpp

_Address, _Size = ctypes.c_void_p, ctypes.c_int64


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _Address), ("bias", _Address), ("eps", ctypes.c_float)]


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _Address), ("bias", _Address), ("format", _Size)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("norm1", _Norm),
        *((name, _Linear) for name in ("q", "k", "v")),
        *((name, _Norm) for name in ("q_norm", "k_norm")),
        ("out", _Linear),
        ("norm2", _Norm),
        *((name, _Linear) for name in ("router", "up", "gate", "down")),
        *((name, _Address) for name in ("keys", "values", "key_scales", "value_scales")),
        ("window", _Size),
    ]


_SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_head", "d_ff")
_KINDS = (
    *("vocab", "context", "norm_kind", "activation", "rope", "num_pages", "page_size", "kv_kind"),
    *("num_experts", "experts_per_token", "renormalize", "dtype", "positions_dtype"),
)
_LISTS = ("tokens", "counts", "starts", "slots", "num_logits")


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _Size) for name in _SIZES + _KINDS),
        ("embeddings", _Linear),
        *((name, _Address) for name in ("positions", "cos", "sin")),
        ("layers", ctypes.POINTER(_Layer)),
        ("norm", _Norm),
        ("head", _Linear),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _Size) for name in ("rows", "num_slots", "max_pages", "table_stride")),
        *((name, _Address) for name in _LISTS),
        *((name, _Address) for name in ("tables", "last", "logits", "greedy")),
    ]


class CPURunner:
    """Reads steps of one model into one paged cache."""

    chooses, draws = True, False

    def __init__(self, model: TransformerLM, cache: PagedCache) -> None:
        reason = why_not_cpu(model)
        if reason is not None:
            raise ValueError(f"the CPU runner does not take {reason}")
        library = native.library(SOURCE)
        assert library is not None
        self.model, self.cache = model, cache
        self._run_step = library.run_step
        self._modules_unchanged = Unchanged(model)
        modules: list[Any] = list(model.modules())
        own = [tensors for m in modules for tensors in (m._parameters, m._buffers)]
        self._dicts = [tensors for tensors in own if tensors]  # a plain module gets no new names
        self._logits = torch.empty(0, model.config.vocab_size)
        self._room = 0  # rows of logits
        self._step = _Step()
        self._given: tuple[Tensor | None, Tensor | None] = (None, None)  # tables and last tokens
        self._bind()

    @property
    def unchanged(self) -> bool:
        """Whether the model's modules are still what this runner stands for."""
        if not self._modules_unchanged:
            return False
        if all(map(is_, self._tensors(), self._found)) and self._addresses() == self._bound:
            return True
        if why_not_cpu(self.model) is not None:  # weights were exchanged
            return False
        self._bind()
        return True

    def run(
        self,
        step: Step,
        tables: Int[Tensor, "slots max_pages"],
        last: Int[Tensor, " slots"],
    ) -> Float[Tensor, "choosing vocab"]:
        """Write the keys and values of the new tokens; return the logits that are asked for."""
        choosing = self._run(step, tables, last, None)
        return self._logits[:choosing]

    def run_and_choose(
        self,
        step: Step,
        tables: Int[Tensor, "slots max_pages"],
        last: Int[Tensor, " slots"],
        choice: Choice,
    ) -> Int[Tensor, " choosing"]:
        """Do the same, and return the likeliest tokens, which `last` has then too."""
        assert not choice.draws
        tokens = torch.empty(sum(step.num_logits), dtype=torch.long)
        self._run(step, tables, last, tokens.data_ptr())
        return tokens

    def _run(self, step: Step, tables: Tensor, last: Tensor, greedy: int | None) -> int:
        """Run a step; return how many rows of logits it has."""
        num_logits, passed = step.num_logits, self._step
        choosing = sum(num_logits)
        _check(step)
        if not (tables is self._given[0] and last is self._given[1]):
            self._take(tables, last)
        if self._room < choosing:
            self._logits = torch.empty(choosing, self.model.config.vocab_size)
            self._room, passed.logits = choosing, self._logits.data_ptr()
        given = (step.tokens, step.counts, step.starts, step.slots, num_logits)
        lists = [array("q", x) for x in given]
        for name, numbers in zip(_LISTS, lists, strict=True):
            setattr(passed, name, numbers.buffer_info()[0])
        passed.rows, passed.greedy = len(step.counts), greedy
        result = self._run_step(self._passed_model, self._passed_step, torch.get_num_threads())
        if result:
            raise _error(result, self.model.config)
        return choosing

    def _take(self, tables: Tensor, last: Tensor) -> None:
        """Write down where an engine's tables lie: the same in every step."""
        assert (tables.dtype, tables.device.type, tables.stride(1)) == (torch.int32, "cpu", 1)
        assert (last.dtype, last.device.type) == (torch.int64, "cpu")
        assert len(last) >= len(tables)
        assert last.is_contiguous()
        passed, self._given = self._step, (tables, last)
        passed.num_slots, passed.max_pages = tables.shape
        passed.table_stride = tables.stride(0)
        passed.tables, passed.last = tables.data_ptr(), last.data_ptr()

    # The model as the kernel reads it

    def _tensors(self) -> list[Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))

    def _addresses(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._held), *map(Tensor.numel, self._held)]

    def _bind(self) -> None:
        """Write down where everything lies."""
        model, cache, config = self.model, self.cache, self.model.config
        self._found = self._tensors()
        self._held: list[Tensor] = [tensor for tensor in self._found if tensor is not None]
        self._bound = self._addresses()
        self._storages = [tensor.detach() for tensor in self._held]  # kept, if weights move
        layers: Any = model.layers
        made = [_layer(layer, cache, i) for i, layer in enumerate(layers)]
        self._layers = (_Layer * len(made))(*made)
        rope = model.rope
        assert rope is None or rope.cos.dtype == rope.sin.dtype == torch.float32
        ffn = config.ffn
        positions: Any = model.position_embeddings
        table = getattr(positions, "weight", getattr(positions, "table", None))
        self._model = _Model(
            *(getattr(config, name) for name in _SIZES),
            vocab=config.vocab_size,
            context=config.context_length,
            norm_kind=NORMS[type(config.norm)],
            activation=ACTIVATIONS[ffn.activation if isinstance(ffn, kinds.MLP) else "silu"],
            rope=0 if rope is None else LAYOUTS[rope.layout],
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            kv_kind=KV_KINDS[cache.keys.dtype],
            num_experts=ffn.num_experts if isinstance(ffn, kinds.MoE) else 0,
            experts_per_token=ffn.experts_per_token if isinstance(ffn, kinds.MoE) else 0,
            renormalize=isinstance(ffn, kinds.MoE) and ffn.renormalize,
            dtype=DTYPES[model.token_embeddings.weight.dtype],
            positions_dtype=0 if table is None else DTYPES[table.dtype],
            embeddings=_linear(model.token_embeddings),
            positions=_address(table),
            cos=None if rope is None else _address(rope.cos),
            sin=None if rope is None else _address(rope.sin),
            layers=self._layers,
            norm=_norm(model.ln_final),
            head=_linear(model.lm_head),
        )
        self._passed_model, self._passed_step = ctypes.byref(self._model), ctypes.byref(self._step)


def _layer(layer: Any, cache: PagedCache, number: int) -> _Layer:
    attn, ffn = layer.attn, layer.ffn
    scales = (cache.key_scales, cache.value_scales)
    of_keys, of_values = (None if s is None else _address(s[number]) for s in scales)
    return _Layer(
        norm1=_norm(layer.ln1),
        q=_linear(attn.q_proj),
        k=_linear(attn.k_proj),
        v=_linear(attn.v_proj),
        q_norm=_norm(attn.q_norm),
        k_norm=_norm(attn.k_norm),
        out=_linear(attn.output_proj),
        norm2=_norm(layer.ln2),
        router=_linear(getattr(ffn, "router", None)),
        up=_linear(ffn.w1),
        gate=_linear(getattr(ffn, "w3", None)),
        down=_linear(ffn.w2),
        keys=cache.keys[number].data_ptr(),
        values=cache.values[number].data_ptr(),
        key_scales=of_keys,
        value_scales=of_values,
        window=attn.sliding_window or 0,
    )


def _linear(module: nn.Module | None) -> _Linear:
    if module is None:
        return _Linear()
    bias = _address(getattr(module, "bias", None))
    owner: Any = module.tied_to[0] if isinstance(module, TiedHead) else module
    if isinstance(owner, QuantizedLayer):
        return _Linear(owner.stored.data_ptr(), bias, CPU_FORMATS[owner.format.name])
    return _Linear(_address(owner.weight), bias)


def _norm(module: nn.Module | None) -> _Norm:
    if module is None or isinstance(module, nn.Identity):
        return _Norm()
    bias: Any = getattr(module, "bias", None)
    return _Norm(_address(module.weight), _address(bias), module.eps)


def _address(tensor: Any) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype in DTYPES
    assert tensor.is_contiguous()
    return int(tensor.data_ptr())


# What a step may ask for


def _check(step: Step) -> None:
    """Refuse what the kernel, which sees addresses, would read wrong."""
    rows = len(step.counts)
    assert len(step.starts) == len(step.slots) == len(step.chooses) == rows
    assert len(step.tokens) == sum(step.counts)


def _error(result: int, config: kinds.ModelConfig) -> Exception:
    """Return what a result other than 0 means."""
    return (
        MemoryError("no memory for the step"),
        ValueError(f"token id must lie in [0, {config.vocab_size})"),
        ValueError(f"a row must have tokens, at positions in [0, {config.context_length})"),
        ValueError("a slot lies outside the page tables"),
        ValueError("a row's page table does not name a page for every position it sees"),
    )[result - 1]
