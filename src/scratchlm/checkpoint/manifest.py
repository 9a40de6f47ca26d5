"""The manifest of a checkpoint: its files, their hashes, and where the pieces of tensors lie.

Version 1 has one `model.safetensors` (and one `training_state.safetensors`). Version 2 has one of
each per rank, and `pieces` says of which boxes each tensor consists; a reader that knows only
version 1 refuses it by its number. The manifest carries its own sha256, so damage is seen; what it
says is checked all the same, since anybody can write one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from scratchlm import __version__
from scratchlm.checkpoint.pieces import MAX_SHARDS, shard_file
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import MAX_MANIFEST_BYTES, brief, listed, read_bytes, shown

FORMAT_VERSION, SHARDED_VERSION = 1, 2
MODEL, TRAINING_STATE = "model.safetensors", "training_state.safetensors"
CONFIG, TOKENIZER, MANIFEST = "config.json", "tokenizer.json", "manifest.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a manifest: `version`, `step`, `files`, `versions`, `metadata`; `shards`, `pieces`."""
    path = Path(path)
    file = path / MANIFEST
    try:
        manifest = json.loads(read_bytes(file, MAX_MANIFEST_BYTES))
        version, own = manifest.get("version"), manifest.pop("sha256", None)
        known = type(version) is int and version in (FORMAT_VERSION, SHARDED_VERSION)
        if known and own != manifest_digest(manifest):
            raise ValueError
    except FileNotFoundError:
        lost = f"{path} is no checkpoint, or is damaged: no {MANIFEST}"
        raise ScratchLMError(gone(path) or lost) from None
    except OSError as error:
        raise ScratchLMError(gone(path) or f"{file} is damaged: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ScratchLMError(f"{file} is damaged: it is not what was written") from None
    if not known:
        wanted = f"{FORMAT_VERSION} or {SHARDED_VERSION}"
        raise ScratchLMError(f"{file}: format version {brief(version, 40)} is not {wanted}")
    _check_manifest(manifest, file)
    return manifest


def gone(path: Path) -> str | None:
    """Say that a checkpoint is not there (any more), if so."""
    return None if path.is_dir() else f"{path}: no such checkpoint; it may have been removed since"


def is_sharded(manifest: dict[str, Any]) -> bool:
    """Say whether several ranks wrote the tensors."""
    return manifest["version"] == SHARDED_VERSION


def tensor_files(manifest: dict[str, Any], file: str = MODEL) -> list[str]:
    """Name the files that hold the tensors of MODEL or TRAINING_STATE; none where it has none."""
    if not is_sharded(manifest):
        return [file] if file in manifest["files"] else []
    if file not in manifest["pieces"]:
        return []
    shards = manifest["shards"]
    return [shard_file(file, shard, shards) for shard in range(1, shards + 1)]


def _check_manifest(manifest: dict[str, Any], file: Path) -> None:
    """Refuse a manifest that nobody damaged, and that we did not write either."""
    files, metadata = manifest.get("files"), manifest.get("metadata")
    needed = [MODEL, CONFIG]
    if is_sharded(manifest):
        _check_shards(manifest.get("shards"), manifest.get("pieces"), file)
        needed = [*tensor_files(manifest), *tensor_files(manifest, TRAINING_STATE), CONFIG]
    if not isinstance(files, dict) or not files.keys() >= {*needed}:
        lost = [name for name in needed if not isinstance(files, dict) or name not in files]
        raise ScratchLMError(f"{file}: files must be a table with at least {listed(lost)}")
    for name, entry in files.items():
        plain = Path(name).name == name
        size = entry.get("size") if isinstance(entry, dict) else None
        if not plain or type(size) is not int or not isinstance(entry.get("sha256"), str):
            raise ScratchLMError(f"{file}: {shown(name)} must be a plain name with size and sha256")
    if not isinstance(metadata, dict):
        raise ScratchLMError(f"{file}: metadata must be a table; got {shown(metadata)}")


def _check_shards(shards: Any, pieces: Any, file: Path) -> None:
    if type(shards) is not int or not 1 <= shards <= MAX_SHARDS:
        raise ScratchLMError(f"{file}: shards must be 1 to {MAX_SHARDS:,}; got {shown(shards)}")
    known = (MODEL, TRAINING_STATE)
    if not isinstance(pieces, dict) or MODEL not in pieces or not pieces.keys() <= {*known}:
        raise ScratchLMError(f"{file}: pieces must be tables of {MODEL} and {TRAINING_STATE}")
    if not all(isinstance(table, dict) for table in pieces.values()):
        raise ScratchLMError(f"{file}: pieces must be tables of {MODEL} and {TRAINING_STATE}")


def manifest_text(
    step: int | None,
    files: dict[str, Any],
    metadata: dict[str, Any],
    shards: int = 1,
    pieces: dict[str, Any] | None = None,
) -> str:
    """Format a manifest: indented, but for the pieces, of which each tensor's are one line."""
    manifest: dict[str, Any] = {
        "version": FORMAT_VERSION if pieces is None else SHARDED_VERSION,
        "step": step,
        "files": files,
        "versions": {
            "scratchlm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "metadata": metadata,
        **({} if pieces is None else {"shards": shards, "pieces": pieces}),
    }
    manifest["sha256"] = manifest_digest(manifest)
    manifest.pop("pieces", None)
    text = json.dumps(manifest, indent=2)
    if pieces is not None:
        tables = ",\n".join(_table_text(name, table) for name, table in pieces.items())
        text = f'{text[:-2]},\n  "pieces": {{\n{tables}\n  }}\n}}'
    return text + "\n"


def _table_text(name: str, table: dict[str, Any]) -> str:
    lines = ",\n".join(f"      {json.dumps(key)}: {json.dumps(row)}" for key, row in table.items())
    return f"    {json.dumps(name)}: {{\n{lines}\n    }}"


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Hash what a manifest says, whatever its layout."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
