"""A tokenizer small enough to see through: words of GPT-2's pattern, hashed into 1,000 ids.

Ids depend on where words end, so a document cut at a wrong place shows.
"""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import regex

EOT = "<|endoftext|>"
WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class WordTokenizer:
    def __init__(self, special=(EOT,), words=1000, delay=0.0, pattern=WORDS):
        self.words, self.delay, self.pattern = words, delay, pattern
        self.special_tokens = {token: words + i for i, token in enumerate(special)}
        self.vocab_size = words + len(special)
        self.longest = 0

    def encode_array(self, text, *, allowed_special=()):
        time.sleep(self.delay)
        self.longest = max(self.longest, len(text))
        return np.array([self.id_of(w) for w in self.pattern.findall(text)], dtype=np.uint32)

    def id_of(self, word):
        return int.from_bytes(hashlib.md5(word.encode()).digest()[:4], "big") % self.words

    def fingerprint(self):
        return hashlib.sha256(repr((self.words, self.special_tokens)).encode()).hexdigest()

    def save(self, directory):
        path = Path(directory) / "tokenizer.json"
        path.write_text(json.dumps({"words": self.words, **self.special_tokens}))
