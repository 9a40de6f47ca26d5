"""One GGUF file, read without trusting it.

    4 bytes   "GGUF", then the version as u32, the number of tensors and of keys as u64
    the keys  name, type, value; a text is its length as u64 and UTF-8, an array its items' type,
              their number as u64, and the items
    tensors   name, number of dimensions, dimensions (the last of ours first), type, offset
    the rest  the tensors' bytes, each at a multiple of general.alignment

All numbers are little endian. Everything is checked on the header before a byte of a tensor is
read: no count or length is believed before the file is seen to have the bytes for it, every tensor
begins where the one before it ends, and the last ends where the file ends.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from scratchlm.errors import ScratchLMError
from scratchlm.interop.gguf_types import ARRAY, BOOL, SCALARS, STRING, TENSOR_TYPES, TensorType
from scratchlm.interop.safetensors_file import Stored
from scratchlm.untrusted import open_regular, shown

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
# Real files have some fifty keys, a few hundred thousand texts, ten thousand tensors.
_MAX_KEYS, _MAX_TENSORS, _MAX_STRINGS = 1 << 12, 1 << 16, 1 << 21
_MAX_HEADER_BYTES, _MAX_KEY_BYTES, _MAX_NAME_BYTES = 128 << 20, 1 << 10, 63
_MAX_DIMS, _MAX_DIM, _MAX_ALIGNMENT = 4, 1 << 40, 1 << 16
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class StoredBlocks(Stored):
    """Where a quantised tensor lies: rows of blocks, each of so many weights and bytes."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        kind = TENSOR_TYPES[self.dtype]
        return math.prod(self.shape) // kind.block * kind.nbytes


@dataclass(frozen=True)
class GGUFFile:
    """The keys of a file, and where its tensors lie."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as a GGUF file does (it may still be refused)."""
    try:
        with open_regular(path) as file:
            return file.read(4) == MAGIC
    except (OSError, ScratchLMError):
        return False


def read_gguf_file(path: Path) -> GGUFFile:
    """Read and validate everything but the tensors' bytes."""
    with open_regular(path) as file:
        header = _Header(file, path)
        if header.take(4) != MAGIC:
            raise ScratchLMError(f"{path}: not a GGUF file: it does not begin with GGUF")
        version = header.number("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "it is big endian" if swapped else f"its version is {version}"
            raise ScratchLMError(f"{path}: only GGUF 2 and 3, little endian, are read; {why}")
        num_tensors = header.count("tensors", _LEAST_TENSOR_BYTES, _MAX_TENSORS)
        num_keys = header.count("keys", _LEAST_KEY_BYTES, _MAX_KEYS)
        metadata = _read_keys(header, num_keys)
        alignment = _alignment(metadata, path)
        spans = _read_spans(header, num_tensors, alignment)
        start = -(-header.at // alignment) * alignment
        size = header.size
    _check_cover(spans, size - start, alignment, path)
    stored = {
        name: (Stored if kind.block == 1 else StoredBlocks)(path, kind.name, shape, start + offset)
        for name, (kind, shape, offset) in spans.items()
    }
    return GGUFFile(path, metadata, stored)


class _Header:
    """A file read from its beginning; what it claims to hold is compared with what is left."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.at = self.strings = 0

    def wrong(self, rule: str) -> ScratchLMError:
        return ScratchLMError(f"{self.path}: {rule}")

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise self.wrong(
                f"cut short: {count:,} bytes are claimed at {self.at:,} of {self.size:,}"
            )
        if self.at + count > _MAX_HEADER_BYTES:
            raise self.wrong(f"keys and tensor names must not exceed {_MAX_HEADER_BYTES:,} bytes")
        data = self.file.read(count)
        if len(data) != count:
            raise self.wrong("the file ended while it was being read")
        self.at += count
        return data

    def number(self, form: str) -> Any:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def count(self, what: str, least_bytes: int, most: int) -> int:
        """Read how many of something follow, which the file must have the bytes for."""
        count = self.number("<Q")
        if count > most:
            raise self.wrong(f"at most {most:,} {what} are read; got {count:,}")
        if count * least_bytes > self.size - self.at:
            raise self.wrong(
                f"cut short: {count:,} {what} are claimed at {self.at:,} of {self.size:,}"
            )
        return int(count)

    def text(self, what: str, most: int = _MAX_HEADER_BYTES) -> str:
        length = self.number("<Q")
        if length > most:
            raise self.wrong(f"{what} must not exceed {most:,} bytes; got {length:,}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not UTF-8") from None


# Keys


def _read_keys(header: _Header, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = header.text("a key", _MAX_KEY_BYTES)
        if not key or key in metadata:
            wrong = f"the key {shown(key)} stands twice" if key else "a key must not be empty"
            raise header.wrong(wrong)
        metadata[key] = _read_value(header, key, header.number("<I"))
    return metadata


def _read_value(header: _Header, key: str, kind: int) -> Any:
    if kind == STRING:
        return header.text(shown(key))
    if kind == ARRAY:
        return _read_array(header, key)
    if kind not in SCALARS:
        raise header.wrong(f"{shown(key)} has the type {kind}, which is none")
    value = header.number(f"<{SCALARS[kind]}")
    if kind == BOOL and value > 1:
        raise header.wrong(f"{shown(key)} must be true or false; got {value}")
    return bool(value) if kind == BOOL else value


def _read_array(header: _Header, key: str) -> list[str] | np.ndarray:
    kind = header.number("<I")
    if kind == ARRAY:
        raise header.wrong(f"{shown(key)} is an array of arrays, which nothing needs")
    if kind == STRING:
        count = header.count(f"texts of {shown(key)}", 8, _MAX_STRINGS - header.strings)
        header.strings += count
        what = f"a text of {shown(key)}"
        return [header.text(what) for _ in range(count)]
    if kind not in SCALARS:
        raise header.wrong(f"{shown(key)} has items of type {kind}, which is none")
    dtype = np.dtype(f"<{SCALARS[kind]}")
    count = header.count(f"items of {shown(key)}", dtype.itemsize, _MAX_HEADER_BYTES)
    values = np.frombuffer(header.take(count * dtype.itemsize), dtype)
    if kind == BOOL and values.size and values.max() > 1:
        raise header.wrong(f"{shown(key)} must hold true or false; got {values.max()}")
    return values


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    power = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
    if not power or not 8 <= alignment <= _MAX_ALIGNMENT:
        raise ScratchLMError(
            f"{path}: general.alignment must be a power of 2 from 8 to {_MAX_ALIGNMENT:,}; "
            f"got {shown(alignment)}"
        )
    return alignment


# Tensors

_Span = tuple[TensorType, tuple[int, ...], int]


def _read_spans(header: _Header, count: int, alignment: int) -> dict[str, _Span]:
    spans: dict[str, _Span] = {}
    for _ in range(count):
        name = header.text("a tensor's name", _MAX_NAME_BYTES)
        if name in spans:
            raise header.wrong(f"the tensor {shown(name)} stands twice")
        spans[name] = _read_span(header, name, alignment)
    return spans


def _read_span(header: _Header, name: str, alignment: int) -> _Span:
    def wrong(rule: str) -> ScratchLMError:
        return header.wrong(f"tensor {shown(name)}: {rule}")

    num_dims = header.number("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise wrong(f"a tensor has 1 to {_MAX_DIMS} dimensions; got {num_dims}")
    shape = tuple(header.number("<Q") for _ in range(num_dims))[::-1]
    number, offset = header.number("<I"), header.number("<Q")
    if not all(1 <= size <= _MAX_DIM for size in shape):
        raise wrong(f"a dimension is from 1 to 2^40; got {shown(list(shape))}")
    kind = _BY_NUMBER.get(number)
    if kind is None:
        raise wrong(f"unknown type {number}")
    if shape[-1] % kind.block:
        raise wrong(f"{kind.name} has blocks of {kind.block}; a row has {shape[-1]} weights")
    if offset % alignment:
        raise wrong(f"its offset must be a multiple of {alignment}; got {offset:,}")
    return kind, shape, offset


_BY_NUMBER = {kind.number: kind for kind in TENSOR_TYPES.values()}


def _check_cover(spans: dict[str, _Span], size: int, alignment: int, path: Path) -> None:
    """Refuse tensors that overlap, leave a gap, or do not end where the file ends."""
    at = end = 0
    before = ""
    for name, (kind, shape, offset) in sorted(spans.items(), key=lambda item: item[1][2]):
        if offset < at:
            raise ScratchLMError(f"{path}: tensors {shown(before)} and {shown(name)} overlap")
        if offset > at:
            raise ScratchLMError(f"{path}: {offset - at:,} unreferenced bytes before {shown(name)}")
        end = offset + math.prod(shape) // kind.block * kind.nbytes
        at, before = -(-end // alignment) * alignment, name
    if end > max(size, 0):
        raise ScratchLMError(
            f"{path}: cut short: tensor {shown(before)} ends at byte {end:,} of {max(size, 0):,}"
        )
    if at < size:
        raise ScratchLMError(f"{path}: {size - at:,} unreferenced bytes at the end")
