"""Pieces of tensors: the boxes that ranks hold, which make up each tensor exactly once.

A box begins at `offsets` and is `lengths` long in every dimension of the whole tensor. The manifest
says of each tensor

    "layers.0.ffn.w1.weight": {"dtype": "F32", "shape": [8, 4],
                               "boxes": [[1, [0, 0], [5, 4]], [2, [5, 0], [3, 4]]]}

where 1 and 2 are the shards the boxes lie in, under the key `layers.0.ffn.w1.weight[5,0]`, or the
plain name where the box is the whole tensor. What has no elements is in no box.

Boxes cover a tensor exactly once if and only if their volumes add up to its own and, of all their
corners, those that occur an odd number of times are the tensor's corners: the second says that
every element is covered an odd number of times, so at least once; the first, then, not more often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import shown

# The names safetensors gives to the types a weight or an optimizer's state can have.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {word: dtype for dtype, word in DTYPES.items()}
MAX_SHARDS = 99_999  # five digits in a file's name
_MAX_DIMS, _MAX_ELEMENTS = 5, 2**48


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, as one rank holds it."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the box begins, in each dimension
    tensor: Tensor  # its values; their shape is the box's size

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """Return the piece that is the whole tensor."""
        return cls(tuple(tensor.shape), (0,) * tensor.dim(), tensor)


@dataclass(frozen=True)
class Box:
    """Where a piece lies on disk, and which part of its tensor it is."""

    file: str
    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def overlap(self, offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...] | None:
        """Return what this box and another have in common, in the whole tensor's coordinates."""
        common = tuple(
            slice(max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.offsets, self.lengths, offsets, lengths, strict=True)
        )
        return common if all(one.start < one.stop for one in common) else None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: what it is, and the boxes it consists of."""

    dtype: str  # safetensors' word
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def shard_file(file: str, shard: int, shards: int) -> str:
    """Name the file of one shard: model-00001-of-00004.safetensors."""
    stem, _, ending = file.rpartition(".")
    return f"{stem}-{shard:05d}-of-{shards:05d}.{ending}"


def key_of(name: str, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> str:
    """Name a piece inside its file."""
    whole = tuple(lengths) == tuple(shape)
    return name if whole else f"{name}[{','.join(map(str, offsets))}]"


def region(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box in its tensor."""
    return tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))


# Describing what a rank holds, and joining what all hold


def describe(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, Any]:
    """Say in JSON which boxes of which tensors a rank holds."""
    table: dict[str, Any] = {}
    for name, held in pieces.items():
        for piece in held:
            if piece.tensor.dtype not in DTYPES:
                raise ScratchLMError(f"{shown(name)}: {piece.tensor.dtype} cannot be stored")
            entry = {"dtype": DTYPES[piece.tensor.dtype], "shape": list(piece.shape)}
            known = table.setdefault(name, {**entry, "boxes": []})
            _check_same(name, known, entry)
            if piece.tensor.numel():
                known["boxes"].append([list(piece.offsets), list(piece.tensor.shape)])
    return table


def join(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what the ranks hold, in their order, to the manifest's table of one file."""
    joined: dict[str, Any] = {}
    for shard, table in enumerate(tables, 1):
        for name, entry in table.items():
            known = joined.setdefault(name, {**entry, "boxes": []})
            _check_same(name, known, entry)
            known["boxes"] += [[shard, *box] for box in entry["boxes"]]
    return dict(sorted(joined.items()))


def _check_same(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse pieces that cannot be of one tensor."""
    said = [f"{entry['dtype']} {entry['shape']}" for entry in (one, other)]
    if said[0] != said[1]:
        raise ScratchLMError(f"{shown(name)}: one piece is of {said[0]}, another of {said[1]}")


def keyed(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, Tensor]:
    """Name the pieces of a rank as they are stored."""
    return {
        key_of(name, piece.shape, piece.offsets, piece.tensor.shape): piece.tensor
        for name, held in pieces.items()
        for piece in held
        if piece.tensor.numel()
    }


def assemble(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, Tensor]:
    """Put the pieces of the only rank together."""
    parse_table(join([describe(pieces)]), "model.safetensors", 1)
    return {name: _assembled(held) for name, held in pieces.items() if held}


def _assembled(pieces: Sequence[Piece]) -> Tensor:
    first = pieces[0]
    if len(pieces) == 1 and tuple(first.tensor.shape) == first.shape:
        return first.tensor
    out = torch.empty(first.shape, dtype=first.tensor.dtype)
    for piece in pieces:
        out[region(piece.offsets, piece.tensor.shape)] = piece.tensor.detach().cpu()
    return out


# Checking


def parse_table(
    table: Mapping[str, Any], file: str, shards: int, sizes: Mapping[str, int] | None = None
) -> dict[str, StoredTensor]:
    """Check a manifest's table of pieces; return where each tensor's lie.

    Every element lies in exactly one box, every box under a key of its own, and no shard holds more
    than `sizes` says it has bytes.
    """
    files = [shard_file(file, shard, shards) for shard in range(1, shards + 1)]
    used: dict[str, int] = dict.fromkeys(files, 0)
    keys: set[tuple[str, str]] = set()
    stored = {}
    for name, entry in table.items():
        try:
            one = stored[name] = _parse_tensor(name, entry, files)
        except ValueError as error:
            raise ScratchLMError(f"tensor {shown(name)}: {error}") from None
        for box in one.boxes:
            used[box.file] += math.prod(box.lengths) * TORCH_DTYPES[one.dtype].itemsize
            if (box.file, box.key) in keys:
                raise ScratchLMError(f"{box.file}: {shown(box.key)} stands for two pieces")
            keys.add((box.file, box.key))
    for name, count in used.items():
        if sizes is not None and count > sizes[name]:
            raise ScratchLMError(f"{name}: pieces of {count:,} bytes in {sizes[name]:,}")
    return stored


def _parse_tensor(name: str, entry: Any, files: Sequence[str]) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "boxes"}:
        raise ValueError("must have dtype, shape and boxes")
    dtype, shape, rows = entry["dtype"], entry["shape"], entry["boxes"]
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(TORCH_DTYPES)}; got {shown(dtype)}")
    sound = isinstance(shape, list) and len(shape) <= _MAX_DIMS and _are_counts(shape, 0)
    if not sound or math.prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
        raise ValueError(f"shape must be at most {_MAX_DIMS} sizes; got {shown(shape)}")
    if not isinstance(rows, list):
        raise ValueError(f"boxes must be a list; got {shown(rows)}")
    boxes = [_parse_box(name, shape, row, files) for row in rows]
    _check_cover(shape, boxes)
    return StoredTensor(dtype, tuple(shape), tuple(boxes))


def _parse_box(name: str, shape: Sequence[int], row: Any, files: Sequence[str]) -> Box:
    if not isinstance(row, list) or len(row) != 3:
        raise ValueError(f"a box must be shard, offsets and lengths; got {shown(row)}")
    shard, offsets, lengths = row
    if type(shard) is not int or not 1 <= shard <= len(files):
        raise ValueError(f"a shard must be 1 to {len(files)}; got {shown(shard)}")
    counts = isinstance(offsets, list) and isinstance(lengths, list)
    if not counts or not (_are_counts(offsets, 0) and _are_counts(lengths, 1)):
        raise ValueError(f"offsets must be >= 0 and lengths >= 1; got {shown(row)}")
    check_inside(shape, offsets, lengths)
    key = key_of(name, shape, offsets, lengths)
    return Box(files[shard - 1], key, tuple(offsets), tuple(lengths))


def check_inside(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
    """Refuse a box that is not inside a tensor of this shape."""
    inside = len(shape) == len(offsets) == len(lengths) and all(
        min(at, n) >= 0 and at + n <= size
        for at, n, size in zip(offsets, lengths, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"a box at {list(offsets)} of {list(lengths)} is not inside {list(shape)}")


def _are_counts(values: Iterable[Any], least: int) -> bool:
    return all(type(value) is int and least <= value <= _MAX_ELEMENTS for value in values)


def _check_cover(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse boxes that do not cover every element exactly once (see above)."""
    held, wanted = sum(math.prod(box.lengths) for box in boxes), math.prod(shape)
    if held != wanted:
        raise ValueError(
            f"its pieces must hold each of {wanted:,} elements once; they hold {held:,}"
        )
    if not wanted:
        return
    odd: set[tuple[int, ...]] = set()
    for box in boxes:
        odd ^= _corners(box.offsets, box.lengths)
    if odd != _corners((0,) * len(shape), shape):
        raise ValueError("its pieces overlap, and leave as many elements out")


def _corners(offsets: Sequence[int], lengths: Sequence[int]) -> set[tuple[int, ...]]:
    return set(itertools.product(*((at, at + n) for at, n in zip(offsets, lengths, strict=True))))
