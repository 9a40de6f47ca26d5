"""Write a checkpoint: whole, or not at all.

The directory is filled beside its place; every file is flushed and fsync'd, the manifest last; then
it is renamed into place and the parent fsync'd.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scratchlm.checkpoint.finding import step_in
from scratchlm.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    MODEL,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TRAINING_STATE,
    manifest_text,
)
from scratchlm.checkpoint.pieces import DTYPES
from scratchlm.checkpoint.reading import verify_checkpoint
from scratchlm.checkpoint.tidying import set_aside
from scratchlm.config import ModelConfig, to_json
from scratchlm.durable import whole_directory, write_file
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import MAX_MANIFEST_BYTES, MAX_TOKENIZER_BYTES, read_bytes


def write_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_file: str | os.PathLike[str] | bytes | None = None,
    tokenizer_config: bytes | None = None,
    training_state: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint at `directory`, whole or not at all; return its path.

    `tokenizer_file`: its path, or what it holds. `tokenizer_config`: a chat template's.
    A whole checkpoint of that name is never overwritten; a damaged one is replaced.
    """
    directory = Path(directory)
    refuse_overwriting(directory)
    tokenizer = tokenizer_bytes(tokenizer_file)
    try:
        with whole_directory(directory) as beside:
            files = {MODEL: write_tensors(beside / MODEL, model)}
            if training_state is not None:
                files[TRAINING_STATE] = write_tensors(beside / TRAINING_STATE, training_state)
            files.update(write_config(beside, config, tokenizer, tokenizer_config))
            manifest = manifest_text(step_in(directory), files, dict(metadata or {}))
            write_manifest(beside, manifest, directory)
    except OSError as error:
        raise ScratchLMError(could_not(directory, error)) from None
    return directory


def could_not(directory: Path, error: Exception) -> str:
    """Say why a checkpoint was not written."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"{directory}: the checkpoint could not be written: {reason}"


def refuse_overwriting(directory: Path) -> None:
    """Refuse to write over a whole checkpoint."""
    if directory.exists() and _is_whole(directory):
        raise ScratchLMError(f"{directory} exists already; a checkpoint is never overwritten")


def _is_whole(path: Path) -> bool:
    try:
        verify_checkpoint(path)
    except ScratchLMError:
        return False
    return True


def tokenizer_bytes(tokenizer: str | os.PathLike[str] | bytes | None) -> bytes | None:
    """Return what a tokenizer's file holds, given the file or that."""
    if tokenizer is None or isinstance(tokenizer, bytes):
        return tokenizer
    return read_bytes(tokenizer, MAX_TOKENIZER_BYTES)


def write_config(
    beside: Path, config: ModelConfig, tokenizer: bytes | None, tokenizer_config: bytes | None
) -> dict[str, Any]:
    """Write what the model is; return size and sha256 of each file."""
    contents = {
        CONFIG: to_json(config).encode(),
        TOKENIZER: tokenizer,
        TOKENIZER_CONFIG: tokenizer_config,
    }
    return {
        name: _write(beside / name, [data]) for name, data in contents.items() if data is not None
    }


def write_manifest(beside: Path, manifest: str, directory: Path) -> None:
    """Write the manifest, the last file, and make room for the directory."""
    data = manifest.encode()
    if len(data) > MAX_MANIFEST_BYTES:  # nobody could read it
        raise ScratchLMError(f"the manifest must not exceed {MAX_MANIFEST_BYTES:,} bytes")
    _write(beside / MANIFEST, [data])
    if directory.exists():
        set_aside(directory, "old")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file tensor by tensor and fsync it; return its size and sha256.

    Streamed, so that saving takes one tensor of extra memory and the hash is that of the values in
    memory, not of what a disk gave back.
    """
    return _write(path, _safetensors_bytes(tensors))


def _safetensors_bytes(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {}
    offset = 0
    # Widest first: every tensor then starts at a multiple of its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and fsync one file, hashing on the way."""
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            yield piece

    write_file(path, hashed())
    return {"size": size, "sha256": digest.hexdigest()}
