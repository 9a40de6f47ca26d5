"""Sources split into parts: the unit of work, of progress and of resuming.

Where a source is cut depends on its bytes alone, never on the number of workers: a text file
after a separator (or, when the file is one document, at a safe position, see `reading.py`), a JSON
Lines file after a line, a Parquet file between row groups. A part has about PART_BYTES; a document
larger than that stays in one part and is streamed. Gzipped files are one part each. (A separator
that can overlap itself, such as a blank line among several, may be found one position later at such
a cut than from the start of the file.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import IO

from scratchlm.data.reading import SAFE_CUT, head_of, open_parquet, read_pieces
from scratchlm.data.sources import CHUNK_BYTES, Source
from scratchlm.data.split import side_of
from scratchlm.errors import ScratchLMError

PART_BYTES = 8 << 20


@dataclass(frozen=True)
class Part:
    """A range of a source; `side` is set where the whole range belongs to one document."""

    source: Source
    start: int
    end: int | None
    ends_document: bool
    side: str | None
    weight: int  # bytes of the source it stands for, for the progress bar


def cut_source(source: Source, separator: str | None, val_fraction: float | None) -> list[Part]:
    """Cut one source into parts; `val_fraction` is None where all of it goes to one side."""
    if source.kind == "parquet":
        with open_parquet(source) as file:
            groups = file.num_row_groups
            if file.metadata.num_rows == 0:
                raise ScratchLMError(f"{source.name}: the file holds no rows")
        share = source.size // groups
        return [Part(source, g, g + 1, True, None, share) for g in range(groups)]
    one_document = source.kind == "text" and separator is None
    side = None
    if one_document:
        side = "train" if val_fraction is None else side_of(read_head(source), val_fraction)
    if source.gzipped:
        return [Part(source, 0, None, True, side, source.size)]
    cuts = [0, *_boundaries(source, separator), source.size]
    return [
        Part(source, start, end, not one_document or end == source.size, side, end - start)
        for start, end in pairwise(cuts)
    ]


def read_head(source: Source) -> str:
    """Read the beginning of a source, which chooses its side."""
    for piece in read_pieces(source):
        return head_of(piece.text)
    return ""


def _boundaries(source: Source, separator: str | None) -> Iterator[int]:
    """Yield the cuts: about every PART_BYTES, at the next safe position."""
    with open(source.path, "rb") as file:
        target = PART_BYTES
        while target < source.size:
            if source.kind == "jsonl":
                position = _end_of_next(file, target, b"\n")
            elif separator is not None:
                position = _end_of_next(file, target, separator.encode())
            else:
                position = _next_safe_cut(file, target)
            if position is None or position >= source.size:
                return
            yield position
            target = position + PART_BYTES


def _end_of_next(file: IO[bytes], start: int, pattern: bytes) -> int | None:
    """Find the end of the first `pattern` that begins at or after `start`."""
    file.seek(start)
    offset, buffer = start, b""
    while chunk := file.read(CHUNK_BYTES):
        buffer += chunk
        if (found := buffer.find(pattern)) >= 0:
            return offset + found + len(pattern)
        drop = max(0, len(buffer) - len(pattern) + 1)
        offset, buffer = offset + drop, buffer[drop:]
    return None


def _next_safe_cut(file: IO[bytes], start: int) -> int | None:
    """Find the first position after `start` where a cut does not change the ids."""
    file.seek(start)
    offset = start
    while chunk := file.read(CHUNK_BYTES):
        lead = 0  # the end of a character that began before this chunk
        while lead < len(chunk) and chunk[lead] & 0xC0 == 0x80:
            lead += 1
        text = chunk[lead:].decode("utf-8", errors="ignore")  # checked before: only the end is cut
        if match := SAFE_CUT.search(text):
            return offset + lead + len(text[: match.end()].encode())
        offset += len(chunk)
    return None
