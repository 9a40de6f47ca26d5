"""One document per row: every sequence starts at the start of a document.

A window cut anywhere (`batches.py`) often starts in the middle of a document, without its earlier
context. Where documents are short and depend on their beginning, each gets its own row:

    inputs    END  w₁  w₂ … wₙ   …         the following text fills the row, with its
    targets   w₁   w₂  …  wₙ END  ignored  targets ignored: attention is causal

In training every other row, by a coin that is a function of (seed, epoch, document), omits the
first END: users' prompts begin without it. The order of the documents is, as for windows, a
pure function of (seed, step), each once an epoch. In validation every id is a target once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scratchlm.data.batches import Batches, ValidationBatches, Windows
from scratchlm.data.permutation import derive_key, permute
from scratchlm.data.token_file import TokenFile
from scratchlm.errors import ScratchLMError

_ORDER, _COIN = 3, 4  # purposes a key is derived for


def find_documents(tokens: TokenFile, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each document's row starts (at the END before it) and its length, END included.

    Documents must fit in `longest` ids.
    """
    if not tokens.ends_with_end_of_text():
        raise ScratchLMError(f"{tokens.path}: documents must each end with the end-of-text id")
    chunks, first = [], 0
    for ids in tokens.chunks():
        chunks.append(np.flatnonzero(ids == tokens.info.end_of_text) + first)
        first += len(ids)
    ends = np.concatenate(chunks).astype(np.int64)
    lengths = np.diff(ends, prepend=-1)
    if lengths.max() > longest:
        raise ScratchLMError(
            f"{tokens.path}: a document of {lengths.max()} ids does not fit in "
            f"context_length={longest}"
        )
    return np.roll(ends, 1), lengths


class _Documents(Windows):
    """The documents of one token file, one to a row; arguments as of the other base class."""

    def __init__(self, tokens: TokenFile, context_length: int, *args: Any, **options: Any) -> None:
        super().__init__(tokens, context_length, *args, **options)
        self._starts, self._lengths = find_documents(tokens, context_length)
        self.num_windows = len(self._starts)


class DocumentBatches(_Documents, Batches):
    """Training batches of whole documents, epoch after epoch; arguments as for `Batches`."""

    def rows_of(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the documents at these positions of an epoch start, and their lengths."""
        key = derive_key(self.seed, epoch, _ORDER)
        chosen = permute(positions, self.num_windows, key)
        coins = permute(chosen, self.num_windows, derive_key(key, _COIN))
        skip_end = (coins % 2 == 1) & (self._lengths[chosen] > 1)
        starts = (self._starts[chosen] + skip_end) % len(self.tokens)
        return starts, self._lengths[chosen] - skip_end


class DocumentValidationBatches(_Documents, ValidationBatches):
    """Every document of a file once, in order; arguments as for `ValidationBatches`."""

    def rows_at(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where these documents start, and their lengths."""
        return self._starts[index], self._lengths[index]
