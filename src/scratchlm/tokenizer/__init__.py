"""Byte-level BPE: train it, encode, decode, and keep it in the files others use.

The naive definition is `naive.py`; everything else is how to do the same at speed.
"""

from __future__ import annotations

from scratchlm.tokenizer.bpe import Tokenizer

__all__ = ["Tokenizer"]
