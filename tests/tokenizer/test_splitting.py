"""The fast splitter finds the words the regular expressions define."""

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchlm.tokenizer.patterns import PATTERNS, TIKTOKEN_SPELLINGS, compile_pattern, split_words
from scratchlm.tokenizer.splitting import kinds_of_characters, last_cut, next_cut
from scratchlm.tokenizer.words import WordIndex, split_bytes
from tokenizer.texts import ASCII_AWKWARD, AWKWARD, texts

each_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def fast_words(batch, pattern):
    data, borders = split_bytes(batch, pattern)
    raw = data.tobytes()
    return [raw[a:b] for a, b in zip(borders.tolist(), borders[1:].tolist(), strict=False)]


def defined_words(batch, pattern):
    words = []
    for text in batch:
        words += [word.encode() for word in split_words(text, pattern)] + [b"\xff"]
    return words[:-1]


@each_pattern
@settings(max_examples=600)
@given(text=texts)
def test_the_vectorised_splitter_equals_the_regex(pattern, text):
    assert fast_words([text], pattern) == defined_words([text], pattern)


@each_pattern
@settings(max_examples=200)
@given(batch=st.lists(texts, min_size=1, max_size=5))
def test_a_batch_of_texts_splits_as_each_alone(pattern, batch):
    assert fast_words(batch, pattern) == defined_words(batch, pattern)


@each_pattern
def test_every_character_of_unicode_beside_every_kind(pattern):
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for frame in ("{}", "a{}b", " {} 1", "!{}a", "\n{}\n"):
        if frame == "{}":
            text = "".join(characters)
        else:
            # A step of 97 keeps every block of Unicode in, and the test short.
            text = "x.".join(frame.format(c) for c in [*characters[:0x3100], *characters[::97]])
        assert fast_words([text], pattern) == defined_words([text], pattern)


@each_pattern
@settings(max_examples=300)
@given(text=texts, place=st.integers(0, 60))
def test_a_cut_changes_no_word(pattern, text, place):
    whole = split_words(text, pattern)
    for cut in (last_cut(text, 0, min(place, len(text))), next_cut(text, min(place, len(text)))):
        assert split_words(text[:cut], pattern) + split_words(text[cut:], pattern) == whole


@settings(max_examples=600)
@given(text=texts)
def test_tiktokens_spelling_of_the_patterns_means_the_same(text):
    for spelling, name in TIKTOKEN_SPELLINGS.items():
        assert regex.findall(spelling, text) == split_words(text, name)


def test_the_awkward_alphabet_holds_every_kind():
    kinds = kinds_of_characters()
    for alphabet in (AWKWARD, ASCII_AWKWARD):
        assert {int(kinds[ord(c)]) for c in alphabet} == {0, 1, 2, 3}


def test_unmatched_text_is_kept():
    assert split_words("ab12cd", r"[0-9]+") == ["ab", "12", "cd"]
    assert split_words("ab", r"x*") == ["a", "b"]  # as `tokenizers` has it


def test_a_catastrophic_pattern_is_stopped(monkeypatch):
    monkeypatch.setattr("scratchlm.tokenizer.patterns.MATCH_SECONDS", 0.05)
    with pytest.raises(ValueError, match="took longer than"):
        split_words("a" * 30, r"(?:a?){30}a{30}b|(?:a|aa|aaa|.a)+c")


@pytest.mark.parametrize("pattern", ["gpt5", "(", "", None, "[z-a]"])
def test_an_invalid_pattern_is_refused(pattern):
    with pytest.raises(ValueError, match="pattern"):
        compile_pattern(pattern)


@settings(max_examples=200)
@given(
    batch=st.lists(
        # The second kind: words that differ only in the NULs at their end.
        st.one_of(
            st.binary(max_size=24), st.lists(st.sampled_from([0, 97]), max_size=17).map(bytes)
        ),
        min_size=1,
        max_size=200,
    )
)
def test_the_same_word_has_the_same_number(batch):
    index = WordIndex()
    for words in (batch, batch[::-1], batch[: len(batch) // 2]):
        words = [word for word in words if word]
        data = np.frombuffer(b"".join(words), dtype=np.uint8)
        borders = np.concatenate([[0], np.cumsum([len(w) for w in words], dtype=np.int64)])
        numbers = index.numbers(data, borders.astype(np.int64))
        assert [index.words[n] for n in numbers.tolist()] == words
    assert len(set(index.words)) == len(index.words)


def test_words_whose_hashes_collide_stay_apart(monkeypatch):
    for module in ("words", "hashing"):
        name = f"scratchlm.tokenizer.{module}.hash_pairs"
        monkeypatch.setattr(name, lambda low, high: (low & np.uint64(3)) << np.uint64(60))
    words = [f"w{i}".encode() for i in range(300)]
    index = WordIndex()
    borders = np.concatenate([[0], np.cumsum([len(w) for w in words])])
    numbers = index.numbers(np.frombuffer(b"".join(words), dtype=np.uint8), borders)
    assert [index.words[n] for n in numbers.tolist()] == words
    assert len(index) == 300
