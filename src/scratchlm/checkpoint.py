"""A trained model on disk: written so that a crash at any moment leaves only whole checkpoints.

    RUN/checkpoints/step-00000500/
        model.safetensors            the weights, under the names of the state dict
        training_state.safetensors   what else a run needs to go on (optional)
        config.json                  what the model is
        tokenizer.json               optional
        tokenizer_config.json        the chat template and its special tokens (optional)
        manifest.json                size and sha256 of every file, step, versions, metadata

The directory is filled beside its place; every file is flushed and fsync'd, the
manifest last; then it is renamed into place and the parent fsync'd. A name `step-…` therefore
stands for a whole checkpoint or one damaged afterwards, which the hashes show. Checkpoints are
found by scanning; nothing points at a latest one. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scratchlm import __version__
from scratchlm.config import ModelConfig, load_config, to_json
from scratchlm.durable import PREFIX, remove_abandoned, whole_directory, write_file
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import (
    MAX_MANIFEST_BYTES,
    MAX_TOKENIZER_BYTES,
    brief,
    inner_file,
    open_regular,
    read_bytes,
    shown,
)

T = TypeVar("T")

FORMAT_VERSION = 1
MODEL, TRAINING_STATE = "model.safetensors", "training_state.safetensors"
CONFIG, TOKENIZER, MANIFEST = "config.json", "tokenizer.json", "manifest.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_STEP = re.compile(r"step-(\d{8,})")
_CHUNK = 8 << 20
RESCANS = 100  # how often a reader looks again at a run whose checkpoints come and go
# The names safetensors gives to the types a weight or an optimizer's state can have.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# Names and places


def checkpoint_path(run: str | os.PathLike[str], step: int) -> Path:
    """Return where a run keeps its checkpoint of `step`."""
    return Path(run) / "checkpoints" / f"step-{step:08d}"


def step_of(path: str | os.PathLike[str]) -> int:
    """Read the step from a checkpoint's name."""
    match = _STEP.fullmatch(Path(path).name)
    if match is None:
        raise ValueError(f"a checkpoint is named step-NNNNNNNN; got {Path(path).name}")
    return int(match[1])


def find_checkpoints(run: str | os.PathLike[str]) -> list[Path]:
    """List a run's checkpoints, oldest first, whole or damaged."""
    directory = Path(run) / "checkpoints"
    if not directory.is_dir():
        return []
    found: list[Path] = []
    for _ in range(RESCANS):
        names = os.listdir(directory)
        found = [directory / name for name in names if _STEP.fullmatch(name)]
        found = [path for path in found if path.is_dir()]
        if found or not names:
            break  # a list read while one is renamed may show neither the old nor the new one
    return sorted(found, key=step_of)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Say whether a directory is one of our checkpoints (it may still be damaged)."""
    return (Path(path) / MANIFEST).is_file() and (Path(path) / CONFIG).is_file()


def newest_valid(
    run: str | os.PathLike[str], warn: Callable[[str], None] | None = None
) -> Path | None:
    """Return a run's newest whole checkpoint, or None where it has none at all.

    Damaged ones on the way are named through `warn`. Where all are damaged that is an error:
    starting afresh would bury what may still be repaired. One that its trainer removes meanwhile
    is not a damaged one: the run is looked at again.
    """
    damaged: set[str] = set()
    for _ in range(RESCANS):
        found, vanished = find_checkpoints(run), False
        for path in reversed(found):
            try:
                verify_checkpoint(path)
                return path
            except ScratchLMError as error:
                if not path.exists():
                    vanished = True
                elif path.name not in damaged:
                    damaged.add(path.name)
                    message = f"{error}; trying the checkpoint before it"
                    warnings.warn(message, stacklevel=2) if warn is None else warn(message)
        if not vanished:
            break
    else:
        raise ScratchLMError(f"{run}: checkpoints are replaced faster than they can be read")
    if found:
        raise ScratchLMError(f"{run}: all {len(found)} checkpoints are damaged")
    return None


def read_chosen(
    run: str | os.PathLike[str],
    read: Callable[[Path], T],
    which: str | int = "best",
    warn: Callable[[str], None] | None = None,
) -> T | None:
    """Read a run's checkpoint (`choose_checkpoint`), or the next where it vanishes meanwhile."""
    for _ in range(RESCANS):
        before = find_checkpoints(run)
        try:
            path = choose_checkpoint(run, which, warn)
            return None if path is None else read(path)
        except (ScratchLMError, OSError):
            if find_checkpoints(run) == before:  # nothing has been removed meanwhile
                raise
    raise ScratchLMError(f"{run}: checkpoints are replaced faster than they can be read")


def choose_checkpoint(
    run: str | os.PathLike[str],
    which: str | int = "best",
    warn: Callable[[str], None] | None = None,
) -> Path | None:
    """Return a run's checkpoint: the best on held-out data, the last, or that of a step.

    `best` is the last where nothing was held out. None where the run has no checkpoint at all.
    """
    word = str(which)
    if word not in ("best", "last") and not word.isdecimal():
        raise ScratchLMError(f"a checkpoint is best, last or a step; got {word!r}")
    if word.isdecimal():
        path = checkpoint_path(run, int(word))
        if not path.is_dir():
            steps = ", ".join(str(step_of(found)) for found in find_checkpoints(run)) or "none"
            raise ScratchLMError(f"{run} keeps no checkpoint of step {word}; it has {steps}")
        verify_checkpoint(path)
        return path
    newest = newest_valid(run, warn)
    best = None if newest is None or word == "last" else best_step(newest)
    if newest is None or best is None or best == step_of(newest):
        return newest
    path = checkpoint_path(run, best)
    if best == 0 and not path.is_dir():  # random weights were the best, and are not kept
        return newest
    try:
        verify_checkpoint(path)
        return path
    except ScratchLMError as error:
        message = f"the best checkpoint cannot be used ({error}); taking the last, {newest.name}"
        warnings.warn(message, stacklevel=2) if warn is None else warn(message)
        return newest


def best_step(path: str | os.PathLike[str]) -> int | None:
    """Return the step whose held-out loss was the best when a checkpoint was written."""
    return read_manifest(path)["metadata"].get("reached", {}).get("best_step")


# Reading


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check every file against the manifest, size and sha256; return the manifest."""
    path = Path(path)
    manifest = read_manifest(path)
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
            raise ScratchLMError(_gone(path) or f"{file} is damaged: {error.strerror}") from None
        except ScratchLMError as error:
            raise ScratchLMError(_gone(path) or str(error)) from None
        if digest != expected["sha256"]:
            raise ScratchLMError(f"{file} is damaged: its sha256 is not the manifest's")
    return manifest


def _gone(path: Path) -> str | None:
    """Say that a checkpoint is not there (any more), if so."""
    return None if path.is_dir() else f"{path}: no such checkpoint; it may have been removed since"


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint's manifest: `version`, `step`, `files`, `versions`, `metadata`."""
    path = Path(path)
    file = path / MANIFEST
    try:
        manifest = json.loads(read_bytes(file, MAX_MANIFEST_BYTES))
        version, own = manifest.get("version"), manifest.pop("sha256", None)
        if version == FORMAT_VERSION and own != _manifest_digest(manifest):
            raise ValueError
    except FileNotFoundError:
        lost = f"{path} is no checkpoint, or is damaged: no {MANIFEST}"
        raise ScratchLMError(_gone(path) or lost) from None
    except OSError as error:
        raise ScratchLMError(_gone(path) or f"{file} is damaged: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ScratchLMError(f"{file} is damaged: it is not what was written") from None
    if version != FORMAT_VERSION:
        raise ScratchLMError(f"{file}: format version {brief(version, 40)} is not {FORMAT_VERSION}")
    _check_manifest(manifest, file)
    return manifest


def _check_manifest(manifest: dict[str, Any], file: Path) -> None:
    """Refuse a manifest that nobody damaged, and that we did not write either."""
    files, metadata = manifest.get("files"), manifest.get("metadata")
    if not isinstance(files, dict) or not {MODEL, CONFIG} <= files.keys():
        raise ScratchLMError(f"{file}: files must be a table with at least {MODEL} and {CONFIG}")
    for name, entry in files.items():
        plain = Path(name).name == name
        size = entry.get("size") if isinstance(entry, dict) else None
        if not plain or type(size) is not int or not isinstance(entry.get("sha256"), str):
            raise ScratchLMError(f"{file}: {shown(name)} must be a plain name with size and sha256")
    if not isinstance(metadata, dict):
        raise ScratchLMError(f"{file}: metadata must be a table; got {shown(metadata)}")


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read what the model of a checkpoint is."""
    return load_config(Path(path) / CONFIG)


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", file: str = MODEL
) -> dict[str, Tensor]:
    """Read a checkpoint's tensors, one at a time, straight to a device."""
    return dict(iter_tensors(Path(path) / file, device))


def iter_tensors(
    file: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a safetensors file; only the tensor at hand is read."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                yield name, tensors.get_tensor(name)
    except FileNotFoundError:
        raise ScratchLMError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise ScratchLMError(f"{file} is damaged: {error}") from None
    except RuntimeError:  # torch's, where it opens the file again
        if Path(file).exists():
            raise
        raise ScratchLMError(f"{file}: no such file") from None


# Writing


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
    step = step_of(directory) if _STEP.fullmatch(directory.name) else None
    if directory.exists() and _is_whole(directory):
        raise ScratchLMError(f"{directory} exists already; a checkpoint is never overwritten")
    tokenizer = tokenizer_file
    if tokenizer is not None and not isinstance(tokenizer, bytes):
        tokenizer = read_bytes(tokenizer, MAX_TOKENIZER_BYTES)
    try:
        with whole_directory(directory) as beside:
            files = {MODEL: write_tensors(beside / MODEL, model)}
            if training_state is not None:
                files[TRAINING_STATE] = write_tensors(beside / TRAINING_STATE, training_state)
            files[CONFIG] = _write(beside / CONFIG, [to_json(config).encode()])
            if tokenizer is not None:
                files[TOKENIZER] = _write(beside / TOKENIZER, [tokenizer])
            if tokenizer_config is not None:
                files[TOKENIZER_CONFIG] = _write(beside / TOKENIZER_CONFIG, [tokenizer_config])
            manifest = _manifest(step, files, dict(metadata or {}))
            _write(beside / MANIFEST, [manifest.encode()])
            if directory.exists():
                _set_aside(directory, "old")
    except OSError as error:
        raise ScratchLMError(
            f"{directory}: the checkpoint could not be written: {error.strerror or error}"
        ) from None
    return directory


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
            "dtype": _DTYPES[tensor.dtype],
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


def _manifest(step: int | None, files: dict[str, Any], metadata: dict[str, Any]) -> str:
    manifest = {
        "version": FORMAT_VERSION,
        "step": step,
        "files": files,
        "versions": {
            "scratchlm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "metadata": metadata,
    }
    return json.dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=2) + "\n"


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _is_whole(path: Path) -> bool:
    try:
        verify_checkpoint(path)
    except ScratchLMError:
        return False
    return True


# Tidying


def _set_aside(path: Path, why: str) -> Path:
    """Take a checkpoint out of the scan with one rename; a leftover from then on."""
    aside = path.with_name(f".{why}-{path.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def set_aside_after(run: str | os.PathLike[str], step: int) -> list[Path]:
    """Take the checkpoints after `step` out of the scan: the run goes on from `step`.

    They stay on disk, as `.damaged-…`, until the run has a new checkpoint of its own.
    """
    late = [path for path in find_checkpoints(run) if step_of(path) > step]
    return [_set_aside(path, "damaged") for path in late]


def prune_checkpoints(
    run: str | os.PathLike[str], keep_last: int, keep_steps: Iterable[int] = ()
) -> list[Path]:
    """Remove all but the last `keep_last` checkpoints and those of `keep_steps`; return them.

    Call it only once the newest has been verified.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be >= 1; got {keep_last}")
    found, wanted = find_checkpoints(run), set(keep_steps)
    gone = [path for path in found[:-keep_last] if step_of(path) not in wanted]
    for path in gone:
        shutil.rmtree(_set_aside(path, "old"))
    return gone


def remove_damaged(run: str | os.PathLike[str]) -> None:
    """Remove what `set_aside_after` has set aside: the run has a new checkpoint of its own."""
    for path in (Path(run) / "checkpoints").glob(".damaged-step-*"):
        shutil.rmtree(path, ignore_errors=True)


def clean_leftovers(run: str | os.PathLike[str]) -> None:
    """Remove what a crash left half-written or half-removed.

    The caller must be the run's only writer.
    """
    directory = Path(run) / "checkpoints"
    remove_abandoned(directory, f"{PREFIX}*")
    # `.tmp-…` is what they were called by 0.2.0
    left = [path for kind in ("tmp", "old") for path in directory.glob(f".{kind}-*")]
    for path in left:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
