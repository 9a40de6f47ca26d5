"""Sources, or byte ranges of them, as pieces of text in bounded memory.

A document may be larger than memory, so readers yield *pieces*: at most about PIECE_CHARS
characters each, the last one of a document marked. A document is cut only where a letter or digit
is followed by white space or punctuation. The GPT-2, GPT-4 and Qwen2 patterns end a word at every
such position and use no lookbehind, so the pieces' ids, concatenated, are the document's ids. Text
without any such position is cut between two characters after MAX_PIECE_CHARS; it still decodes to
itself.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from scratchlm.data.sources import CHUNK_BYTES, Source, Utf8
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import shown

PIECE_CHARS = 1 << 20
MAX_PIECE_CHARS = 16 << 20
HEAD_CHARS = 1 << 16  # a document's first piece has at least this much of it
MAX_LINE_BYTES = 1 << 30
SAFE_CUT = re.compile(r"[^\W_](?=[\s.,;:!?、。，！？；：])")


@dataclass(frozen=True)
class Piece:
    """Some text, and whether its document ends with it."""

    text: str
    ends_document: bool


def read_pieces(
    source: Source,
    *,
    field: str = "text",
    separator: str | None = None,
    start: int = 0,
    end: int | None = None,
    ends_document: bool = True,
) -> Iterator[Piece]:
    """Read a source, or its bytes (row groups, for Parquet) from `start` to `end`.

    `ends_document=False` says that the document at the end of the range goes on after it.
    """
    if source.kind == "parquet":
        yield from _parquet_pieces(source, field, start, end)
    elif source.kind == "jsonl":
        yield from _jsonl_pieces(source, field, start, end)
    else:
        yield from _text_pieces(_decoded(source, start, end), separator, ends_document)


def _open(source: Source) -> IO[bytes]:
    if source.path == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return gzip.open(source.path, "rb") if source.gzipped else open(source.path, "rb")  # type: ignore[return-value]


def _decoded(source: Source, start: int, end: int | None) -> Iterator[str]:
    utf8 = Utf8(source.name, start)
    with _open(source) as file:
        if start:
            file.seek(start)
        while end is None or utf8.offset < end:
            room = CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - utf8.offset)
            chunk = _read(source, file, room)
            if not chunk:
                break
            yield utf8.decode(chunk)
        utf8.finish()


def _read(source: Source, file: IO[bytes], count: int, *, line: bool = False) -> bytes:
    try:
        return file.readline(count) if line else file.read(count)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ScratchLMError(f"{source.name}: broken or cut off gzip data ({error})") from None


def _text_pieces(
    chunks: Iterator[str], separator: str | None, ends_document: bool
) -> Iterator[Piece]:
    buffer, is_open = "", False  # is_open: pieces of this document went out before
    keep = len(separator) - 1 if separator else 0  # may be the start of a separator
    for chunk in chunks:
        buffer += chunk
        if separator and separator in buffer:
            *documents, buffer = buffer.split(separator)
            for document in documents:
                yield Piece(document, True)
            is_open = False
        if len(buffer) > PIECE_CHARS:
            cut = last_safe_cut(buffer[: len(buffer) - keep], 0 if is_open else HEAD_CHARS)
            if cut is None and len(buffer) > MAX_PIECE_CHARS:
                cut = len(buffer) - keep
            if cut is not None:
                yield Piece(buffer[:cut], False)
                buffer, is_open = buffer[cut:], True
    if buffer or is_open:
        yield Piece(buffer, ends_document)


def _document(text: str) -> Iterator[Piece]:
    """Yield a whole document, in several pieces if it is large."""
    if len(text) <= PIECE_CHARS:
        yield Piece(text, True)
    else:
        chunks = (text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS))
        yield from _text_pieces(chunks, None, True)


def head_of(first_piece: str) -> str:
    """Return the beginning of a document, the same however the document was cut."""
    return first_piece[:HEAD_CHARS]


def last_safe_cut(text: str, minimum: int = 0) -> int | None:
    """Find the last position >= `minimum` where a cut does not change the ids."""
    for window in (1 << 12, 1 << 16, len(text)):
        begin = max(minimum, len(text) - window)
        cuts = [match.end() for match in SAFE_CUT.finditer(text, max(0, begin - 1))]
        if cuts and cuts[-1] >= max(1, minimum):
            return cuts[-1]
        if begin == minimum:
            return None
    return None


def _jsonl_pieces(source: Source, field: str, start: int, end: int | None) -> Iterator[Piece]:
    with _open(source) as file:
        if start:
            file.seek(start)
        offset, number = start, 0
        while end is None or offset < end:
            line = _read(source, file, MAX_LINE_BYTES, line=True)
            if not line:
                break
            number += 1
            try:
                text = _field_of(line, field, first=offset == 0)
            except ValueError as error:
                number += _lines_before(source, start)
                raise ScratchLMError(f"{source.name}: line {number:,}: {error}") from None
            if text is not None:
                yield from _document(text)
            offset += len(line)


def _field_of(line: bytes, field: str, first: bool) -> str | None:
    """Extract one field from a line of JSON; None for a blank line."""
    try:
        decoded = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start} of it)") from None
    if not decoded.strip():
        return None
    try:
        value: Any = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            many = len(line) == MAX_LINE_BYTES
            what = f"longer than {MAX_LINE_BYTES:,} bytes" if many else "cut off: the file ends"
            raise ValueError(f"{what} within a JSON value") from None
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    if field not in value:
        raise ValueError(f"no field {field!r}; it has {', '.join(map(repr, value)) or 'none'}")
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} must be a string; got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"field {field!r} holds half a surrogate pair at character {error.start}"
            ) from None
    return text


def _lines_before(source: Source, offset: int) -> int:
    """Count the lines before a byte: only asked when there is an error to report."""
    if not offset:
        return 0
    lines = 0
    with open(source.path, "rb") as file:
        while offset and (chunk := file.read(min(CHUNK_BYTES, offset))):
            lines += chunk.count(b"\n")
            offset -= len(chunk)
    return lines


def open_parquet(source: Source) -> Any:
    """Open a Parquet file; pyarrow is imported only here."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ScratchLMError(
            f"{source.name}: reading Parquet needs pyarrow: pip install 'scratchlm[parquet]'"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(source.path)
        names = file.schema_arrow.names  # which may not be UTF-8
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _broken_parquet(source, error) from None
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ScratchLMError(f"{source.name}: the column {shown(twice[0])} stands twice")
    return file


def _broken_parquet(source: Source, error: BaseException) -> ScratchLMError:
    reason = " ".join(str(error).split())
    return ScratchLMError(f"{source.name}: not a Parquet file, cut off or damaged ({reason})")


def _parquet_pieces(source: Source, field: str, start: int, end: int | None) -> Iterator[Piece]:
    import pyarrow

    with open_parquet(source) as file:
        names = file.schema_arrow.names
        if field not in names:
            raise ScratchLMError(
                f"{source.name}: no column {field!r}; it has {', '.join(map(repr, names))}"
            )
        kind = file.schema_arrow.field(field).type
        if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise ScratchLMError(f"{source.name}: column {field!r} must hold strings; got {kind}")
        stop = file.num_row_groups if end is None else end
        row = sum(file.metadata.row_group(group).num_rows for group in range(start))
        try:
            for batch in file.iter_batches(256, range(start, stop), columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if text is None:
                        raise ScratchLMError(f"{source.name}: row {row:,}: {field!r} is null")
                    yield from _document(text)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _broken_parquet(source, error) from None
