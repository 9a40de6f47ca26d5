"""Read a Hugging Face directory: config, and a stream of tensors under our names.

`read_hf` reads config.json and the files' headers and checks all that they determine: which
family, which tensors, which shapes. The weights themselves are read when they are asked for,
one tensor at a time, each from the file straight into the memory where it will stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.errors import ScratchLMError
from scratchlm.interop.hf_config import from_hf_config
from scratchlm.interop.keys import FAMILIES, Family
from scratchlm.interop.matching import Plan, match, num_tensors
from scratchlm.interop.safetensors_file import WEIGHT_DTYPES, Stored, read_header
from scratchlm.interop.streaming import is_finite, read_link, same_bytes
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
_READERS = 4  # threads that read at once; each has a few megabytes in flight
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_hf_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a directory in Hugging Face's layout (it may still be refused)."""
    try:
        table = read_json(inner_file(Path(path), CONFIG), MAX_CONFIG_BYTES)
    except (ScratchLMError, OSError):
        return False
    return "model_type" in table or "architectures" in table


@dataclass(frozen=True)
class HFCheckpoint:
    """A directory whose every tensor is accounted for; its weights are read lazily."""

    path: Path
    model_type: str
    config: ModelConfig
    declared_dtype: torch.dtype | None
    eos_token_ids: tuple[int, ...]
    tokenizer_file: Path | None
    plan: Plan
    stored: Mapping[str, Stored]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors this checkpoint gives, under our names."""
        return dict(self.plan.shapes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the weights are stored in; of several, the one config.json says."""
        found = {self.stored_dtype(name) for name in self.plan.shapes}
        if len(found) == 1:
            return found.pop()
        if self.declared_dtype in found:
            return self.declared_dtype
        words = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise ScratchLMError(f"{self.path}: the weights are stored as {words}; choose a dtype")

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor of ours is stored in; the widest, where several make it up."""
        links = self.plan.links[name] or self.plan.links["token_embeddings.weight"]
        found = {WEIGHT_DTYPES[self.stored[link.theirs].dtype] for link in links}
        return max(found, key=lambda dtype: dtype.itemsize)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (our name, tensor), in the dtype each is stored in."""
        return self.tensors()

    def tensors(
        self,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        allow_nonfinite: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (our name, tensor); only the tensor at hand is read, in `dtype` if given."""
        self._check_tied()
        for name, shape in self.plan.shapes.items():
            out = torch.empty(shape, dtype=dtype or self.stored_dtype(name), device=device)
            self._fill(name, out, allow_nonfinite)
            yield name, out

    def load_into(self, state: Mapping[str, Tensor], *, allow_nonfinite: bool = False) -> None:
        """Fill tensors that exist already (a model's state dict), in their dtype and place."""
        missing, unexpected = self.plan.shapes.keys() - state, state.keys() - self.plan.shapes
        if missing or unexpected:
            raise ValueError(
                f"the model's tensors must be those of {self.path}; "
                f"missing {listed(sorted(missing))}; unexpected {listed(sorted(unexpected))}"
            )
        for name, shape in self.plan.shapes.items():
            if state[name].shape != shape or state[name].is_meta:
                raise ValueError(
                    f"{name} must be {list(shape)} and have memory; "
                    f"got {list(state[name].shape)} on {state[name].device}"
                )
        self._check_tied()

        def fill(name: str) -> None:
            with torch.no_grad():
                self._fill(name, state[name].detach(), allow_nonfinite)

        with ThreadPoolExecutor(min(_READERS, len(os.sched_getaffinity(0)))) as readers:
            try:
                for _ in readers.map(fill, self.plan.shapes):
                    pass
            except BaseException:
                readers.shutdown(cancel_futures=True)
                raise

    def _fill(self, name: str, out: Tensor, allow_nonfinite: bool) -> None:
        if not out.is_contiguous():  # bytes are read into contiguous memory
            whole = torch.empty(out.shape, dtype=out.dtype)
            self._fill(name, whole, allow_nonfinite)
            out.copy_(whole)
            return
        links = self.plan.links[name]
        if not links:
            out.fill_(1)
        for link in links:
            target = out if link.at is None else out[link.at]
            for piece in read_link(self.stored[link.theirs], link, target):
                if not allow_nonfinite and not is_finite(piece):
                    raise ScratchLMError(
                        f"{self.path}: {shown(link.theirs)} holds NaN or infinite values"
                    )

    def _check_tied(self) -> None:
        """A head stored beside the table it is tied to must be that table, byte for byte."""
        head = FAMILIES[self.model_type].head
        if not self.config.tie_embeddings or head not in self.stored:
            return
        table = self.stored[self.plan.links["token_embeddings.weight"][0].theirs]
        if not same_bytes(table, self.stored[head]):
            raise ScratchLMError(
                f"{self.path}: tie_word_embeddings is true, "
                f"but {head} is stored and is not the embedding table"
            )


# Opening


def read_hf(path: str | os.PathLike[str]) -> HFCheckpoint:
    """Open a directory: everything but the weights is read and checked now."""
    path = Path(path)
    if not path.is_dir():
        raise ScratchLMError(f"{path}: no such directory")
    table = read_json(inner_file(path, CONFIG), MAX_CONFIG_BYTES)
    try:
        config = from_hf_config(table)
    except (ValueError, TypeError, ScratchLMError) as error:
        raise ScratchLMError(f"{path / CONFIG}: {brief(error)}") from None
    model_type = table["model_type"]
    family = FAMILIES[model_type]
    stored = _read_headers(path, config, family)
    plan = match(config, family, stored, path)
    has_tokenizer = os.path.lexists(path / TOKENIZER)
    return HFCheckpoint(
        path=path,
        model_type=model_type,
        config=config,
        declared_dtype=_declared_dtype(table, path),
        eos_token_ids=_eos_token_ids(table, path),
        tokenizer_file=inner_file(path, TOKENIZER) if has_tokenizer else None,
        plan=plan,
        stored=stored,
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
