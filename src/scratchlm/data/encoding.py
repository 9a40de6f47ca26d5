"""One part of a source → its ids, on disk: the work of one `prepare` worker.

Ids go to two files, one per side of the split, in the order of the text. Every document is closed
with the end-of-text id, if there is one. Memory is bounded by a piece of text and its ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from scratchlm.data.parts import Part
from scratchlm.data.reading import Piece, head_of, read_pieces
from scratchlm.data.sources import Source
from scratchlm.data.split import SIDES, side_of
from scratchlm.data.token_file import dtype_for
from scratchlm.errors import ScratchLMError

FLUSH_IDS = 1 << 20


class Tokenizer(Protocol):
    """The tokenizer interface that `prepare` needs."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def special_tokens(self) -> dict[str, int]: ...  # noqa: D102
    def encode_array(self, text: str) -> np.ndarray: ...  # noqa: D102
    def fingerprint(self) -> str: ...  # noqa: D102
    def save(self, directory: Path) -> object: ...  # noqa: D102


@dataclass(frozen=True)
class EncodeOptions:
    """How text becomes ids; the same for all parts."""

    field: str
    separator: str | None
    end_of_text: int | None
    val_fraction: float | None  # None: all ids go to the training side


@dataclass(frozen=True)
class Counts:
    """Ids and documents of one part, or of all parts so far."""

    train: int = 0  # ids
    val: int = 0
    train_documents: int = 0
    val_documents: int = 0
    empty_documents: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, more = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + more[name] for name in mine})


class _Ids:
    """One side's ids, collected and written in large pieces."""

    def __init__(self, file: IO[bytes], vocab_size: int) -> None:
        self.file, self.vocab_size, self.dtype = file, vocab_size, dtype_for(vocab_size)
        self.buffered: list[np.ndarray] = []
        self.num_buffered = self.count = 0

    def add(self, ids: np.ndarray) -> None:
        self.buffered.append(ids)
        self.num_buffered += len(ids)
        if self.num_buffered >= FLUSH_IDS:
            self.flush()

    def flush(self) -> None:
        if not self.num_buffered:
            return
        ids = np.concatenate(self.buffered)
        if int(ids.max()) >= self.vocab_size:
            raise ScratchLMError(
                f"the tokenizer gave id {int(ids.max())}, not below its vocab_size="
                f"{self.vocab_size}"
            )
        self.file.write(ids.astype(self.dtype).data)
        self.count += len(ids)
        self.buffered, self.num_buffered = [], 0


def encode_part(
    part: Part,
    tokenizer: Tokenizer,
    options: EncodeOptions,
    path: Path,
    between_pieces: Callable[[], None] = lambda: None,
) -> Counts:
    """Write the ids of a part to `path`.train and `path`.val, and count them."""
    eot = options.end_of_text
    closing = np.array([] if eot is None else [eot], dtype=np.uint32)
    documents, empty, side = dict.fromkeys(SIDES, 0), 0, part.side
    with open(f"{path}.train", "wb") as train_file, open(f"{path}.val", "wb") as val_file:
        out = {
            "train": _Ids(train_file, tokenizer.vocab_size),
            "val": _Ids(val_file, tokenizer.vocab_size),
        }
        begins = part.start == 0 or part.side is None  # else the part starts within a document
        for piece in _pieces(part, options):
            between_pieces()
            if begins and piece.ends_document and not piece.text.strip():
                empty += 1
                continue
            if begins and part.side is None:
                side = _choose_side(piece, options)
            assert side is not None
            out[side].add(_encode(part, tokenizer, piece.text))
            if piece.ends_document:
                out[side].add(closing)
                documents[side] += 1
            begins = piece.ends_document
        for ids in out.values():
            ids.flush()
    return Counts(out["train"].count, out["val"].count, documents["train"], documents["val"], empty)


def _pieces(part: Part, options: EncodeOptions) -> Any:
    return read_pieces(
        part.source,
        field=options.field,
        separator=options.separator,
        start=part.start,
        end=part.end,
        ends_document=part.ends_document,
    )


def _encode(part: Part, tokenizer: Tokenizer, text: str) -> np.ndarray:
    try:
        return np.asarray(tokenizer.encode_array(text), dtype=np.uint32)
    except ValueError as error:  # a character that the tokenizer does not have
        raise ScratchLMError(f"{part.source.name}: {error}") from None


def _choose_side(piece: Piece, options: EncodeOptions) -> str:
    if options.val_fraction is None:
        return "train"
    return side_of(head_of(piece.text), options.val_fraction)


def part_from_dict(values: dict[str, Any]) -> Part:
    """Rebuild a part from what `asdict` gave."""
    return Part(**{**values, "source": Source(**values["source"])})
