"""The train/validation split, without leakage.

By document: a document goes to the validation side where a hash of its beginning, read as a
fraction of 2^64, falls below `val_fraction`:

    blake2b(words of the first 65,536 characters) / 2^64 < val_fraction

The same document, wherever and however often it stands in the sources and however its white space
was changed, always falls on the same side; so do documents with the same long beginning. Adding
sources moves no document from one side to the other.

By tail: the first (1 − val_fraction) of all ids train and the rest validates, so that no
validation text stands between training text.

"auto" is by document, but by tail where everything is one document, or where documents are so few
or so unequal that whole ones would hold out nothing, or files less than half or more than twice
what was asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

SIDES = ("train", "val")
SPLITS = ("auto", "documents", "tail")


def side_of(head: str, val_fraction: float) -> str:
    """Choose the side of a document from its beginning."""
    words = " ".join(head.split())
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < val_fraction * 2**64 else "train"


def is_fair(sizes: Sequence[int], sides: Sequence[str], val_fraction: float) -> bool:
    """Say whether whole documents leave either side at least half of what was asked for it."""
    held = sum(size for size, side in zip(sizes, sides, strict=True) if side == "val")
    share = held / sum(sizes)
    return val_fraction / 2 <= share <= min(2 * val_fraction, (1 + val_fraction) / 2)


def tail_cut(count: int, val_fraction: float) -> int:
    """Return how many of `count` ids of one long document are for training."""
    return int(count * (1 - val_fraction))
