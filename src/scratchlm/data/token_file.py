"""Token files: `NAME.bin`, the ids as little-endian uint16 or uint32, and `NAME.json` beside it.

The sidecar says how many ids there are, of which type, from which vocabulary and sources, and
carries the CRC-32 of the data. It is written last: a `.bin` without its `.json` is unfinished.

Reads go through `pread` into our own arrays, never through a memory map. Touching a mapped page
that a truncation has taken away kills the process with SIGBUS; a `pread` that comes back short is
an error that can be said in one line. It costs a microsecond or two per window (bench/data.py).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import MAX_SIDECAR_BYTES, open_regular, read_text

FORMAT_VERSION = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class SourceRecord:
    """What a token file was made from: a name, its size in bytes and the sha256 of its bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class TokenFileInfo:
    """The sidecar of a token file."""

    count: int
    dtype: str
    vocab_size: int
    tokenizer: str  # the tokenizer's fingerprint
    crc32: int
    end_of_text: int | None = None  # the id that ends each document
    documents: int | None = None
    split: str | None = None  # how this file's documents were chosen
    plan: str | None = None  # what `prepare` was asked for: equal plans give equal files
    sources: tuple[SourceRecord, ...] = ()
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.version != FORMAT_VERSION:
            raise ValueError(f"version must be {FORMAT_VERSION}; got {self.version!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        for name, least in (("count", 0), ("vocab_size", 1), ("crc32", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}; got {value!r}")
        for name in ("end_of_text", "documents"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 0):
                raise ValueError(f"{name} must be null or an integer >= 0; got {value!r}")
        for name in ("tokenizer", "split", "plan"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name == "tokenizer" or value is not None):
                raise ValueError(f"{name} must be a string; got {value!r}")
        if self.vocab_size - 1 > np.iinfo(DTYPES[self.dtype]).max:
            raise ValueError(f"dtype {self.dtype} cannot hold vocab_size={self.vocab_size}")

    @property
    def num_bytes(self) -> int:
        """The size that the data must have on disk."""
        return self.count * DTYPES[self.dtype].itemsize

    def to_json(self) -> str:
        """Write the sidecar's text."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, values: Any) -> TokenFileInfo:
        """Check and take what a sidecar says; unknown and missing keys are refused."""
        if not isinstance(values, dict):
            raise ValueError("expected a JSON object")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown key {unknown[0]!r}")
        required = ("count", "dtype", "vocab_size", "tokenizer", "crc32", "version")
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"missing key {missing[0]!r}")
        try:
            sources = tuple(SourceRecord(**source) for source in values.get("sources", ()))
        except TypeError:
            raise ValueError("sources must be a list of {name, size, sha256}") from None
        return cls(**{**values, "sources": sources})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Choose the smallest type that holds every id of a vocabulary."""
    if not 1 <= vocab_size <= 1 << 32:
        raise ValueError(f"vocab_size must be between 1 and 2^32; got {vocab_size}")
    return DTYPES["uint16"] if vocab_size <= 1 << 16 else DTYPES["uint32"]


def token_paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the data and the sidecar of a token file named with or without `.bin`."""
    path = Path(path)
    stem = path.with_suffix("") if path.suffix in (".bin", ".json") else path
    return stem.parent / f"{stem.name}.bin", stem.parent / f"{stem.name}.json"


def read_sidecar(path: str | os.PathLike[str]) -> TokenFileInfo:
    """Read and check the sidecar of a token file."""
    data, sidecar = token_paths(path)
    try:
        text = read_text(sidecar, MAX_SIDECAR_BYTES)
    except FileNotFoundError:
        if data.exists():
            raise ScratchLMError(
                f"{data} has no {sidecar.name} beside it: it was not finished, or is no token file"
            ) from None
        raise ScratchLMError(f"{data}: no such token file") from None
    try:
        return TokenFileInfo.from_dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ScratchLMError(f"{sidecar}: not a token file's sidecar: {error}") from None


class TokenFile:
    """A token file opened for reading; checked against its sidecar and what the caller expects.

    Safe to share between threads: every read names its own offset.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        expect_fingerprint: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.path, _ = token_paths(path)
        self.info = info = read_sidecar(path)
        self.dtype = DTYPES[info.dtype]
        if expect_fingerprint is not None and expect_fingerprint != info.tokenizer:
            raise ScratchLMError(
                f"{self.path} was made with another tokenizer: expected fingerprint "
                f"{expect_fingerprint[:16]}, got {info.tokenizer[:16]}"
            )
        if vocab_size is not None and info.vocab_size > vocab_size:
            raise ScratchLMError(
                f"{self.path} has ids up to vocab_size={info.vocab_size}; "
                f"the model's vocab_size is {vocab_size}"
            )
        try:
            with open_regular(self.path) as file:
                self._fd = os.dup(file.fileno())
        except FileNotFoundError:
            raise ScratchLMError(f"{self.path}: the sidecar is there, the data is not") from None
        try:
            self._check_size()
        except ScratchLMError:
            self.close()
            raise

    def _check_size(self) -> None:
        size = os.fstat(self._fd).st_size
        if size != self.info.num_bytes:
            raise ScratchLMError(
                f"{self.path}: expected {self.info.num_bytes:,} bytes "
                f"({self.info.count:,} × {self.dtype.itemsize}), got {size:,}: "
                "the file is truncated or has changed"
            )

    def __len__(self) -> int:
        return self.info.count

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back; reading afterwards is an error."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def read(self, start: int, count: int) -> np.ndarray:
        """Read ids start … start+count−1."""
        out = np.empty(count, dtype=self.dtype)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` (contiguous, of the file's dtype) with the ids from `start` on."""
        if not 0 <= start <= start + len(out) <= self.info.count:
            raise ValueError(
                f"{self.path}: ids {start} to {start + len(out)} are not within 0 … {len(self)}"
            )
        if self._fd < 0:
            raise ValueError(f"{self.path}: read after close")
        view, offset = out.reshape(-1).view(np.uint8).data, start * self.dtype.itemsize
        got = os.preadv(self._fd, [view], offset)
        while got < len(view):  # a signal or a very large read; zero means the end of the file
            more = os.preadv(self._fd, [view[got:]], offset + got)
            if more == 0:
                raise ScratchLMError(
                    f"{self.path}: the file ends at byte {offset + got:,}, expected "
                    f"{self.info.num_bytes:,}: it was truncated while in use"
                )
            got += more

    def chunks(self, ids: int = CHUNK_BYTES // 4) -> Iterator[np.ndarray]:
        """Read the whole file, a bounded number of ids at a time."""
        for start in range(0, len(self), ids):
            yield self.read(start, min(ids, len(self) - start))

    def ends_with_end_of_text(self) -> bool:
        """Say whether the last id ends a document."""
        eot = self.info.end_of_text
        return eot is not None and len(self) > 0 and int(self.read(len(self) - 1, 1)[0]) == eot

    def check_ids(self, ids: np.ndarray) -> None:
        """Refuse ids outside the vocabulary before they reach an embedding table."""
        if ids.size and int(ids.max()) >= self.info.vocab_size:
            raise ScratchLMError(
                f"{self.path}: id {int(ids.max())} is not below vocab_size="
                f"{self.info.vocab_size}: the file has changed or is damaged"
            )

    def validate(self) -> None:
        """Read everything once: size, every id below the vocabulary's size, and the CRC-32."""
        self._check_size()
        crc = 0
        for ids in self.chunks():
            self.check_ids(ids)
            crc = zlib.crc32(ids.data, crc)
        if crc != self.info.crc32:
            raise ScratchLMError(
                f"{self.path}: CRC-32 is {crc:08x}, the sidecar says {self.info.crc32:08x}: "
                "the file has changed or is damaged"
            )


def write_token_file(
    path: str | os.PathLike[str],
    ids: np.ndarray | Sequence[int],
    *,
    vocab_size: int,
    tokenizer: str,
    end_of_text: int | None = None,
    documents: int | None = None,
) -> TokenFileInfo:
    """Write ids that are already in memory as a token file, whole or not at all."""
    data, sidecar = token_paths(path)
    dtype = dtype_for(vocab_size)
    array = np.asarray(ids)
    if array.size and (int(array.min()) < 0 or int(array.max()) >= vocab_size):
        raise ValueError(
            f"ids must be in 0 … {vocab_size - 1}; got {int(array.min())} … {int(array.max())}"
        )
    array = np.ascontiguousarray(array, dtype=dtype)
    info = TokenFileInfo(
        count=array.size,
        dtype=dtype.name,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        crc32=zlib.crc32(array.data),
        end_of_text=end_of_text,
        documents=documents,
    )
    sidecar.unlink(missing_ok=True)  # from here on the old file is no longer whole
    write_atomically(data, array.data)
    write_atomically(sidecar, info.to_json().encode())
    return info
