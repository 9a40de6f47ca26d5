"""The same bytes in the order a kernel reads them in.

rows     row after row, block after block: as in a file
panels   16 rows side by side (CPU): of each block cell by cell, a cell being four bytes of
         quantised numbers or one scale, and each cell of all 16 rows; what is missing in the
         last panel is 0. Cells that are needed together lie together: memory is read in order
planes   (GPU) the quantised numbers of all rows, then each kind of scale of all rows
"""

from __future__ import annotations

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

ROWS, PANELS, PLANES = "rows", "panels", "planes"
PANEL_ROWS = 16
_AT_ONCE = 1 << 20  # bytes

# Of a block: (first byte, end, bytes of a cell). A block of 0 is a row of any length.
SEGMENTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "q8_0": ((0, 2, 2), (2, 34, 4)),
    "q4_0": ((0, 2, 2), (2, 18, 4)),
    "q4_k": ((0, 4, 2), (4, 16, 1), (16, 144, 4)),
    "q6_k": ((0, 192, 4), (192, 208, 1), (208, 210, 2)),
    "nf4": ((0, 2, 2), (2, 34, 4)),
}
_LARGEST_FIRST = {"q6_k": (0, 1, 2), "q4_k": (2, 0, 1)}  # of the planes; others: (1, 0)

Rows = UInt8[Tensor, "rows bytes"]


def to_layout(rows: Rows, format: str, layout: str) -> UInt8[Tensor, "*stored"]:
    """Put rows of bytes into a layout."""
    if layout == ROWS:
        return rows.contiguous()
    if layout == PANELS:
        return _to_panels(rows, format)
    parts = [part.flatten() for part in _planes(rows, format)]
    return torch.cat(parts)


def copy_into(stored: UInt8[Tensor, "*stored"], rows: Rows, format: str, layout: str) -> None:
    """Put rows of bytes into the memory of a layout; panels a few at a time, on little memory."""
    if layout != PANELS:
        stored.copy_(to_layout(rows, format, layout).view_as(stored))
        return
    step = max(1, _AT_ONCE // (PANEL_ROWS * rows.shape[1]))
    for first in range(0, len(stored), step):
        part = rows[PANEL_ROWS * first : PANEL_ROWS * (first + step)]
        stored[first : first + step] = _to_panels(part, format)


def from_layout(
    stored: UInt8[Tensor, "*stored"],
    format: str,
    layout: str,
    count: int,
    chosen: Int[Tensor, " chosen"] | None = None,
) -> Rows:
    """Return all `count` rows, or the chosen ones, out of a layout."""
    if layout == ROWS:
        rows = stored.reshape(count, -1)
        return rows if chosen is None else rows[chosen]
    if layout == PANELS:
        return _from_panels(stored, format, count, chosen)
    return _from_planes(stored, format, count, chosen)


def _to_panels(rows: Rows, format: str) -> Tensor:
    segments = SEGMENTS[format]
    missing = -len(rows) % PANEL_ROWS
    padded = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    blocks = padded.view(-1, PANEL_ROWS, rows.shape[1] // segments[-1][1], segments[-1][1])
    if format == "q6_k":
        blocks = blocks[..., _q6_k_order()]
    parts = [
        blocks[..., first:end]
        .unflatten(-1, (-1, cell))  # (panels, 16, blocks, cells, cell)
        .permute(0, 2, 3, 1, 4)
        .flatten(2)
        for first, end, cell in segments
    ]
    return torch.cat(parts, dim=-1).flatten(1)


def _q6_k_order() -> Int[Tensor, " bytes"]:
    """Return the bytes of a block of q6_k: two cells of low bits, the high bits of both, and so on.

    In the order of a file a kernel would read at two places by turns, which is slow in memory.
    """
    cells = torch.arange(48 * 4).view(6, 8, 4)  # of each half two of low bits, then the high bits
    halves = cells[[0, 1, 4, 2, 3, 5]].view(2, 3, 8, 4)
    return torch.cat([halves.transpose(1, 2).flatten(), torch.arange(192, 210)])


def _from_panels(stored: Tensor, format: str, count: int, chosen: Tensor | None) -> Rows:
    panels = stored if chosen is None else stored[chosen // PANEL_ROWS]
    segments = SEGMENTS[format]
    size = segments[-1][1]
    blocks = panels.unflatten(-1, (-1, PANEL_ROWS * size))
    parts = [
        blocks[..., PANEL_ROWS * first : PANEL_ROWS * end]
        .unflatten(-1, (-1, PANEL_ROWS, cell))  # (panels, blocks, cells, 16, cell)
        .permute(0, 3, 1, 2, 4)
        .flatten(3)
        for first, end, cell in segments
    ]
    found = torch.cat(parts, dim=-1)  # (panels, 16, blocks, bytes)
    if format == "q6_k":
        found = found[..., _q6_k_order().argsort()]
    rows = found.flatten(2)
    if chosen is None:
        return rows.flatten(0, 1)[:count]
    return rows[torch.arange(len(chosen), device=rows.device), chosen % PANEL_ROWS]


def plane_sizes(format: str, row_bytes: int) -> list[int]:
    """Return the bytes of a row in each plane, in their order."""
    segments = segments_of(format, row_bytes)
    blocks = row_bytes // segments[-1][1]
    return [blocks * (segments[i][1] - segments[i][0]) for i in _order(format)]


def segments_of(format: str, row_bytes: int) -> tuple[tuple[int, int, int], ...]:
    """Return the segments of a block; of int8 and fp8 a row is one block."""
    return SEGMENTS.get(format, ((0, 4, 4), (4, row_bytes, 4)))


def _order(format: str) -> tuple[int, ...]:
    return _LARGEST_FIRST.get(format, (1, 0))


def _planes(rows: Rows, format: str) -> list[Tensor]:
    segments = segments_of(format, rows.shape[1])
    blocks = rows.view(len(rows), -1, segments[-1][1])
    return [blocks[..., segments[i][0] : segments[i][1]].flatten(1) for i in _order(format)]


def split_planes(stored: Tensor, format: str, count: int) -> list[UInt8[Tensor, "rows bytes"]]:
    """Return the planes of `count` rows, each (rows, bytes)."""
    sizes = plane_sizes(format, stored.numel() // count)
    parts = stored.split([count * size for size in sizes])
    return [part.view(count, size) for part, size in zip(parts, sizes, strict=True)]


def _from_planes(stored: Tensor, format: str, count: int, chosen: Tensor | None) -> Rows:
    planes = split_planes(stored, format, count)
    if chosen is not None:
        planes = [plane[chosen] for plane in planes]
    segments = segments_of(format, stored.numel() // count)
    size, rows = segments[-1][1], len(planes[0])
    out = stored.new_empty(rows, stored.numel() // count // size, size)
    for plane, i in zip(planes, _order(format), strict=True):
        first, end, _ = segments[i]
        out[..., first:end] = plane.view(rows, -1, end - first)
    return out.flatten(1)
