"""Text sources: files, directories, globs and stdin, resolved and validated.

A source is a text file, a JSON Lines file or a Parquet file; text and JSON Lines may be gzipped.
What is not readable as such is refused with one line that names the file and the place.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import BOM

KINDS = ("text", "jsonl", "parquet")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """One file of text: its name as the user gave it, where it is, and how to read it."""

    name: str
    path: str
    kind: str
    gzipped: bool
    size: int


def find_sources(
    arguments: Sequence[str | os.PathLike[str]], kind: str | None = None
) -> list[Source]:
    """Resolve files, directories (recursively, sorted), globs and `-` in the order given."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"format must be one of {', '.join(KINDS)}; got {kind!r}")
    if isinstance(arguments, str | os.PathLike):
        arguments = [arguments]
    if not arguments:
        raise ValueError("no sources given: expected files, directories, globs or -")
    found: list[Source] = []
    for argument in arguments:
        found += [_source(path, kind) for path in _expand(os.fspath(argument))]
    if sum(source.path == "-" for source in found) > 1:
        raise ValueError("stdin (-) can be read only once; it was given twice")
    return found


def _expand(argument: str) -> list[str]:
    if argument == "-" or os.path.isfile(argument):
        return [argument]
    if os.path.isdir(argument):
        paths = sorted(_files_below(argument))
        if not paths:
            raise ScratchLMError(f"{argument}: the directory holds no files")
        return paths
    if os.path.lexists(argument):
        kind = "a broken link" if os.path.islink(argument) else "not a regular file"
        raise ScratchLMError(f"{argument}: {kind}; expected a file, a directory or -")
    if glob.has_magic(argument):
        paths = sorted(p for p in glob.glob(argument, recursive=True) if os.path.isfile(p))
        if not paths:
            raise ScratchLMError(f"{argument}: no file matches")
        return paths
    raise ScratchLMError(f"{argument}: no such file")


def _files_below(directory: str) -> Iterator[str]:
    """Name the files below a directory, leaving out hidden ones."""
    for here, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = os.path.join(here, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield path


def _source(path: str, kind: str | None) -> Source:
    if path == "-":
        return Source("-", "-", kind or "text", False, 0)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ScratchLMError(f"{path}: not a regular file; pipe it into -")
    if status.st_size == 0:
        raise ScratchLMError(f"{path}: the file is empty")
    plain = Path(path.lower())
    gzipped = plain.suffix == ".gz"
    suffix = plain.with_suffix("").suffix if gzipped else plain.suffix
    kind = kind or _SUFFIXES.get(suffix, "text")
    if kind == "parquet" and gzipped:
        raise ScratchLMError(f"{path}: a Parquet file is compressed within; unpack the .gz first")
    name = os.fsencode(path).decode("utf-8", "backslashreplace")  # it need not be UTF-8
    return Source(name, path, kind, gzipped, status.st_size)


@dataclass(frozen=True)
class Checked:
    """The result of one pass over a source's bytes."""

    sha256: str
    holds_marker: bool


def check_source(
    source: Source, marker: str | None = None, progress: Callable[[int], None] | None = None
) -> Checked:
    """Read a source once: hash it, and refuse NUL bytes and broken UTF-8 before work is spent.

    `marker` is looked for in text files: an end-of-text token that would stay plain text.
    """
    digest = hashlib.sha256()
    readable = source.kind != "parquet" and not source.gzipped
    check, holds, wanted, tail = Utf8(source.name), False, (marker or "").encode(), b""
    with open(source.path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if readable:
                check.decode(chunk)
                if wanted and source.kind == "text" and not holds:
                    holds = wanted in tail + chunk
                    tail = chunk[-len(wanted) :]
            if progress is not None:
                progress(len(chunk))
    if readable:
        check.finish()
    return Checked(digest.hexdigest(), holds)


class Utf8:
    """Decode a stream of bytes, without the byte order mark that a file may begin with.

    An error names the file and the offset in it.
    """

    def __init__(self, name: str, offset: int = 0) -> None:
        self.name, self.offset, self._begins = name, offset, offset == 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def decode(self, chunk: bytes, final: bool = False) -> str:
        """Decode the next bytes; an incomplete character is kept for the next call."""
        if (nul := chunk.find(0)) >= 0:
            raise ScratchLMError(
                f"{self.name}: byte {self.offset + nul:,} is NUL: this is no text file"
            )
        waiting = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            where = self.offset - waiting + error.start
            cut_off = "the file is cut off within a character" if final else error.reason
            raise ScratchLMError(f"{self.name}: byte {where:,} is not UTF-8 ({cut_off})") from None
        self.offset += len(chunk)
        if self._begins and text:
            self._begins, text = False, text.removeprefix(BOM)
        return text

    def finish(self) -> None:
        """Refuse a stream that ends within a character."""
        self.decode(b"", final=True)


def iter_documents(
    sources: Sequence[str | os.PathLike[str]],
    *,
    field: str = "text",
    separator: str | None = None,
    format: str | None = None,
) -> Iterator[str]:
    """Yield the documents of the sources one after the other; each must fit in memory."""
    from scratchlm.data.reading import read_pieces

    for source in find_sources(sources, format):
        pieces: list[str] = []
        for piece in read_pieces(source, field=field, separator=separator):
            pieces.append(piece.text)
            if piece.ends_document:
                yield "".join(pieces)
                pieces.clear()
