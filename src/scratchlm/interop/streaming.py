"""Stream tensors from a file into memory, a few megabytes at a time, or leave them in its pages.

Where dtype and layout are the same, the bytes are read directly into the destination, otherwise
through one small buffer. Each piece is checked while it is still in the CPU cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scratchlm.interop.gguf_file import StoredBlocks
from scratchlm.interop.gguf_types import TENSOR_TYPES
from scratchlm.interop.links import Link
from scratchlm.interop.safetensors_file import (
    CHUNK_BYTES,
    WEIGHT_DTYPES,
    Stored,
    opened,
    read_exactly,
)
from scratchlm.interop.shapes import Shape
from scratchlm.ops.quantized import dequantize
from scratchlm.ops.transpose import transpose_into


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite: a NaN or infinity shows in the sum.

    So may finite values that are too large together; then it would show in the min or max.
    """
    if math.isfinite(values.sum().item()):
        return True
    return all(math.isfinite(bound.item()) for bound in values.aminmax())


def view_link(stored: Stored, link: Link, pages: Tensor) -> Tensor | None:
    """Return a link's box as the file's own pages, if it lies there as a tensor of ours would."""
    if isinstance(stored, StoredBlocks) or link.transposed or link.at is not None:
        return None
    first, *more = _chunk_starts(link)
    start = stored.start + first * stored.item_bytes
    # MKL adds up in another order where a float32 matrix is not aligned.
    if more or start % (8 if stored.item_bytes == 2 else 64):
        return None
    shape = [end - begin for begin, end in link.box]
    size = math.prod(shape) * stored.item_bytes
    return pages[start : start + size].view(WEIGHT_DTYPES[stored.dtype]).view(shape)


def read_links(stored: Stored, parts: Sequence[tuple[Link, Tensor]]) -> Iterator[bool]:
    """Fill tensors from their links' boxes; yield for each piece whether its values are finite."""
    with opened(stored.file) as file:
        if parts[0][0].transposed:
            yield from _read_transposed(file, stored, parts)
            return
        for link, out in parts:
            if isinstance(stored, StoredBlocks):
                yield from _read_blocks(file, stored, link, out)
            else:
                yield from _read_straight(file, stored, link, out)


def _read_straight(file: Any, stored: Stored, link: Link, out: Tensor) -> Iterator[bool]:
    """Read a box that is one contiguous chunk of the file, or one for each of its first index."""
    chunks = _chunk_starts(link)
    step = CHUNK_BYTES // stored.item_bytes
    dtype = WEIGHT_DTYPES[stored.dtype]
    direct = out.dtype == dtype and out.device.type == "cpu"
    buffer = torch.empty(0 if direct else min(step, out.numel()), dtype=dtype)
    for first, flat in zip(chunks, out.view(len(chunks), -1), strict=True):
        for begin in range(0, flat.numel(), step):
            target = flat[begin : begin + step]
            piece = target if direct else buffer[: target.numel()]
            read_exactly(file, stored.start + (first + begin) * stored.item_bytes, piece)
            if not direct:
                target.copy_(piece)
            yield is_finite(piece)


def _read_blocks(file: Any, stored: StoredBlocks, link: Link, out: Tensor) -> Iterator[bool]:
    """Read whole rows of a quantised tensor, and dequantise a few of them at a time."""
    rows = out.view(-1, out.shape[-1])
    start, row_bytes = _packed_rows(stored, link)
    step = max(1, CHUNK_BYTES // row_bytes)
    buffer = torch.empty(min(step, len(rows)), row_bytes, dtype=torch.uint8)
    for begin in range(0, len(rows), step):
        packed = buffer[: min(step, len(rows) - begin)]
        read_exactly(file, start + begin * row_bytes, packed)
        piece = dequantize(packed, stored.dtype.lower())
        rows[begin : begin + len(piece)].copy_(piece)
        yield is_finite(piece)


def read_packed(stored: StoredBlocks, link: Link) -> Tensor:
    """Read a link's box of a quantised tensor as the blocks it is stored in: (blocks, bytes)."""
    start, row_bytes = _packed_rows(stored, link)
    rows = math.prod(end - begin for begin, end in link.box[:-1])
    packed = torch.empty(rows * row_bytes, dtype=torch.uint8)
    with opened(stored.file) as file:
        read_exactly(file, start, packed)
    return packed.view(-1, TENSOR_TYPES[stored.dtype].nbytes)


def _packed_rows(stored: StoredBlocks, link: Link) -> tuple[int, int]:
    """Return where in the file the rows of a link's box begin, and the bytes of a row."""
    (first,) = _chunk_starts(link)
    row_bytes = stored.nbytes // math.prod(stored.shape[:-1])
    return stored.start + first // stored.shape[-1] * row_bytes, row_bytes


def _chunk_starts(link: Link) -> list[int]:
    """Return where in the flat tensor the contiguous chunks of a box begin."""
    if len(link.box) < 3:
        return [_element(link.their_shape, [begin for begin, _ in link.box])]
    (first, last), *inner = link.box
    if inner == [(0, size) for size in link.their_shape[1:]]:
        return [_element(link.their_shape, [first, 0, 0])]
    return [
        _element(link.their_shape, [index, *(begin for begin, _ in inner)])
        for index in range(first, last)
    ]


def _element(shape: Shape, index: list[int]) -> int:
    offset = 0
    for size, at in zip(shape, index, strict=True):
        offset = offset * size + at
    return offset


def _read_transposed(
    file: Any, stored: Stored, parts: Sequence[tuple[Link, Tensor]]
) -> Iterator[bool]:
    """Read an (in, out) matrix a few rows at a time; each row of theirs is a column of ours.

    Rows are read whole, once for all parts of the matrix.
    """
    rows, width = stored.shape
    line = 64 // stored.item_bytes  # of ours is written whole
    step = max(1, CHUNK_BYTES // (width * stored.item_bytes) // line) * line
    buffer = torch.empty(min(step, rows), width, dtype=WEIGHT_DTYPES[stored.dtype])
    for begin in range(0, rows, step):
        whole = buffer[: min(step, rows - begin)]
        read_exactly(file, stored.start + begin * width * stored.item_bytes, whole)
        for link, out in parts:
            left, right = link.box[1]
            yield transpose_into(out[:, begin : begin + len(whole)], whole[:, left:right])


def same_bytes(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are the same to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    size = min(CHUNK_BYTES, one.nbytes)
    first, second = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    with opened(one.file) as file, opened(other.file) as other_file:
        for begin in range(0, one.nbytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, one.nbytes - begin)
            read_exactly(file, one.start + begin, first[:count])
            read_exactly(other_file, other.start + begin, second[:count])
            if not torch.equal(first[:count], second[:count]):
                return False
    return True
