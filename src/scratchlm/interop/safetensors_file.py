"""One safetensors file, read without trusting it.

    8 bytes   N, the header's length, little endian
    N bytes   JSON: name -> {dtype, shape, data_offsets: [begin, end)}, and "__metadata__"
    the rest  the tensors' bytes, row-major, little endian

Everything is checked on the header before a byte of a tensor is read: each span is exactly
shape × item size, and the spans cover the rest of the file without overlap, gap or remainder. The
bytes are then read directly into the destination tensors, or the file is mapped and they stay where
they are (`map_file`).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import open_regular, parse_json, shown

# Every dtype the format names, with its size; the ones that can be weights, as torch has them.
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
WEIGHT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: word for word, dtype in WEIGHT_DTYPES.items()}

_MAX_DIMS = 8
_MAX_DIM = 2**40
# How much of a file is in flight while it is converted, checked or transposed.
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: its file, its dtype's word, its shape, and its first byte there."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def item_bytes(self) -> int:
        """The size of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * self.item_bytes


def read_header(path: Path, max_header_bytes: int) -> dict[str, Stored]:
    """Parse and validate a header: return where every tensor of the file lies."""
    header, length, size = _read_table(path, max_header_bytes)
    header.pop("__metadata__", None)
    spans = {name: _span(name, entry, path) for name, entry in header.items()}
    _check_cover(spans, size - 8 - length, path)
    return {
        name: Stored(path, dtype, shape, 8 + length + begin)
        for name, (dtype, shape, begin, _) in spans.items()
    }


def read_metadata(path: Path, max_header_bytes: int) -> dict[str, str]:
    """Return the texts that a file says of itself."""
    found: dict[str, str] = _read_table(path, max_header_bytes)[0].get("__metadata__", {})
    return found


def _read_table(path: Path, max_header_bytes: int) -> tuple[dict[str, Any], int, int]:
    """Return the header, its length, and the file's."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ScratchLMError(f"{path}: cut short: {size} bytes are no safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise ScratchLMError(
                f"{path}: cut short: the header claims {length:,} bytes, the file has {size:,}"
            )
        if length > max_header_bytes:
            raise ScratchLMError(
                f"{path}: the header claims {length:,} bytes; a model of this config "
                f"needs at most {max_header_bytes:,}"
            )
        text = file.read(length)
    if not text.startswith(b"{"):
        raise ScratchLMError(f"{path}: the header of a safetensors file must begin with '{{'")
    header = parse_json(text, str(path))
    _check_metadata(header.get("__metadata__", {}), path)
    return header, length, size


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ScratchLMError(f"{path}: __metadata__ must hold text only")


_Span = tuple[str, tuple[int, ...], int, int]


def _span(name: str, entry: Any, path: Path) -> _Span:
    """Check one entry of the header; return its dtype, shape, begin and end."""

    def wrong(rule: str) -> ScratchLMError:
        return ScratchLMError(f"{path}: tensor {shown(name)}: {rule}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong("an entry has exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise wrong(f"unknown dtype {shown(dtype)}")
    if not _whole(shape, _MAX_DIMS):
        raise wrong(f"shape must be at most {_MAX_DIMS} whole numbers; got {shown(shape)}")
    if not _whole(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets must be begin ≤ end; got {shown(offsets)}")
    begin, end = offsets
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != needed:
        raise wrong(
            f"{dtype} of shape {shape} takes {needed} bytes; its offsets span {end - begin}"
        )
    return dtype, tuple(shape), begin, end


def _whole(values: Any, most: int) -> bool:
    """Return whether this is a short list of integers of plausible size."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value <= _MAX_DIM for value in values)
    )


def _check_cover(spans: dict[str, _Span], size: int, path: Path) -> None:
    """Refuse spans that overlap, leave a gap, or do not end where the file ends."""
    at, before = 0, ""
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin < at:
            raise ScratchLMError(f"{path}: tensors {shown(before)} and {shown(name)} overlap")
        if begin > at:
            raise ScratchLMError(f"{path}: {begin - at} unreferenced bytes before {shown(name)}")
        at, before = end, name
    if at > size:
        raise ScratchLMError(
            f"{path}: cut short: tensor {shown(before)} ends at byte {at:,} of {size:,}"
        )
    if at < size:
        raise ScratchLMError(f"{path}: {size - at:,} unreferenced bytes at the end")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for unbuffered random access."""
    with open_regular(path, buffering=0) as file:
        yield file


def read_exactly(file: BinaryIO, start: int, into: Tensor) -> None:
    """Fill a contiguous CPU tensor from the file's bytes at `start`."""
    view = into.view(-1).view(torch.uint8).numpy().data
    file.seek(start)
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise _ended(file.name)
        view = view[count:]


def map_file(path: Path, size: int) -> Tensor:
    """Return the first `size` bytes of a file as a tensor that shares the page cache's memory.

    Writing to it copies a page and leaves the file as it is. The file must stay as it is, too: one
    that is shortened in place ends the process when a page that is gone is touched.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size < size:
            raise _ended(path)
        pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _ended(path: object) -> ScratchLMError:
    return ScratchLMError(f"{path}: the file ended while it was being read")
