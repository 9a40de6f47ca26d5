"""Adapters in PEFT's format ↔ ours: adapter_config.json and adapter_model.safetensors.

    base_model.model.THEIR.LAYER.lora_A.weight             LAYER.lora_A           (rank, d_in)
    base_model.model.THEIR.LAYER.lora_B.weight             LAYER.lora_B           (d_out, rank)
    base_model.model.THEIR.LAYER.lora_magnitude_vector     LAYER.lora_magnitude   (d_out)
    base_model.model.lm_head.base_layer.weight             must be the base's own

Where a family keeps several of our layers in one (GPT-2's c_attn), an adapter of theirs is split by
rows of B. Ours are written as one of the summed rank: A one below the other, B block by block.

What we write carries a hash of its tensors and factors in the file's metadata, which PEFT passes
over: damage shows when it is read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scratchlm.config import ModelConfig, Rotary
from scratchlm.config.lora import LoRA
from scratchlm.durable import check_is_new, whole_directory, write_file
from scratchlm.errors import ScratchLMError
from scratchlm.interop.hf_config_writing import to_hf_config
from scratchlm.interop.keys import FAMILIES
from scratchlm.interop.links import Link
from scratchlm.interop.matching import map_tensors
from scratchlm.interop.safetensors_file import (
    DTYPE_NAMES,
    WEIGHT_DTYPES,
    opened,
    read_exactly,
    read_header,
    read_metadata,
)
from scratchlm.interop.streaming import is_finite
from scratchlm.interop.writing import half_layout, interleaved_layout
from scratchlm.untrusted import MAX_CONFIG_BYTES, inner_file, listed, read_json, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_HEADER_BYTES = 16 * 2**20
_PREFIX = "base_model.model."
# What would make the adapter something else than W + s B A.
_REFUSED = (
    *("modules_to_save", "layer_replication", "lora_bias", "use_qalora", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
    *("kasa_config", "velora_config", "monteclora_config", "megatron_config"),
)
_HASH = "scratchlm_sha256"
_HASHED = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")  # that leave the base as it was


@dataclass(frozen=True)
class Adapter:
    """An adapter under our names."""

    config: LoRA
    tensors: Mapping[str, Tensor]  # LAYER.lora_A, LAYER.lora_B, LAYER.lora_magnitude
    scales: Mapping[str, float] = field(default_factory=dict)  # where not the config's
    bases: Mapping[str, Tensor] = field(default_factory=dict)  # weights that PEFT kept beside it
    quantize: str | None = None  # what its base was stored as while it learnt

    def layers(self) -> list[str]:
        """Return the layers it joins."""
        ends = ".lora_A"
        return [name.removesuffix(ends) for name in self.tensors if name.endswith(ends)]

    def scale(self, layer: str) -> float:
        """Return the factor of a layer's adapter."""
        return self.scales.get(layer, self.config.scale)


def is_peft_directory(path: str | os.PathLike[str]) -> bool:
    """Say whether a directory holds an adapter of PEFT's."""
    return (Path(path) / CONFIG).is_file()


def _groups(model: ModelConfig) -> Iterator[tuple[str, list[Link]]]:
    """Yield the family's matrices, by the layer's name, with our layers that make each up."""
    mapping = map_tensors(model, FAMILIES[to_hf_config(model)["model_type"]].tables[0])
    for theirs, links in mapping.by_their_name().items():
        if theirs.endswith(".weight") and len(links[0].their_shape) == 2:
            yield theirs.removesuffix(".weight"), links


def _layer(link: Link) -> str:
    return link.ours.removesuffix(".weight")


def _reordered(model: ModelConfig, layer: str, rows: Tensor, out: bool) -> Tensor:
    """Reorder the channels of queries and keys between our layout and theirs."""
    positions = model.positions
    if not isinstance(positions, Rotary) or positions.layout != "interleaved":
        return rows
    if layer.rpartition(".")[2] not in ("q_proj", "k_proj"):
        return rows
    return (half_layout if out else interleaved_layout)(rows, model.d_head)


# Reading


def read_peft(path: str | os.PathLike[str], model: ModelConfig) -> Adapter:
    """Read an adapter for a model; every tensor must be accounted for."""
    path = Path(path)
    table = read_json(inner_file(path, CONFIG), MAX_CONFIG_BYTES)
    config = _read_config(table, path)
    theirs = _read_tensors(path)
    written = read_metadata(path / WEIGHTS, _MAX_HEADER_BYTES).get(_HASH)
    is_whole = written in (None, _hash(theirs, table))
    tensors: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    bases: dict[str, Tensor] = {}
    for name, links in _groups(model):
        key = f"{_PREFIX}{name}"
        a, b = theirs.pop(f"{key}.lora_A.weight", None), theirs.pop(f"{key}.lora_B.weight", None)
        magnitude = theirs.pop(f"{key}.lora_magnitude_vector", None)
        if magnitude is None:
            magnitude = theirs.pop(f"{key}.lora_magnitude_vector.weight", None)
        if a is None and b is None:
            continue
        rank, alpha = _own(table, "r", name, path), _own(table, "lora_alpha", name, path)
        d_in, d_out = _sizes(links)
        if a is None or b is None or a.shape != (rank, d_in) or b.shape != (d_out, rank):
            got = [None if one is None else list(one.shape) for one in (a, b)]
            raise ScratchLMError(
                f"{path}: {name} must have lora_A {[rank, d_in]} and lora_B {[d_out, rank]}; "
                f"got {got[0]} and {got[1]}"
            )
        if (magnitude is not None) != config.dora or (
            magnitude is not None and magnitude.shape != (d_out,)
        ):
            raise ScratchLMError(f"{path}: {name}: lora_magnitude_vector does not fit use_dora")
        # An adapted LM head, whose vocabulary may have grown, is kept with its own weight.
        base = theirs.pop(f"{key}.base_layer.weight", None) if len(links) == 1 else None
        if base is not None:
            bases[_layer(links[0])] = base
        start = 0
        for link in links:
            layer, rows = _layer(link), _rows(link)
            part = slice(start, start + rows)
            start += rows
            tensors[f"{layer}.lora_A"] = a.clone() if len(links) > 1 else a
            tensors[f"{layer}.lora_B"] = _reordered(model, layer, b[part], out=False).clone()
            if magnitude is not None:
                own = _reordered(model, layer, magnitude[part], out=False)
                tensors[f"{layer}.lora_magnitude"] = own.clone()
            scales[layer] = alpha / (math.sqrt(rank) if config.rslora else rank)
    if theirs:
        raise ScratchLMError(f"{path}: tensors of no layer of this model: {listed(theirs)}")
    if not tensors:
        raise ScratchLMError(f"{path}: the adapter holds no tensors")
    if not is_whole:
        raise ScratchLMError(f"{path} is damaged or was edited: it is not what was written")
    return Adapter(config, tensors, scales, bases)


def _sizes(links: list[Link]) -> tuple[int, int]:
    """Return the width of a family's matrix, and its height, as a Linear has them."""
    rows, columns = links[0].their_shape
    return (rows, columns) if links[0].transposed else (columns, rows)


def _rows(link: Link) -> int:
    """Return how many outputs of the family's matrix are this layer's."""
    begin, end = link.box[1] if link.transposed else link.box[0]
    return end - begin


def _read_config(table: Mapping[str, Any], path: Path) -> LoRA:
    where = path / CONFIG
    if table.get("peft_type") != "LORA":
        raise ScratchLMError(
            f"{where}: peft_type must be LORA; got {shown(table.get('peft_type'))}"
        )
    for name in _REFUSED:
        if table.get(name):
            raise ScratchLMError(f"{where}: {name} is not supported; got {shown(table[name])}")
    if table.get("bias", "none") != "none":
        raise ScratchLMError(f"{where}: bias must be none; got {shown(table['bias'])}")
    if table.get("init_lora_weights", True) not in _INITIAL:
        raise ScratchLMError(
            f"{where}: init_lora_weights={shown(table['init_lora_weights'])} changes the base model"
        )
    targets = table.get("target_modules")
    words = [targets] if isinstance(targets, str) else targets
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ScratchLMError(f"{where}: target_modules must be names; got {shown(targets)}")
    try:
        return LoRA(
            rank=table.get("r", 8),
            alpha=table.get("lora_alpha", 8),
            dropout=table.get("lora_dropout", 0.0),
            rslora=bool(table.get("use_rslora", False)),
            dora=bool(table.get("use_dora", False)),
        )
    except (TypeError, ValueError) as error:
        raise ScratchLMError(f"{where}: {error}") from None


def _own(table: Mapping[str, Any], word: str, layer: str, path: Path) -> Any:
    """Return a layer's rank or α: that of a pattern that names it, or the adapter's."""
    patterns = table.get({"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[word]) or {}
    if not isinstance(patterns, dict):
        raise ScratchLMError(f"{path / CONFIG}: a pattern must be a table; got {shown(patterns)}")
    for name, value in patterns.items():
        if not re.fullmatch(r"\^?[\w.]+", name):  # theirs are expressions: hostile ones take ages
            raise ScratchLMError(f"{path / CONFIG}: {shown(name)} must be a layer's plain name")
        if not isinstance(value, int | float) or not 0 < value < 2**20:
            raise ScratchLMError(f"{path / CONFIG}: {shown(name)} must be above 0 and below 2^20")
        whole = name.removeprefix("^")
        if layer == whole or (whole == name and layer.endswith(f".{name}")):
            return value
    return table.get(word, 8)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = inner_file(path, WEIGHTS)
    found: dict[str, Tensor] = {}
    stored = read_header(file, _MAX_HEADER_BYTES)
    with opened(file) as content:
        for name, one in stored.items():
            if one.dtype not in WEIGHT_DTYPES:
                raise ScratchLMError(f"{file}: {shown(name)} is {one.dtype}, not a weight's dtype")
            tensor = torch.empty(one.shape, dtype=WEIGHT_DTYPES[one.dtype])
            read_exactly(content, one.start, tensor)
            if tensor.numel() and not is_finite(tensor):
                raise ScratchLMError(f"{file}: {shown(name)} holds NaN or infinite values")
            found[name] = tensor
    return found


def _hash(tensors: Mapping[str, Tensor], table: Mapping[str, Any]) -> str:
    """Return a hash of an adapter's tensors, and of what its factors are made from."""
    said = json.dumps([table.get(word) for word in _HASHED], sort_keys=True)
    digest = hashlib.sha256(said.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Writing


def write_peft(
    directory: str | os.PathLike[str],
    model: ModelConfig,
    adapter: Adapter,
    base: str | None = None,
) -> Path:
    """Write an adapter where PEFT finds it; `base` is the base model's name or path."""
    directory = Path(directory)
    check_is_new(directory)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    left = set(adapter.layers())
    names = []
    for name, links in _groups(model):
        layers = [_layer(link) for link in links]
        if not left.intersection(layers):
            continue
        names.append(name)
        part = _joined(model, adapter, name, links)
        rank, alpha = len(part["lora_A.weight"]), part.pop("alpha")
        if rank != adapter.config.rank:
            ranks[name] = rank
        if not math.isclose(alpha, adapter.config.alpha):
            alphas[name] = alpha
        tensors |= {f"{_PREFIX}{name}.{word}": value for word, value in part.items()}
        left.difference_update(layers)
    if left:
        raise ScratchLMError(f"PEFT has no place for an adapter of {listed(sorted(left))}")
    table = _config_table(model, adapter.config, names, ranks, alphas, base)
    with whole_directory(directory) as beside:
        write_file(beside / CONFIG, [(json.dumps(table, indent=2) + "\n").encode()])
        write_file(beside / WEIGHTS, _file_bytes(tensors, _hash(tensors, table)))
    return directory


def _joined(model: ModelConfig, adapter: Adapter, name: str, links: list[Link]) -> dict[str, Any]:
    """Return the adapter of one of their layers, made up of those of ours."""
    present = [link for link in links if f"{_layer(link)}.lora_A" in adapter.tensors]
    scales = {adapter.scale(_layer(link)) for link in present}
    if len(scales) > 1:
        raise ScratchLMError(f"{name}: layers that are one in the family need one factor α / r")
    if adapter.config.dora and len(present) < len(links):
        raise ScratchLMError(f"{name}: DoRA must adapt all of it, or nothing")
    a = torch.cat([adapter.tensors[f"{_layer(link)}.lora_A"] for link in present])
    b = a.new_zeros(_sizes(links)[1], len(a))
    row = column = 0
    magnitudes = []
    for link in links:
        layer, height = _layer(link), _rows(link)
        if link in present:
            own = adapter.tensors[f"{layer}.lora_B"]
            width = own.shape[1]
            b[row : row + height, column : column + width] = _reordered(model, layer, own, out=True)
            column += width
            if adapter.config.dora:
                magnitude = adapter.tensors[f"{layer}.lora_magnitude"]
                magnitudes.append(_reordered(model, layer, magnitude, out=True))
        row += height
    factor = math.sqrt(len(a)) if adapter.config.rslora else len(a)
    found = {"lora_A.weight": a, "lora_B.weight": b, "alpha": scales.pop() * factor}
    if magnitudes:
        found["lora_magnitude_vector"] = torch.cat(magnitudes)
    return found


def _config_table(
    model: ModelConfig,
    config: LoRA,
    names: list[str],
    ranks: dict[str, int],
    alphas: dict[str, float],
    base: str | None,
) -> dict[str, Any]:
    every = [name for name, _ in _groups(model)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": _target_words(names, every),
        "rank_pattern": {f"^{name}": rank for name, rank in ranks.items()},
        "alpha_pattern": {f"^{name}": alpha for name, alpha in alphas.items()},
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "fan_in_fan_out": to_hf_config(model)["model_type"] == "gpt2",
        "bias": "none",
    }


def _target_words(names: list[str], every: list[str]) -> list[str]:
    """Return the shortest endings that name these layers and no others."""
    chosen = set(names)
    for count in (1, 2):
        words = sorted({".".join(name.split(".")[-count:]) for name in names})
        hit = {n for n in every if any(n == word or n.endswith(f".{word}") for word in words)}
        if hit == chosen:
            return words
    return sorted(names)


def _file_bytes(tensors: Mapping[str, Tensor], digest: str) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _HASH: digest}}
    at = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
