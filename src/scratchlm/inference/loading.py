"""A model by name: one of our runs or checkpoints, a Hugging Face directory, or a GGUF file.

A run that learnt an adapter gives its base with the adapter in its weights.

The model is built without memory, given memory once, and filled tensor by tensor, so loading takes
the model and one tensor more. Nothing is converted unless a dtype is asked for. On a CPU, weights
that lie in a Hugging Face directory as we need them are not copied: they are the file's pages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from scratchlm.inference.adapters import (
    adapter_of,
    check_base,
    find_adapter,
    merge_into,
    read_adapter,
)
from scratchlm.inference.prompts import AnyTokenizer, default_eos_ids
from scratchlm.interop import check_stored, is_gguf, is_hf_directory, read_gguf, read_hf
from scratchlm.model import TransformerLM
from scratchlm.quantization.convert import fill, make_room, quantized_buffers
from scratchlm.quantization.rule import (
    Choice,
    alternatives,
    check_target,
    choose,
    stored_choices,
)
from scratchlm.threads import share_cores
from scratchlm.tokenizer import Tokenizer, load_tokenizer
from scratchlm.tokenizer.chat_template import ChatTemplate


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, with what came with it."""

    model: TransformerLM
    tokenizer: AnyTokenizer | None
    config: ModelConfig
    source: Path  # the directory or file the weights came from
    eos_ids: tuple[int, ...] = ()  # the tokens that end a text
    tokenizer_problem: str = "the model came without a tokenizer"
    accelerate: bool = True  # whether generation is to use the decoders
    chat_template: ChatTemplate | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether some of its matrices are stored in few bits."""
        return bool(quantized_buffers(self.model))

    @property
    def tokenizer_file(self) -> Path | bytes | None:
        """The tokenizer.json that lies with the weights, or what a GGUF file's would hold."""
        file = self.source / checkpoint.TOKENIZER
        if self.source.is_dir():
            return file if file.is_file() else None
        return self.tokenizer.to_bytes() if isinstance(self.tokenizer, Tokenizer) else None

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
    adapter: str | os.PathLike[str] | None = None,
    warn: Callable[[str], None] | None = None,
    quantize: str | None = None,
    tp: int = 1,
) -> Loaded:
    """Load a run's best checkpoint, a checkpoint, a Hugging Face directory, or a GGUF file.

    `checkpoint` of a run: "best" on held-out data (the default; the last where nothing was held
    out), "last", or a step. `adapter`: of a run of ours or in PEFT's format, put into the weights.
    `dtype` None keeps the dtype the weights are stored in. `warn` hears of damaged checkpoints that
    were passed over. `accelerate=False` leaves the model plain. `quantize` stores its matrices in
    few bits: a format of `scratchlm quantize`. `tp`: every rank that `torchrun` has started gets a
    part of each layer; all of them then make the same calls.
    """
    if tp < 1:
        raise ValueError(f"tp must be >= 1; got tp={tp}")
    if tp > 1:
        whole = load_model(
            path,
            dtype=dtype,
            ops=ops,
            checkpoint=checkpoint,
            adapter=adapter,
            warn=warn,
            accelerate=accelerate,
        )
        return _spread(whole, torch.device(device), tp, quantize)
    if quantize is not None:
        check_target(quantize)
    share_cores(torch.device(device))
    path, build = Path(path), partial(_empty_model, device=device, ops=ops, accelerate=accelerate)
    make = Build(build, dtype, torch.device(device), quantize)
    if not path.exists():
        raise ScratchLMError(
            f"{path}: no such run, checkpoint, Hugging Face directory or GGUF file"
        )
    loaded = _load(path, make, checkpoint, warn)
    if adapter is not None:
        _refuse_quantized(loaded, adapter)
        merge_into(loaded.model, find_adapter(adapter, loaded.config), adapter)
    template = loaded.chat_template or _template_in(loaded.source, warn)
    return replace(loaded, accelerate=accelerate, chat_template=template)


def _spread(whole: Loaded, device: torch.device, tp: int, quantize: str | None) -> Loaded:
    """Keep this rank's part of each layer."""
    from scratchlm.parallel.ranks import join_for_good
    from scratchlm.parallel.tensor import TensorParallel

    if quantize is not None or whole.is_quantized:
        raise ScratchLMError(f"{whole.source}: quantised weights are not cut over ranks (tp={tp})")
    ranks = join_for_good(device.type, tp)
    TensorParallel(whole.model, ranks)
    whole.model.requires_grad_(False).to(ranks.device)
    return whole


def _load(
    path: Path,
    build: Build,
    which: str | int | None,
    warn: Callable[[str], None] | None,
) -> Loaded:
    is_run = not checkpoint.is_checkpoint(path) and bool(checkpoint.find_checkpoints(path))
    if which is not None and not is_run:
        raise ScratchLMError(f"{path}: not a run with checkpoints; there is no {which!r} to choose")
    if checkpoint.is_checkpoint(path):
        checkpoint.verify_checkpoint(path)
        return _load_ours(path, build)
    if is_run:
        found = checkpoint.read_chosen(
            path,
            lambda one: _load_ours(one, build),
            "best" if which is None else which,
            warn,
        )
        if found is None:
            raise ScratchLMError(f"{path}: the run has no whole checkpoint")
        return found
    if is_hf_directory(path):
        return _load_hf(path, build)
    if is_gguf(path):
        return _load_gguf(path, build)
    raise ScratchLMError(
        f"{path}: must be a run with a checkpoint, a checkpoint, a Hugging Face directory, "
        "or a GGUF file"
    )


def _load_ours(path: Path, build: Build) -> Loaded:
    if "head" in checkpoint.read_manifest(path)["metadata"]:
        raise ScratchLMError(f"{path}: a model with a task head; `scratchlm predict` uses it")
    record = adapter_of(checkpoint.read_manifest(path)["metadata"], path)
    if record is not None:
        return _load_adapted(path, record, build)
    config = checkpoint.read_config(path)
    # before anything is built
    names = check_stored(config, checkpoint.stored_tensors(path), path, alternatives)
    choices = stored_choices(config, names)
    if build.quantize is not None and any(choice.format for choice in choices):
        raise ScratchLMError(f"{path} is quantised already; quantize={build.quantize!r} is not")
    stored = checkpoint.iter_tensors(path)
    first = next(stored, None)
    if first is None:
        raise ScratchLMError(f"{path}: holds no tensors")
    model = build.fill(config, first[1].dtype, choices, chain([first], stored))
    tokenizer, problem = _tokenizer_in(path)
    imported = checkpoint.read_manifest(path)["metadata"].get("eos_token_ids")
    eos_ids = tuple(imported or default_eos_ids(tokenizer))
    return Loaded(model, tokenizer, config, path, eos_ids, problem)


def _load_adapted(path: Path, record: Mapping[str, Any], build: Build) -> Loaded:
    """Load the base of an adapter, and put the adapter into its weights."""
    base = _load(check_base(record, path), build, None, None)
    _refuse_quantized(base, path)
    merge_into(base.model, read_adapter(path), path)
    tokenizer, problem = _tokenizer_in(path)
    eos_ids = checkpoint.read_manifest(path)["metadata"].get("eos_token_ids")
    return replace(
        base,
        source=path,
        tokenizer=tokenizer,
        tokenizer_problem=problem,
        eos_ids=tuple(eos_ids or base.eos_ids),
    )


def _refuse_quantized(base: Loaded, adapter: object) -> None:
    if base.is_quantized:
        raise ScratchLMError(
            f"{adapter}: an adapter cannot be put into quantised weights; `scratchlm merge` it "
            "with its base, then quantise the result"
        )


def _load_hf(path: Path, build: Build) -> Loaded:
    source = read_hf(path)
    if build.quantize is None:
        dtype = build.dtype or source.dtype
        mapped = source.mapped(dtype) if build.device.type == "cpu" else {}
        model = build.empty(source.config, dtype, (), mapped=mapped)
        source.load_into(model.state_dict(), mapped=mapped)
    else:
        model = build.fill(source.config, source.dtype, (), source.tensors())
    tokenizer, problem = _tokenizer_in(path)
    eos_ids = source.eos_token_ids or default_eos_ids(tokenizer)
    return Loaded(model, tokenizer, source.config, path, eos_ids, problem)


def _load_gguf(path: Path, build: Build) -> Loaded:
    source = read_gguf(path)
    names = {name: source.stored_name(name) for name in source.shapes}
    for name, shape in source.shapes.items():  # what we have no quantised layer for is widened
        if names[name] not in (other for other, _ in alternatives(name, shape)):
            names[name] = name
    choices = stored_choices(source.config, names)
    if build.quantize is not None and any(choice.format for choice in choices):
        raise ScratchLMError(f"{path} is quantised already; quantize={build.quantize!r} is not")
    if build.quantize is None and not any(choice.format for choice in choices):
        model = build.empty(source.config, build.dtype or source.dtype, ())
        source.load_into(model.state_dict())
    else:
        model = build.fill(source.config, source.dtype, choices, source.packed_tensors(names))
    found = source.tokens
    return Loaded(
        model,
        found.tokenizer,
        source.config,
        path,
        found.eos_token_ids or default_eos_ids(found.tokenizer),
        found.problem,
        chat_template=found.chat_template,
    )


@dataclass(frozen=True)
class Build:
    """How the caller wants the model: on which device, in which dtype, quantised to what."""

    empty: Callable[..., TransformerLM]  # `_empty_model`
    dtype: torch.dtype | None
    device: torch.device
    quantize: str | None

    def fill(
        self,
        config: ModelConfig,
        stored_dtype: torch.dtype,
        choices: Sequence[Choice],
        tensors: Iterator[tuple[str, Tensor]],
    ) -> TransformerLM:
        """Build a model and fill it, tensor by tensor."""
        if self.quantize is not None:
            choices = choose(config, self.quantize)
        dtype = self.dtype or stored_dtype
        if self.dtype is None and any(choice.format for choice in choices):
            # what stays wide is small, and kernels take the rest with this
            dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        model = self.empty(config, dtype, choices)
        fill(model, choices, tensors)
        return model


def _empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    choices: Sequence[Choice],
    *,
    device: Any,
    ops: Any,
    accelerate: bool,
    mapped: Mapping[str, Tensor] | None = None,
) -> TransformerLM:
    """Build a model whose weights have memory but no values; drawing them would be in vain.

    `mapped`: weights that are there already.
    """
    model = TransformerLM(config, ops, device="meta", dtype=dtype)
    make_room(model, choices)
    quantised = any(choice.format for choice in choices)
    if accelerate and quantised:
        acceleration.lay_out(model, torch.device(device))
    if torch.device(device).type == "cpu":
        _give_memory(model, mapped or {})
    else:
        model.to_empty(device=device)
        if accelerate and not quantised:
            acceleration.join_weights(model)
    model.eval().requires_grad_(False)
    if accelerate:
        acceleration.accelerate(model)
    return model


def _give_memory(model: TransformerLM, mapped: Mapping[str, Tensor]) -> None:
    """Give every weight the tensor in `mapped`, or a place in one block of large pages."""
    places = {id(w): mapped[name] for name, w in model.named_parameters() if name in mapped}
    weights: list[Tensor] = [*model.parameters(), *quantized_buffers(model)]
    weights = [weight for weight in weights if id(weight) not in places]
    starts, end = [], 0
    for weight in weights:
        starts.append(end)
        end += -(-weight.nbytes // 64) * 64
    memory = _large_pages(end)
    for weight, start in zip(weights, starts, strict=True):
        part = memory[start : start + weight.nbytes]
        places[id(weight)] = part.view(weight.dtype).view(weight.shape)

    def place(tensor: Tensor) -> Tensor:
        part = places.get(id(tensor))
        return torch.empty(tensor.shape, dtype=tensor.dtype) if part is None else part

    model._apply(place)


def _large_pages(size: int) -> Tensor:
    """Return so many bytes of memory, in the largest pages that the system has.

    A first touch costs as much for a small page as for a large one, and there are hundreds of
    times as many small ones.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(advice)
    return torch.frombuffer(block, dtype=torch.uint8)


def _template_in(path: Path, warn: Callable[[str], None] | None) -> ChatTemplate | None:
    """Load the chat template that lies with a model; one that cannot be read is reported."""
    try:
        return ChatTemplate.from_directory(path)
    except ScratchLMError as error:
        message = f"the chat template is not used: {error}"
        warnings.warn(message, stacklevel=3) if warn is None else warn(message)
        return None


def _tokenizer_in(path: Path) -> tuple[AnyTokenizer | None, str]:
    """Load the tokenizer that lies with a model, or say why not; ids alone need none."""
    if not any((path / name).exists() for name in ("tokenizer.json", "vocab.json")):
        return None, "the model came without one"
    try:
        return load_tokenizer(path), ""
    except ValueError as error:
        return None, str(error)
