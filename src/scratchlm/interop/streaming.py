"""From a file's bytes into our memory, a few megabytes at a time.

Where dtype and layout are the same, the bytes go straight to where they will stay. Where they are
not, they pass through one small buffer. Each piece is yielded while it is still in the processor's
cache, so that a look at its values costs little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scratchlm.interop.links import Link
from scratchlm.interop.safetensors_file import (
    CHUNK_BYTES,
    WEIGHT_DTYPES,
    Stored,
    opened,
    read_exactly,
)
from scratchlm.interop.shapes import Shape


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: either would be the smallest or the largest."""
    low, high = values.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def read_link(stored: Stored, link: Link, out: Tensor) -> Iterator[Tensor]:
    """Fill `out` from a link's box, yielding each piece as it arrives, for a look at it."""
    with opened(stored.file) as file:
        if link.turned:
            yield from _read_turned(file, stored, link, out)
        else:
            yield from _read_straight(file, stored, link, out)


def _read_straight(file: Any, stored: Stored, link: Link, out: Tensor) -> Iterator[Tensor]:
    """Read a box that is one stretch of the file, or one stretch for each of its first index."""
    stretches = _stretches(link)
    step = CHUNK_BYTES // stored.item_bytes
    dtype = WEIGHT_DTYPES[stored.dtype]
    direct = out.dtype == dtype and out.device.type == "cpu"
    buffer = torch.empty(0 if direct else min(step, out.numel()), dtype=dtype)
    for first, flat in zip(stretches, out.view(len(stretches), -1), strict=True):
        for begin in range(0, flat.numel(), step):
            target = flat[begin : begin + step]
            piece = target if direct else buffer[: target.numel()]
            read_exactly(file, stored.start + (first + begin) * stored.item_bytes, piece)
            if not direct:
                target.copy_(piece)
            yield piece


def _stretches(link: Link) -> list[int]:
    """Return where in the flat tensor the stretches of a box begin."""
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
    place = 0
    for size, at in zip(shape, index, strict=True):
        place = place * size + at
    return place


def _read_turned(file: Any, stored: Stored, link: Link, out: Tensor) -> Iterator[Tensor]:
    """Read a (in, out) matrix a few rows at a time; each row of theirs is a column of ours.

    Rows are read whole even where only some of their columns are ours: a few more bytes cost less
    than a call for each row.
    """
    (_, rows), (left, right) = link.box
    width = link.their_shape[1]
    step = max(1, CHUNK_BYTES // (width * stored.item_bytes))
    buffer = torch.empty(min(step, rows), width, dtype=WEIGHT_DTYPES[stored.dtype])
    for begin in range(0, rows, step):
        whole = buffer[: min(step, rows - begin)]
        read_exactly(file, stored.start + begin * width * stored.item_bytes, whole)
        piece = whole[:, left:right]
        # Turned first, then put in place: at once, it would be copied number by number.
        out[:, begin : begin + len(piece)].copy_(piece.T.contiguous())
        yield piece


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
