"""A model by name: one of our runs, one of our checkpoints, or a Hugging Face directory.

The model is built without memory, given memory once, and filled tensor by tensor, so loading takes
the model and one tensor more. Nothing is converted unless a dtype is asked for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scratchlm import acceleration, checkpoint
from scratchlm.config import ModelConfig
from scratchlm.errors import ScratchLMError
from scratchlm.inference.prompts import AnyTokenizer, default_eos_ids
from scratchlm.interop import check_stored, is_hf_directory, read_hf
from scratchlm.model import TransformerLM
from scratchlm.threads import share_cores
from scratchlm.tokenizer import load_tokenizer

Build = Callable[[ModelConfig, torch.dtype], TransformerLM]


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, with what came with it."""

    model: TransformerLM
    tokenizer: AnyTokenizer | None
    config: ModelConfig
    source: Path  # the directory the weights came from
    eos_ids: tuple[int, ...] = ()  # the tokens that end a text
    tokenizer_problem: str = "the model came without a tokenizer"
    accelerate: bool = True  # whether generation is to use the decoders

    def need_tokenizer(self) -> AnyTokenizer:
        """Return the tokenizer, or say in one line why there is none."""
        if self.tokenizer is None:
            raise ScratchLMError(f"{self.source}: text needs a tokenizer; {self.tokenizer_problem}")
        return self.tokenizer


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    ops: Any = "fast",
    accelerate: bool = True,
    checkpoint: str | int | None = None,
    warn: Callable[[str], None] | None = None,
) -> Loaded:
    """Load a run's best checkpoint, a checkpoint, or a Hugging Face directory.

    `checkpoint` of a run: "best" on held-out data (the default; the last where nothing was held
    out), "last", or a step.
    `dtype` None keeps the dtype the weights are stored in. `warn` hears of damaged checkpoints that
    were passed over. `accelerate=False` leaves the model plain.
    """
    if torch.device(device).type == "cpu":
        share_cores()
    path, build = Path(path), partial(_empty_model, device=device, ops=ops, accelerate=accelerate)
    if not path.exists():
        raise ScratchLMError(f"{path}: no such run, checkpoint or Hugging Face directory")
    return replace(_load(path, dtype, build, checkpoint, warn), accelerate=accelerate)


def _load(
    path: Path,
    dtype: torch.dtype | None,
    build: Build,
    which: str | int | None,
    warn: Callable[[str], None] | None,
) -> Loaded:
    is_run = not checkpoint.is_checkpoint(path) and bool(checkpoint.find_checkpoints(path))
    if which is not None and not is_run:
        raise ScratchLMError(f"{path}: not a run with checkpoints; there is no {which!r} to choose")
    if checkpoint.is_checkpoint(path):
        checkpoint.verify_checkpoint(path)
        return _load_ours(path, dtype, build)
    if is_run:
        found = checkpoint.read_chosen(
            path,
            lambda one: _load_ours(one, dtype, build),
            "best" if which is None else which,
            warn,
        )
        if found is None:
            raise ScratchLMError(f"{path}: the run has no whole checkpoint")
        return found
    if is_hf_directory(path):
        return _load_hf(path, dtype, build)
    raise ScratchLMError(
        f"{path}: must be a run with a checkpoint, a checkpoint, or a Hugging Face directory"
    )


def _load_ours(path: Path, dtype: torch.dtype | None, build: Build) -> Loaded:
    config = checkpoint.read_config(path)
    check_stored(config, path / checkpoint.MODEL)  # before anything is built
    stored = checkpoint.iter_tensors(path / checkpoint.MODEL)
    first = next(stored, None)
    if first is None:
        raise ScratchLMError(f"{path / checkpoint.MODEL}: holds no tensors")
    model = build(config, dtype or first[1].dtype)
    _fill(model.state_dict(), chain([first], stored))
    tokenizer, problem = _tokenizer_in(path)
    imported = checkpoint.read_manifest(path)["metadata"].get("eos_token_ids")
    eos_ids = tuple(imported or default_eos_ids(tokenizer))
    return Loaded(model, tokenizer, config, path, eos_ids, problem)


def _load_hf(path: Path, dtype: torch.dtype | None, build: Build) -> Loaded:
    source = read_hf(path)
    model = build(source.config, dtype or source.dtype)
    source.load_into(model.state_dict())
    tokenizer, problem = _tokenizer_in(path)
    eos_ids = source.eos_token_ids or default_eos_ids(tokenizer)
    return Loaded(model, tokenizer, source.config, path, eos_ids, problem)


def _empty_model(
    config: ModelConfig, dtype: torch.dtype, *, device: Any, ops: Any, accelerate: bool
) -> TransformerLM:
    """Build a model whose weights have memory but no values; drawing them would be in vain."""
    model = TransformerLM(config, ops, device="meta", dtype=dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    if model.token_embeddings.weight.device.type == "cpu":
        _lay_in_large_pages(model)
    elif accelerate:
        acceleration.join_weights(model)
    if accelerate:
        acceleration.accelerate(model)
    return model


def _lay_in_large_pages(model: TransformerLM) -> None:
    """Give all weights one block of memory, in the largest pages that the system has.

    A first touch costs as much for a small page as for a large one, and there are hundreds of
    times as many small ones.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    weights = list(model.parameters())
    starts, end = [], 0
    for weight in weights:
        starts.append(end)
        end += -(-weight.nbytes // 64) * 64
    block = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(advice)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    for weight, start in zip(weights, starts, strict=True):
        part = memory[start : start + weight.nbytes].view(weight.dtype)
        weight.data = part.view(weight.shape)


@torch.no_grad()
def _fill(state: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:  # names and shapes were compared before
        state[name].copy_(tensor)


def _tokenizer_in(path: Path) -> tuple[AnyTokenizer | None, str]:
    """Load the tokenizer that lies with a model, or say why not; ids alone need none."""
    if not any((path / name).exists() for name in ("tokenizer.json", "vocab.json")):
        return None, "the model came without one"
    try:
        return load_tokenizer(path), ""
    except ValueError as error:
        return None, str(error)
