"""Tensors of a file under our names, read when they are asked for, each into its place."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.errors import ScratchLMError
from scratchlm.interop.links import Link
from scratchlm.interop.matching import TensorMap
from scratchlm.interop.safetensors_file import WEIGHT_DTYPES, Stored, map_file
from scratchlm.interop.streaming import is_finite, read_link, view_link
from scratchlm.untrusted import listed, shown

_READERS = 4  # threads that read at once; each has a few megabytes in flight


@dataclass(frozen=True)
class StoredModel:
    """A model whose every tensor is accounted for; its weights are read lazily."""

    path: Path
    model_type: str
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    mapping: TensorMap
    stored: Mapping[str, Stored]

    def check(self) -> None:
        """Check what can be known only from the weights, before any is read."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors this checkpoint gives, under our names."""
        return dict(self.mapping.shapes)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor of ours is stored in; the widest, where several make it up."""
        links = self.mapping.links[name] or self.mapping.links["token_embeddings.weight"]
        found = {WEIGHT_DTYPES.get(self.stored[link.theirs].dtype, torch.float32) for link in links}
        return max(found, key=lambda dtype: dtype.itemsize)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (our name, tensor), in the dtype each is stored in."""
        return self.tensors()

    def tensors(
        self,
        *,
        dtype: torch.dtype | None = None,
        allow_nonfinite: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (our name, tensor); only the tensor at hand is read, in `dtype` if given.

        What can stay in the file's pages does (`mapped`); the file must stay as it is then, too.
        """
        self.check()
        mapped = self.mapped(dtype)
        for name, shape in self.mapping.shapes.items():
            out = mapped.pop(name, None)
            if out is None:
                out = torch.empty(shape, dtype=dtype or self.stored_dtype(name))
                self.fill(name, out, allow_nonfinite)
            elif not allow_nonfinite:
                self._check_finite(name, out)
            yield name, out

    def mapped(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors that lie in the file as we need them, as its pages, unchecked.

        Nothing is read or copied yet. Where `dtype` is given, a tensor must be stored in it.
        """
        ends: dict[Path, int] = {}
        for stored in self.stored.values():
            ends[stored.file] = max(ends.get(stored.file, 0), stored.start + stored.nbytes)
        pages = {file: map_file(file, end) for file, end in ends.items()}
        found = {}
        for name, links in self.mapping.links.items():
            if len(links) != 1 or dtype not in (None, self.stored_dtype(name)):
                continue
            stored = self.stored[links[0].theirs]
            view = view_link(stored, links[0], pages[stored.file])
            if view is not None:
                found[name] = view
        return found

    def load_into(self, state: Mapping[str, Tensor], *, mapped: Collection[str] = ()) -> None:
        """Fill tensors that exist already (a model's state dict), in their dtype and place.

        `mapped`: names of those that are the file's pages already; their values are checked.
        """
        missing, unexpected = self.mapping.shapes.keys() - state, state.keys() - self.mapping.shapes
        if missing or unexpected:
            raise ValueError(
                f"the model's tensors must be those of {self.path}; "
                f"missing {listed(sorted(missing))}; unexpected {listed(sorted(unexpected))}"
            )
        for name, shape in self.mapping.shapes.items():
            if state[name].shape != shape or state[name].is_meta:
                raise ValueError(
                    f"{name} must be {list(shape)} and have memory; "
                    f"got {list(state[name].shape)} on {state[name].device}"
                )
        self.check()

        def fill(name: str) -> None:
            with torch.no_grad():
                if name in mapped:
                    self._check_finite(name, state[name])
                else:
                    self.fill(name, state[name].detach())

        with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
            try:
                for _ in readers.map(fill, self.mapping.shapes):
                    pass
            except BaseException:
                readers.shutdown(cancel_futures=True)
                raise

    def fill(self, name: str, out: Tensor, allow_nonfinite: bool = False) -> None:
        """Read one tensor into memory that exists already."""
        if not out.is_contiguous():  # bytes are read into contiguous memory
            whole = torch.empty(out.shape, dtype=out.dtype)
            self.fill(name, whole, allow_nonfinite)
            out.copy_(whole)
            return
        links = self.mapping.links[name]
        if not links:
            out.fill_(1)
        for link in links:
            target = out if link.at is None else out[link.at]
            for piece in read_link(self.stored[link.theirs], link, target):
                if not allow_nonfinite and not is_finite(piece):
                    raise self._not_finite(link)

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() and not is_finite(tensor):
            raise self._not_finite(self.mapping.links[name][0])

    def _not_finite(self, link: Link) -> ScratchLMError:
        return ScratchLMError(f"{self.path}: {shown(link.theirs)} holds NaN or infinite values")
