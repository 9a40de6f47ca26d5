"""Tensors of a file under our names, read when they are asked for, each into its place."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.errors import ScratchLMError
from scratchlm.interop.links import Link
from scratchlm.interop.matching import TensorMap
from scratchlm.interop.safetensors_file import WEIGHT_DTYPES, Stored, map_file
from scratchlm.interop.streaming import is_finite, read_links, view_link
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
                self.fill({name: out}, allow_nonfinite)
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

        jobs: dict[str, list[str]] = {}  # what lies in one tensor of theirs is read together
        for name, links in self.mapping.links.items():
            jobs.setdefault(links[0].theirs if links else name, []).append(name)
        waiting = iter(list(jobs.values()))

        def read() -> None:
            with torch.no_grad():
                for names in waiting:
                    for name in names:
                        if name in mapped:
                            self._check_finite(name, state[name])
                    self.fill({name: state[name].detach() for name in names if name not in mapped})

        num_readers = min(_READERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(num_readers) as readers:
            reading = [readers.submit(read) for _ in range(num_readers)]
            try:
                for one in as_completed(reading):
                    one.result()
            finally:
                for _ in waiting:  # after an error, nothing more is read
                    pass

    def fill(self, outs: Mapping[str, Tensor], allow_nonfinite: bool = False) -> None:
        """Read tensors into memory that exists already."""
        wholes = {  # bytes are read into contiguous memory
            name: out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
            for name, out in outs.items()
        }
        parts: dict[str, list[tuple[Link, Tensor]]] = {}
        for name, whole in wholes.items():
            links = self.mapping.links[name]
            if not links:
                whole.fill_(1)
            for link in links:
                part = whole if link.at is None else whole[link.at]
                parts.setdefault(link.theirs, []).append((link, part))
        for theirs, of_theirs in parts.items():
            for finite in read_links(self.stored[theirs], of_theirs):
                if not (finite or allow_nonfinite):
                    raise self._not_finite(theirs)
        for name, out in outs.items():
            if wholes[name] is not out:
                out.copy_(wholes[name])

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() and not is_finite(tensor):
            raise self._not_finite(self.mapping.links[name][0].theirs)

    def _not_finite(self, theirs: str) -> ScratchLMError:
        return ScratchLMError(f"{self.path}: {shown(theirs)} holds NaN or infinite values")
