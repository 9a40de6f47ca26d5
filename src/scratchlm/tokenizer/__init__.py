"""Byte-level BPE: train it, encode, decode, and keep it in the files others use.

The naive definition is `naive.py`; everything else is the fast implementation.
"""

from __future__ import annotations

from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.characters import CharTokenizer
from scratchlm.tokenizer.files import load_tokenizer
from scratchlm.tokenizer.patterns import PATTERNS
from scratchlm.tokenizer.streaming import StreamDecoder
from scratchlm.tokenizer.training import train_bpe

__all__ = ["Tokenizer", "train_bpe", "CharTokenizer", "load_tokenizer", "StreamDecoder", "PATTERNS"]
