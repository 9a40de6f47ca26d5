"""Read a checkpoint's tensors, whichever number of ranks wrote them: all, one by one, or a box.

    read_tensors(path, device)                       all, by name
    iter_tensors(path, device)                       one at a time
    read_piece(path, name, offsets, lengths)         only the bytes of a box
    with open_tensors(path) as tensors:              many boxes, with the manifest read once
        tensors.read(name, offsets, lengths)

A tensor is put together in the memory where it will stay; beside it there is one piece at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scratchlm.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    MODEL,
    gone,
    is_sharded,
    read_manifest,
    tensor_files,
)
from scratchlm.checkpoint.pieces import (
    TORCH_DTYPES,
    Box,
    StoredTensor,
    check_inside,
    parse_table,
    region,
)
from scratchlm.config import ModelConfig, load_config
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import inner_file, open_regular, shown

_CHUNK = 8 << 20


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check every file against the manifest, size and sha256; return the manifest."""
    path = Path(path)
    manifest = read_manifest(path)
    if is_sharded(manifest):
        for kind in manifest["pieces"]:
            _stored_in_shards(path, manifest, kind)
    for name, expected in manifest["files"].items():
        file = path / name
        try:
            with open_regular(inner_file(path, name)) as content:
                size = os.fstat(content.fileno()).st_size
                if size != expected["size"]:
                    raise ScratchLMError(
                        f"{file} is damaged: expected {expected['size']:,} bytes, got {size:,}"
                    )
                digest = _digest(content)
        except OSError as error:
            raise ScratchLMError(gone(path) or f"{file} is damaged: {error.strerror}") from None
        except ScratchLMError as error:
            raise ScratchLMError(gone(path) or str(error)) from None
        if digest != expected["sha256"]:
            raise ScratchLMError(f"{file} is damaged: its sha256 is not the manifest's")
    return manifest


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """Identify a checkpoint's weights by the hash of their file, or of their shards' hashes."""
    manifest = read_manifest(path)
    hashes = [str(manifest["files"][name]["sha256"]) for name in tensor_files(manifest)]
    if not is_sharded(manifest):
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read what the model of a checkpoint is."""
    return load_config(Path(path) / CONFIG)


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", file: str = MODEL
) -> dict[str, Tensor]:
    """Read a checkpoint's tensors, one at a time, straight to a device."""
    return dict(iter_tensors(path, device, file))


def iter_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", file: str = MODEL
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a checkpoint; only the tensor at hand is read."""
    with open_tensors(path, file, device) as tensors:
        for name in tensors.stored:
            yield name, tensors.read(name)


def read_piece(
    path: str | os.PathLike[str],
    name: str,
    offsets: Sequence[int],
    lengths: Sequence[int],
    file: str = MODEL,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Read the box of a tensor that begins at `offsets` and is `lengths` long, and no more."""
    with open_tensors(path, file, device) as tensors:
        return tensors.read(name, offsets, lengths)


def tensor_shapes(path: str | os.PathLike[str], file: str = MODEL) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint."""
    return {name: stored.shape for name, stored in stored_tensors(path, file).items()}


def stored_tensors(path: str | os.PathLike[str], file: str = MODEL) -> dict[str, StoredTensor]:
    """Return the dtype and shape of every tensor of a checkpoint, and where it lies."""
    with open_tensors(path, file) as tensors:
        return dict(tensors.stored)


@contextlib.contextmanager
def open_tensors(
    path: str | os.PathLike[str], file: str = MODEL, device: torch.device | str = "cpu"
) -> Iterator[TensorReader]:
    """Open a checkpoint's tensors, to read boxes of them; what the manifest says is checked."""
    path = Path(path)
    manifest = read_manifest(path)
    if not tensor_files(manifest, file):
        raise ScratchLMError(f"{path / file}: no such file")
    with contextlib.ExitStack() as stack:
        reader = TensorReader(path, str(device), stack)
        if is_sharded(manifest):
            reader.stored = _stored_in_shards(path, manifest, file)
        else:
            reader.stored = reader.stored_in(file)
        yield reader


def _stored_in_shards(path: Path, manifest: dict[str, Any], file: str) -> dict[str, StoredTensor]:
    sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    try:
        return parse_table(manifest["pieces"][file], file, manifest["shards"], sizes)
    except ScratchLMError as error:
        raise ScratchLMError(f"{path / MANIFEST}: {error}") from None


class TensorReader:
    """The tensors of an open checkpoint; its files are opened when they are first needed."""

    def __init__(self, path: Path, device: str, stack: contextlib.ExitStack) -> None:
        self.stored: Mapping[str, StoredTensor] = {}
        self._path, self._device, self._stack = path, device, stack
        self._files: dict[str, Any] = {}

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Read a tensor, or a box of it; headers are checked before memory is taken."""
        if name not in self.stored:
            raise ScratchLMError(f"{self._path}: no tensor {shown(name)}")
        stored = self.stored[name]
        offsets = (0,) * len(stored.shape) if offsets is None else tuple(offsets)
        lengths = stored.shape if lengths is None else tuple(lengths)
        try:
            check_inside(stored.shape, offsets, lengths)
        except ValueError as error:
            raise ScratchLMError(f"{self._path}: {shown(name)}: {error}") from None
        if len(stored.boxes) == 1 and lengths == stored.shape:
            self._check(stored.boxes[0], stored)
            return self._read_part(stored.boxes[0], region(offsets, lengths))
        found = [(box, box.overlap(offsets, lengths)) for box in stored.boxes]
        parts = [(box, common) for box, common in found if common is not None]
        for box, _ in parts:
            self._check(box, stored)
        if len(parts) == 1:
            return self._read_part(*parts[0])
        out = torch.empty(lengths, dtype=TORCH_DTYPES[stored.dtype], device=self._device)
        for box, common in parts:
            out[_within(common, offsets)] = self._read_part(box, common)
        return out

    def stored_in(self, file: str) -> dict[str, StoredTensor]:
        """Return the tensors of one file, each in a single box."""
        found = {}
        with _naming(self._path / file):
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118 (safe_open is not a mapping)
                one = opened.get_slice(name)
                shape = tuple(one.get_shape())
                box = Box(file, name, (0,) * len(shape), shape)
                found[name] = StoredTensor(one.get_dtype(), shape, (box,))
        return found

    def _read_part(self, box: Box, common: Sequence[slice]) -> Tensor:
        """Read what of a box lies in a region of its tensor."""
        with _naming(self._path / box.file):
            opened = self._open(box.file)
            part = _within(common, box.offsets)
            whole = part == region((0,) * len(part), box.lengths)
            tensor: Tensor = (
                opened.get_tensor(box.key) if whole else opened.get_slice(box.key)[part]
            )
            return tensor

    def _check(self, box: Box, stored: StoredTensor) -> None:
        """Refuse a file whose tensor is not the piece that the manifest says it is."""
        file = self._path / box.file
        with _naming(file):
            one = self._open(box.file).get_slice(box.key)
            dtype, shape = one.get_dtype(), tuple(one.get_shape())
        if dtype != stored.dtype or shape != box.lengths:
            raise ScratchLMError(
                f"{file}: {shown(box.key)} must be {stored.dtype} {list(box.lengths)}; got "
                f"{dtype} {list(shape)}"
            )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            opened = safe_open(self._path / file, framework="pt", device=self._device)
            self._files[file] = self._stack.enter_context(opened)
        return self._files[file]


def _within(common: Sequence[slice], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Return a region of a tensor as the index of a box that begins at `offsets`."""
    return tuple(
        slice(one.start - at, one.stop - at) for one, at in zip(common, offsets, strict=True)
    )


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Let an error of a file be one line with its name."""
    try:
        yield
    except FileNotFoundError:
        raise ScratchLMError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise ScratchLMError(f"{file} is damaged: {error}") from None
    except RuntimeError:  # torch's, where it opens the file again
        if file.exists():
            raise
        raise ScratchLMError(f"{file}: no such file") from None
