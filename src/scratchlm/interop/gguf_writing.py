"""Our tensors as a GGUF file, which llama.cpp and its kin read: weights, config and tokenizer.

Matrices are written in the dtype asked for, or quantised by the rule of `scratchlm quantize`; those
of a quantised model as the bytes they are; vectors, routers and learned positions always in F32, as
llama.cpp wants them. Written beside its place, flushed, and renamed.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scratchlm.config import Llama3Scaling, ModelConfig, Rotary
from scratchlm.durable import stream_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.interop.gguf_config import Keys, to_metadata
from scratchlm.interop.gguf_file import ALIGNMENT, MAGIC
from scratchlm.interop.gguf_names import GGUF_FAMILIES, INTERLEAVED, ROPE_FREQS
from scratchlm.interop.gguf_rope import llama3_divisors
from scratchlm.interop.gguf_tokenizer import tokenizer_keys
from scratchlm.interop.gguf_types import ARRAY, SCALARS, STRING, TENSOR_TYPES, UINT32, TensorType
from scratchlm.interop.links import Link
from scratchlm.interop.matching import TensorMap, map_tensors
from scratchlm.interop.streaming import is_finite
from scratchlm.interop.writing import check_tensors, half_layout, interleaved_layout
from scratchlm.ops.quantized import quantize as quantize_matrix
from scratchlm.quantization.rule import alternatives, choose
from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.chat_template import ChatTemplate

_VERSION = 3
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Of the formats we have, those that GGUF has too; and what a file can be quantised to.
_FORMATS = ("q8_0", "q6_k", "q4_k", "q4_0")  # more bits first
QUANTIZED = ("q8_0", "q6_k", "q4_k", "q4_k_m", "q4_0")
# What llama.cpp calls a whole file of mostly such weights.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 14, "Q6_K": 18, "BF16": 32}
_ALWAYS_F32 = ("position_embd.weight", "ffn_gate_inp.weight")


@dataclass(frozen=True)
class _Out:
    """One tensor to be written: its name, what makes it up, its shape and type."""

    name: str
    links: list[Link]
    shape: tuple[int, ...]
    kind: TensorType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.block * self.kind.nbytes


def write_gguf(
    path: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    *,
    quantize: str | None = None,
    eos_token_ids: Sequence[int] = (),
    chat_template: ChatTemplate | None = None,
) -> Path:
    """Write a model where llama.cpp finds it; in `dtype`, or in the dtype each tensor has.

    `quantize` is a format of `scratchlm quantize` that GGUF has. A model or tokenizer that GGUF
    cannot represent is refused, and so is a file that is already there.
    """
    path = Path(path)
    if quantize is not None and quantize not in QUANTIZED:
        raise ValueError(f"GGUF has the formats {', '.join(QUANTIZED)}; got {quantize!r}")
    if os.path.lexists(path):
        raise ScratchLMError(f"{path} exists already and is not overwritten")
    model_type, keys = to_metadata(config)
    family = GGUF_FAMILIES[model_type]
    mapping = map_tensors(config, family.tables[0])
    formats = _packed_formats(mapping, tensors)
    if quantize is not None:
        if formats:
            raise ValueError(f"the model is quantised already; quantize={quantize!r} is not done")
        formats = {one.name: one.format for one in choose(config, quantize) if one.format}
    outs = [
        _Out(name, links, links[0].their_shape, _kind(name, links, tensors, dtype, formats))
        for name, links in mapping.by_their_name().items()
    ]
    general: Keys = {
        "general.architecture": (STRING, family.architecture),
        "general.type": (STRING, "model"),
        "general.file_type": (UINT32, _file_type(outs)),
        "general.quantization_version": (UINT32, 2),
    }
    tokens = tokenizer_keys(tokenizer, config.vocab_size, eos_token_ids, chat_template)
    source = _Source(tensors, config, family.architecture in INTERLEAVED)
    path.parent.mkdir(parents=True, exist_ok=True)
    stream_atomically(path, _file_bytes({**general, **keys, **tokens}, outs, source))
    return path


def _packed_formats(mapping: TensorMap, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Find the tensors that are quantised already, and check that all are those of the mapping."""
    found, wide = {}, dict(tensors)
    for name, shape in mapping.shapes.items():
        for stored_name, stored_shape in () if name in tensors else alternatives(name, shape):
            packed = wide.pop(stored_name, None)
            if packed is not None and packed.shape == stored_shape:
                found[name] = stored_name.removeprefix(f"{name}_")
                wide[name] = torch.empty(shape, device="meta")
    check_tensors(mapping, wide)
    unknown = sorted(set(found.values()) - set(_FORMATS))
    if unknown:
        raise ScratchLMError(f"GGUF has no {', '.join(unknown)}: export what it was quantised from")
    return found


def _kind(
    name: str,
    links: list[Link],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    formats: Mapping[str, str],
) -> TensorType:
    """Choose the type of one tensor; of several formats that make it up, the one of most bits."""
    asked = [formats[link.ours] for link in links if link.ours in formats]
    if asked:
        packed = [f"{link.ours}_{formats[link.ours]}" in tensors for link in links]
        if any(packed) and len(set(asked)) > 1:
            raise ScratchLMError(f"GGUF holds {name} in one format; the model has {set(asked)}")
        return TENSOR_TYPES[min(asked, key=_FORMATS.index).upper()]
    own = max((tensors[link.ours].dtype for link in links), key=lambda one: one.itemsize)
    chosen = dtype or own
    if chosen not in _FLOATS:
        raise ValueError(
            f"GGUF holds weights in float32, float16 and bfloat16; {links[0].ours} is "
            f"{str(chosen).removeprefix('torch.')}: choose a dtype"
        )
    if len(links[0].their_shape) == 1 or name.endswith(_ALWAYS_F32):
        return TENSOR_TYPES["F32"]
    return TENSOR_TYPES[_FLOATS[chosen]]


def _file_type(outs: list[_Out]) -> int:
    most = max(outs, key=lambda out: math.prod(out.shape))
    return _FILE_TYPES[most.kind.name]


# Tensors


@dataclass(frozen=True)
class _Source:
    """Our tensors, and the order in which the architecture has the channels of a head."""

    tensors: Mapping[str, Tensor]
    config: ModelConfig
    interleaved: bool

    def part(self, link: Link, kind: TensorType) -> Tensor:
        """Return what a link writes: numbers, or the rows of bytes of a quantised matrix."""
        packed = self.tensors.get(f"{link.ours}_{kind.name.lower()}")
        value = (self.tensors[link.ours] if packed is None else packed).detach()
        positions, module = self.config.positions, link.ours.split(".")[-2]
        if isinstance(positions, Rotary) and module in ("q_proj", "k_proj", "q_norm", "k_norm"):
            if self.interleaved and positions.layout == "half":
                value = interleaved_layout(value, self.config.d_head)
            elif not self.interleaved and positions.layout == "interleaved":
                value = half_layout(value, self.config.d_head)
        return value

    def rope_freqs(self) -> list[float]:
        """Return what the frequencies are divided by; nothing where no tensor is needed."""
        positions = self.config.positions
        if not isinstance(positions, Rotary) or not isinstance(positions.scaling, Llama3Scaling):
            return []
        return llama3_divisors(positions.scaling, positions.theta, self.config.d_head)


def _value(out: _Out, source: _Source) -> Tensor:
    """Make up the bytes of one of their tensors from ours."""
    parts = [source.part(link, out.kind).cpu() for link in out.links]
    if parts[0].dtype == torch.uint8:
        return torch.cat(parts).contiguous().view(-1)
    floats = {name: dtype for dtype, name in _FLOATS.items()}
    dtype = floats.get(out.kind.name, torch.float32)
    value = torch.cat([part.to(dtype) for part in parts]).contiguous()
    if not is_finite(value):
        ours = ", ".join(dict.fromkeys(link.ours for link in out.links))
        raise ScratchLMError(f"{ours} holds NaN or infinite values as {out.kind.name}; not written")
    if out.kind.block == 1:
        return value.view(-1).view(torch.uint8)
    packed = quantize_matrix(value.view(-1, value.shape[-1]), out.kind.name.lower())
    return packed.contiguous().view(-1)


# Bytes


def _file_bytes(keys: Keys, outs: list[_Out], source: _Source) -> Iterator[bytes | memoryview]:
    freqs = np.array(source.rope_freqs(), dtype="<f4")
    tables = [(out.name, out.shape, out.kind, out.nbytes) for out in outs]
    if freqs.size:
        tables.insert(0, (ROPE_FREQS, freqs.shape, TENSOR_TYPES["F32"], freqs.nbytes))
    head = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tables), len(keys)))
    for key, (value_type, value) in keys.items():
        head += _text(key) + struct.pack("<I", value_type) + _key_bytes(value_type, value)
    offset = 0
    for name, shape, kind, nbytes in tables:
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", kind.number, offset)
        offset += nbytes + _padding(nbytes)
    yield bytes(head) + bytes(_padding(len(head)))
    if freqs.size:
        yield freqs.tobytes() + bytes(_padding(freqs.nbytes))
    for out in outs:
        yield _value(out, source).numpy().data
        yield bytes(_padding(out.nbytes))


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _key_bytes(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return struct.pack(f"<{SCALARS[kind]}", value)
    inner, items = value
    head = struct.pack("<IQ", inner, len(items))
    if inner == STRING:
        return head + b"".join(map(_text, items))
    return head + np.array(items, dtype=f"<{SCALARS[inner]}").tobytes()
