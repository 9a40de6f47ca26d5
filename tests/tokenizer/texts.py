"""Texts that make tokenizers stumble, and small tokenizers trained on some of them."""

import functools
import random

from hypothesis import strategies as st

from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.naive import train_bpe_naive

# Everything the patterns treat specially: spaces of all kinds, line ends, apostrophes before the
# letters of contractions in both cases (ſ folds to s), digits of two scripts, marks, emoji, NUL.
AWKWARD = "  \n\n\r\t\x0b\u00a0\u3000\u2028\x85\x1c''''sStTmMdDlLvVrReEſabKÅ1234٣½.,!<|>\u0301é中\0"
AWKWARD += "😀\u200d👩\ufe0f한글ह"
ASCII_AWKWARD = "".join(c for c in AWKWARD if c.isascii())

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
awkward_text = st.text(st.sampled_from(AWKWARD), max_size=40)
ascii_text = st.text(st.sampled_from(ASCII_AWKWARD), max_size=40)
spaced_text = st.text(st.sampled_from("   \n\r\ta.'1\u3000"), max_size=30)
texts = st.one_of(awkward_text, ascii_text, spaced_text, any_text)

SPECIALS = ["<|endoftext|>", "<|endoftext|><|endoftext|>", "<s>", "<s >", "élan vital"]

PROSE = """It's the 2nd of May, 1789; they'd said: "We'LL come, we've 12345 reasons!"
    def f(x):\r\n\t\treturn x+1  # naïve café, Straße\n\n\n
Der Fluß fließt. 東京都に行く。我能吞下玻璃而不伤身体。 Привет, мир! שלום 👩‍👩‍👧 é e\u0301
the cat and the other cats that they had, than then those these their there
"""


@functools.cache
def prose_tokenizer(pattern: str = "gpt2", vocab_size: int = 420) -> Tokenizer:
    """Train a small tokenizer on a little of everything."""
    vocab, merges = train_bpe_naive(PROSE * 2, vocab_size, SPECIALS, pattern)
    return Tokenizer(vocab, merges, SPECIALS, pattern)


def random_text(rng: random.Random, length: int) -> str:
    """Mix prose, awkward characters and any characters."""
    parts = []
    size = 0
    while size < length:
        kind = rng.randrange(3)
        if kind == 0:
            at = rng.randrange(len(PROSE))
            parts.append(PROSE[at : at + rng.randrange(30)])
        elif kind == 1:
            parts.append("".join(rng.choice(AWKWARD) for _ in range(rng.randrange(8))))
        else:
            code = rng.choice([rng.randrange(0x3000), rng.randrange(0xE000, 0x110000)])
            parts.append(chr(code) * rng.randrange(1, 3))
        size += len(parts[-1])
    return "".join(parts)
