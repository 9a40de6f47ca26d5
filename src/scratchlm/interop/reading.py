"""Read a Hugging Face directory: config, and a stream of tensors under our names.

`read_hf` reads config.json and the files' headers and checks all that they determine: which
family, which tensors, which shapes. The weights themselves are read when they are asked for,
one tensor at a time, each from the file straight into the memory where it will stay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scratchlm.config import ModelConfig
from scratchlm.config.heads import TaskHead
from scratchlm.errors import ScratchLMError
from scratchlm.interop.heads import family_with, head_of
from scratchlm.interop.hf_config import from_hf_config
from scratchlm.interop.keys import FAMILIES, Family
from scratchlm.interop.matching import match, num_tensors
from scratchlm.interop.safetensors_file import WEIGHT_DTYPES, Stored, read_header
from scratchlm.interop.stored_model import StoredModel
from scratchlm.interop.streaming import same_bytes
from scratchlm.untrusted import (
    MAX_CONFIG_BYTES,
    brief,
    inner_file,
    listed,
    read_json,
    shown,
)

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
_MAX_INDEX_BYTES = 32 * 2**20
# What a header may take: a fixed part for its metadata, and a line for every tensor.
_HEADER_BYTES, _HEADER_BYTES_PER_TENSOR = 2**20, 512
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_hf_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a directory in Hugging Face's layout (it may still be refused)."""
    try:
        table = read_json(inner_file(Path(path), CONFIG), MAX_CONFIG_BYTES)
    except (ScratchLMError, OSError):
        return False
    return "model_type" in table or "architectures" in table


@dataclass(frozen=True)
class HFCheckpoint(StoredModel):
    """A directory whose every tensor is accounted for; its weights are read lazily."""

    declared_dtype: torch.dtype | None
    tokenizer_file: Path | None
    head: TaskHead | None = None  # None: a language model's
    pad_token_id: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the weights are stored in; of several, the one config.json says."""
        found = {self.stored_dtype(name) for name in self.mapping.shapes}
        if len(found) == 1:
            return found.pop()
        if self.declared_dtype in found:
            return self.declared_dtype
        words = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise ScratchLMError(f"{self.path}: the weights are stored as {words}; choose a dtype")

    def check(self) -> None:
        """A head stored beside the table it is tied to must be that table, byte for byte."""
        head = FAMILIES[self.model_type].head
        if not self.config.tie_embeddings or head not in self.stored:
            return
        table = self.stored[self.mapping.links["token_embeddings.weight"][0].theirs]
        if not same_bytes(table, self.stored[head]):
            raise ScratchLMError(
                f"{self.path}: tie_word_embeddings is true, "
                f"but {head} is stored and is not the embedding table"
            )


# Opening


def read_hf(path: str | os.PathLike[str], *, with_head: bool = False) -> HFCheckpoint:
    """Open a directory: everything but the weights is read and checked now.

    `with_head` takes task heads, too; without, a language model is expected.
    """
    path = Path(path)
    if not path.is_dir():
        raise ScratchLMError(f"{path}: no such directory")
    table = read_json(inner_file(path, CONFIG), MAX_CONFIG_BYTES)
    try:
        head = head_of(table) if with_head else None
        config = from_hf_config(table, head)
    except (ValueError, TypeError, ScratchLMError) as error:
        raise ScratchLMError(f"{path / CONFIG}: {brief(error)}") from None
    model_type = table["model_type"]
    family = family_with(model_type, head)
    stored = _read_headers(path, config, family)
    mapping = match(config, family, stored, path, head)
    pad = table.get("pad_token_id")
    has_tokenizer = os.path.lexists(path / TOKENIZER)
    return HFCheckpoint(
        path=path,
        model_type=model_type,
        config=config,
        declared_dtype=_declared_dtype(table, path),
        eos_token_ids=_eos_token_ids(table, path),
        tokenizer_file=inner_file(path, TOKENIZER) if has_tokenizer else None,
        mapping=mapping,
        stored=stored,
        head=head,
        pad_token_id=pad if type(pad) is int else None,
    )


def _read_headers(path: Path, config: ModelConfig, family: Family) -> dict[str, Stored]:
    max_tensors = max(num_tensors(config, table) for table in family.tables)
    max_header_bytes = _HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * max_tensors
    has_single, has_index = (os.path.lexists(path / name) for name in (SINGLE, INDEX))
    if has_single and has_index:
        raise ScratchLMError(f"{path}: {SINGLE} and {INDEX} are both there; remove one")
    if has_single:
        return read_header(inner_file(path, SINGLE), max_header_bytes)
    if has_index:
        return _read_shards(path, max_header_bytes)
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ScratchLMError(
            f"{path}: {listed(pickles, 3)} may run code when loaded and is not read; convert it "
            "with transformers: model.save_pretrained(DIR), which writes safetensors"
        )
    raise ScratchLMError(f"{path}: neither {SINGLE} nor {INDEX} is there")


def _read_shards(path: Path, max_header_bytes: int) -> dict[str, Stored]:
    """Read every shard's header; each must hold exactly the tensors the index lists."""
    index = read_json(inner_file(path, INDEX), _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ScratchLMError(f"{path / INDEX}: weight_map must name the shard of every tensor")
    shards = dict.fromkeys(map(_shard_name, index.values()))
    files = {shard: inner_file(path, shard) for shard in shards}
    stored: dict[str, Stored] = {}
    for shard, file in files.items():
        header = read_header(file, max_header_bytes)
        stray = [name for name in header if index.get(name) != shard]
        if stray:
            raise ScratchLMError(f"{file}: tensors the index does not place there: {listed(stray)}")
        stored.update(header)
    absent = [name for name in index if name not in stored]
    if absent:
        raise ScratchLMError(f"{path / INDEX}: tensors that are in no shard: {listed(absent)}")
    return stored


def _shard_name(shard: Any) -> str:
    if not isinstance(shard, str) or not shard.endswith(".safetensors"):
        raise ScratchLMError(f"{INDEX}: a shard must be a .safetensors file; got {shown(shard)}")
    return shard


def _declared_dtype(table: Mapping[str, Any], path: Path) -> torch.dtype | None:
    """Read `dtype`, or `torch_dtype` as it was called before."""
    words = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES.values()}
    declared = [table[key] for key in ("dtype", "torch_dtype") if table.get(key) is not None]
    for word in declared:
        if not isinstance(word, str) or word not in words:
            raise ScratchLMError(
                f"{path / CONFIG}: dtype must be one of {', '.join(words)}; got {shown(word)}"
            )
    if len(set(declared)) > 1:
        raise ScratchLMError(
            f"{path / CONFIG}: dtype and torch_dtype must agree; got {listed(declared)}"
        )
    return words[declared[0]] if declared else None


def _eos_token_ids(table: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Read the end-of-text tokens; generation_config.json overrides config.json."""
    if os.path.lexists(path / GENERATION):
        generation = read_json(inner_file(path, GENERATION), MAX_CONFIG_BYTES)
        table = {**table, **{k: v for k, v in generation.items() if k == "eos_token_id"}}
    ids = table.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ScratchLMError(f"{path}: eos_token_id must be token ids; got {shown(ids)}")
    return tuple(ids)
