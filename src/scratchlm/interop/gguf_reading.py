"""Read a GGUF file: config, tokenizer, and a stream of tensors under our names.

As with a Hugging Face directory, everything but the weights is read and checked at once. Quantised
weights are dequantised as they are read, a few megabytes at a time, or given as the bytes they are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scratchlm.errors import ScratchLMError
from scratchlm.interop.gguf_config import from_metadata
from scratchlm.interop.gguf_file import GGUFFile, StoredBlocks, read_gguf_file
from scratchlm.interop.gguf_names import GGUF_FAMILIES, ROPE_FREQS
from scratchlm.interop.gguf_tokenizer import FoundTokenizer, read_tokenizer
from scratchlm.interop.matching import match
from scratchlm.interop.safetensors_file import opened, read_exactly
from scratchlm.interop.stored_model import StoredModel
from scratchlm.interop.streaming import read_packed
from scratchlm.untrusted import brief, shown

READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
# Where in a block its float16 scales are.
_SCALES = {"Q8_0": slice(0, 2), "Q4_0": slice(0, 2), "Q4_K": slice(0, 4), "Q6_K": slice(208, 210)}
_MAX_ROPE_FREQS = 1 << 13


@dataclass(frozen=True)
class GGUFCheckpoint(StoredModel):
    """A GGUF file whose every tensor is accounted for; its weights are read lazily."""

    tokens: FoundTokenizer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype most weights are stored in; float32 for quantised ones."""
        weights = Counter[torch.dtype]()
        for name, shape in self.mapping.shapes.items():
            weights[self.stored_dtype(name)] += torch.Size(shape).numel()
        return weights.most_common(1)[0][0]

    def stored_name(self, name: str) -> str:
        """The name of a tensor as it is stored: `NAME_q8_0`, say, where it is quantised."""
        links = self.mapping.links[name]
        stored = self.stored[links[0].theirs] if links else None
        return f"{name}_{stored.dtype.lower()}" if isinstance(stored, StoredBlocks) else name

    def packed_tensors(self, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), those stored under another name as the rows of bytes they are."""
        for name, stored_name in names.items():
            if stored_name != name:
                yield stored_name, self._packed(name)
            else:
                out = torch.empty(self.mapping.shapes[name], dtype=self.stored_dtype(name))
                self.fill({name: out})
                yield name, out

    def _packed(self, name: str) -> Tensor:
        (link,) = self.mapping.links[name]
        stored = self.stored[link.theirs]
        assert isinstance(stored, StoredBlocks)
        packed = read_packed(stored, link)  # (blocks, bytes)
        scales = packed[:, _SCALES[stored.dtype]].contiguous().view(torch.float16)
        if not torch.isfinite(scales).all():
            raise ScratchLMError(f"{self.path}: {shown(link.theirs)} holds NaN or infinite values")
        rows = self.mapping.shapes[name][:-1]
        return packed.view(*rows, -1)


def read_gguf(path: str | os.PathLike[str]) -> GGUFCheckpoint:
    """Open a file: everything but the weights is read and checked now."""
    path = Path(path)
    if not path.exists():
        raise ScratchLMError(f"{path}: no such file")
    file = read_gguf_file(path)
    shapes = {name: stored.shape for name, stored in file.tensors.items()}
    try:
        model_type, config = from_metadata(file.metadata, shapes, _rope_freqs(file))
        tokens = read_tokenizer(file.metadata)
    except (ValueError, TypeError, ScratchLMError) as error:
        raise ScratchLMError(f"{path}: {brief(error)}") from None
    family = GGUF_FAMILIES[model_type]
    mapping = match(config, family, file.tensors, path, dtypes=READABLE)
    if tokens.tokenizer is not None and tokens.tokenizer.vocab_size > config.vocab_size:
        raise ScratchLMError(
            f"{path}: the tokenizer has {tokens.tokenizer.vocab_size} ids, "
            f"the embedding {config.vocab_size} rows"
        )
    return GGUFCheckpoint(
        path=path,
        model_type=model_type,
        config=config,
        eos_token_ids=tokens.eos_token_ids,
        mapping=mapping,
        stored=file.tensors,
        tokens=tokens,
    )


def _rope_freqs(file: GGUFFile) -> list[float] | None:
    """Read what the frequencies are divided by, if a file has that."""
    stored = file.tensors.get(ROPE_FREQS)
    if stored is None:
        return None
    if stored.dtype != "F32" or len(stored.shape) != 1 or stored.shape[0] > _MAX_ROPE_FREQS:
        raise ValueError(f"{ROPE_FREQS} must be a short vector of F32")
    values = torch.empty(stored.shape, dtype=torch.float32)
    with opened(stored.file) as content:
        read_exactly(content, stored.start, values)
    return values.tolist()
