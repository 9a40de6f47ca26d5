"""One id per character."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from scratchlm.tokenizer import CharTokenizer, load_tokenizer
from tokenizer.texts import PROSE

text_of_prose = st.text(st.sampled_from(sorted(set(PROSE))), max_size=50)
TOKENIZER = CharTokenizer.of_text([PROSE[:100], PROSE[100:]], ["<s>", "<s><s>"])


@given(text=text_of_prose)
def test_characters_round_trip(text):
    ids = TOKENIZER.encode(text, allowed_special=())
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    decoder = TOKENIZER.stream_decoder()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text
    assert list(TOKENIZER.encode_iterable(list(text), allowed_special=())) == ids


def test_ids_count_through_the_sorted_characters_then_the_special_tokens():
    tokenizer = CharTokenizer.of_text(["banana", "cab"], ["<s>"])
    assert tokenizer.encode("abc<s>n") == [0, 1, 2, 4, 3]
    assert tokenizer.vocab_size == 5
    assert tokenizer.special_tokens == {"<s>": 4}
    assert tokenizer.vocab == dict(enumerate([b"a", b"b", b"c", b"n", b"<s>"]))


def test_special_tokens_longest_first_and_only_where_allowed():
    one, two = TOKENIZER.special_tokens.values()
    assert TOKENIZER.encode("<s><s><s>a")[:2] == [two, one]
    with pytest.raises(ValueError, match="'<' is not among"):
        CharTokenizer("ab", ["<s>"]).encode("<s>", allowed_special=())


def test_it_is_saved_and_loaded(tmp_path):
    path = TOKENIZER.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, CharTokenizer)
    assert loaded.fingerprint() == TOKENIZER.fingerprint()
    assert loaded.fingerprint() != CharTokenizer(TOKENIZER.characters).fingerprint()
    assert loaded.encode(PROSE + "<s>") == TOKENIZER.encode(PROSE + "<s>")
    with pytest.raises(Exception, match=r"."):  # refused, not misread
        tokenizers.Tokenizer.from_file(str(path))


def test_the_array_is_uint32():
    array = TOKENIZER.encode_array(PROSE)
    assert array.dtype == np.uint32
    assert array.tolist() == TOKENIZER.encode(PROSE)


@pytest.mark.parametrize("token", [-1, 10**9, 1.0, True, None])
def test_ids_outside_are_refused(token):
    with pytest.raises(ValueError, match="token id must be from 0"):
        TOKENIZER.decode([token])


@pytest.mark.parametrize(
    ("characters", "specials", "message"),
    [
        ("aa", [], "twice"),
        (["ab"], [], "length 1"),
        ([""], [], "length 1"),
        ("\ud800", [], "surrogate"),
        ("é", ["é"], "also a character"),
        ("", [], "at least one"),
    ],
)
def test_a_wrong_alphabet_is_refused(characters, specials, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer(characters, specials)


def test_unknown_characters_and_surrogates_are_refused():
    with pytest.raises(ValueError, match="'z' is not among the tokenizer's 2 characters"):
        CharTokenizer("ab").encode("abz")
    with pytest.raises(ValueError, match="lone surrogate"):
        CharTokenizer("ab").encode("ab\ud800")
