"""Our tensors as a Hugging Face directory: config.json, safetensors (sharded if large), tokenizer.

Written beside its place, flushed, and renamed: the directory is there whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scratchlm.config import ModelConfig, Rotary
from scratchlm.config.heads import TaskHead
from scratchlm.durable import check_is_new, whole_directory, write_file
from scratchlm.errors import ScratchLMError
from scratchlm.interop.heads import family_with, head_words
from scratchlm.interop.hf_config_writing import to_hf_config
from scratchlm.interop.links import Link
from scratchlm.interop.matching import TensorMap, map_tensors
from scratchlm.interop.reading import CONFIG, GENERATION, INDEX, SINGLE, TOKENIZER
from scratchlm.interop.safetensors_file import DTYPE_NAMES
from scratchlm.interop.streaming import is_finite
from scratchlm.interop.tokens import end_tokens, tokenizer_config
from scratchlm.untrusted import MAX_TOKENIZER_BYTES, listed, read_bytes

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class _Out:
    """One tensor to be written: its name, what makes it up, its shape and dtype."""

    name: str
    links: list[Link]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_hf(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer_file: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    *,
    eos_token_ids: Sequence[int] = (),
    chat_template: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    head: TaskHead | None = None,
    pad_token_id: int | None = None,
) -> Path:
    """Write a model where transformers finds it; in `dtype`, or in the dtype each tensor has.

    `head`: of a trunk with a task head; its batches are padded with `pad_token_id`.
    `chat_template`: what tokenizer_config.json says of it, special tokens included.
    A model that no Hugging Face family can represent is refused, and so is a directory that is
    already there.
    """
    directory = Path(directory)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1; got {max_shard_bytes}")
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise ValueError(f"weights cannot be written as {dtype}")
    table = to_hf_config(config)
    family = family_with(table["model_type"], head)
    mapping = map_tensors(config, family.tables[0], head)
    check_tensors(mapping, tensors)
    outs = _layout(mapping, tensors, dtype)
    end = end_tokens(tokenizer_file, eos_token_ids)
    table |= _common_words(outs, end.ids)
    if head is not None:
        table |= {"architectures": [family.architecture], **head_words(head, pad_token_id)}
    files: dict[str, dict[str, Any]] = {CONFIG: table, GENERATION: _generation(end.ids)}
    if tokenizer_file is not None and end.is_hugging_face:
        files[TOKENIZER_CONFIG] = {
            **tokenizer_config(end, config.context_length),
            **(chat_template or {}),
        }
    source = Path(tokenizer_file) if tokenizer_file is not None else None
    check_is_new(directory)
    with whole_directory(directory) as beside:
        _write_weights(beside, outs, tensors, config, max_shard_bytes)
        for name, content in files.items():
            _write_json(beside / name, content)
        if source is not None:
            write_file(beside / TOKENIZER, [read_bytes(source, MAX_TOKENIZER_BYTES)])
    return directory


def check_tensors(mapping: TensorMap, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of a mapping."""
    ours, given = mapping.shapes.keys(), tensors.keys()
    missing, unexpected = ours - given, given - ours
    if missing or unexpected:
        raise ValueError(
            "the tensors must be those of the config: "
            f"missing {listed(sorted(missing))}; unexpected {listed(sorted(unexpected))}"
        )
    for name, shape in mapping.shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)}; got {list(tensors[name].shape)}")
        if not mapping.links[name] and not bool((tensors[name] == 1).all()):
            raise ScratchLMError(
                f"no Hugging Face family can represent this model: OLMo's norms have no weights, "
                f"and {name} is not all ones"
            )


def _layout(
    mapping: TensorMap, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> list[_Out]:
    """Decide what is written, widest items first, so that every tensor starts aligned."""
    outs = []
    for name, links in mapping.by_their_name().items():
        own = {tensors[link.ours].dtype for link in links}
        chosen = dtype or max(own, key=lambda one: one.itemsize)
        if chosen not in DTYPE_NAMES:
            raise ValueError(f"{links[0].ours} cannot be written as {chosen}")
        outs.append(_Out(name, links, links[0].their_shape, chosen))
    return sorted(outs, key=lambda out: -out.dtype.itemsize)


def _common_words(outs: list[_Out], eos: tuple[int, ...]) -> dict[str, Any]:
    """Write what every family's config.json says. A null is said: the classes have defaults."""
    word = str(max((out for out in outs), key=lambda out: out.nbytes).dtype).removeprefix("torch.")
    return {
        "dtype": word,
        "torch_dtype": word,  # its name before transformers 5
        "bos_token_id": None,
        "eos_token_id": _one_or_list(eos),
        "pad_token_id": None,
        "use_cache": True,
    }


def _generation(eos: tuple[int, ...]) -> dict[str, Any]:
    return {"eos_token_id": _one_or_list(eos), "do_sample": False}


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


# Tensors


def _value(out: _Out, tensors: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    """Make up one of their tensors from ours."""
    if len(out.links) == 1 and not out.links[0].transposed:
        value = _our_part(out.links[0], tensors, config).to("cpu", out.dtype).contiguous()
    else:
        value = torch.empty(out.shape, dtype=out.dtype)
        for link in out.links:
            part = _our_part(link, tensors, config)
            box = tuple(slice(*bounds) for bounds in link.box)
            value[box].copy_(part.T if link.transposed else part)
    if not is_finite(value):
        ours = ", ".join(dict.fromkeys(link.ours for link in out.links))
        raise ScratchLMError(f"{ours} holds NaN or infinite values as {out.dtype}; not written")
    return value


def _our_part(link: Link, tensors: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    value = tensors[link.ours].detach()
    if isinstance(config.positions, Rotary) and config.positions.layout == "interleaved":
        module = link.ours.split(".")[-2]
        if module in ("q_proj", "k_proj", "q_norm", "k_norm"):
            value = half_layout(value, config.d_head)
    return value if link.at is None else value[link.at]


def half_layout(rows: Tensor, d_head: int) -> Tensor:
    """Reorder channels from pairs (0,1), (2,3), … to pairs (i, i + d/2), head by head.

    Queries, keys, their biases and the weights of their norms are reordered alike; their products,
    and so the model, stay the same.
    """
    pairs = rows.unflatten(0, (-1, d_head // 2, 2))  # (heads, pair, two, …)
    return pairs.transpose(1, 2).reshape(rows.shape)


def interleaved_layout(rows: Tensor, d_head: int) -> Tensor:
    """Reorder channels from pairs (i, i + d/2) to pairs (0,1), (2,3), …: `half_layout` undone."""
    halves = rows.unflatten(0, (-1, 2, d_head // 2))  # (heads, two, pair, …)
    return halves.transpose(1, 2).reshape(rows.shape)


def _write_weights(
    directory: Path,
    outs: list[_Out],
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    max_shard_bytes: int,
) -> None:
    shards = list(_shards(outs, max_shard_bytes))
    if len(shards) == 1:
        write_file(directory / SINGLE, _file_bytes(outs, tensors, config))
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, _file_bytes(shard, tensors, config))
        weight_map |= {out.name: name for out in shard}
    total = sum(out.nbytes for out in outs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / INDEX, index)


def _shards(outs: list[_Out], max_bytes: int) -> Iterator[list[_Out]]:
    """Fill one shard after the other; a tensor larger than a shard has one to itself."""
    shard: list[_Out] = []
    for out in outs:
        if shard and sum(one.nbytes for one in shard) + out.nbytes > max_bytes:
            yield shard
            shard = []
        shard.append(out)
    yield shard


def _file_bytes(
    outs: list[_Out], tensors: Mapping[str, Tensor], config: ModelConfig
) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for out in outs:
        header[out.name] = {
            "dtype": DTYPE_NAMES[out.dtype],
            "shape": list(out.shape),
            "data_offsets": [at, at + out.nbytes],
        }
        at += out.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # aligned, tensors can be used where they lie
    yield len(text).to_bytes(8, "little") + text
    for out in outs:
        yield _value(out, tensors, config).view(-1).view(torch.uint8).numpy().data


# Files


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_file(path, [(json.dumps(content, indent=2) + "\n").encode()])
