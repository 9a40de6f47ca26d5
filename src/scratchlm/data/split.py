"""The train/validation split, without leakage.

By document: a document goes to the validation side where a hash of its beginning, read as a
fraction of 2^64, falls below `val_fraction`:

    blake2b(words of the first 65,536 characters) / 2^64 < val_fraction

The same document, wherever and however often it stands in the sources and however its white space
was changed, always falls on the same side; so do documents with the same long beginning. Adding
sources moves no document from one side to the other.

By tail: where everything is one document, the first (1 − val_fraction) of its ids train and the
rest validates, so that no validation text stands between training text.
"""

from __future__ import annotations

import hashlib

SIDES = ("train", "val")
SPLITS = ("auto", "documents", "tail")


def side_of(head: str, val_fraction: float) -> str:
    """Choose the side of a document from its beginning."""
    words = " ".join(head.split())
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < val_fraction * 2**64 else "train"


def tail_cut(count: int, val_fraction: float) -> int:
    """Return how many of `count` ids of one long document are for training."""
    return int(count * (1 - val_fraction))
