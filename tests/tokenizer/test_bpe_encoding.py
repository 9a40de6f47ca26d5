"""Encoding equals its definition, and decoding undoes it."""

import itertools
import multiprocessing
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchlm.tokenizer import PATTERNS, Tokenizer
from scratchlm.tokenizer.merging import Merger, merge_long, merge_short
from scratchlm.tokenizer.naive import encode_word_naive, split_specials
from scratchlm.tokenizer.patterns import split_words
from scratchlm.tokenizer.vocabulary import check_merges, check_vocab
from tokenizer.texts import PROSE, SPECIALS, prose_tokenizer, random_text, texts

special_text = st.lists(
    st.one_of(texts, st.sampled_from([*SPECIALS, "<|endoftext", "<s", "él"])), max_size=6
).map("".join)


def naive_ids(tokenizer, text, specials=()):
    ids = []
    id_of = {piece: i for i, piece in tokenizer.vocab.items()}
    for i, part in enumerate(split_specials(text, list(specials))):
        if i % 2:
            ids.append(tokenizer.special_tokens[part])
            continue
        for word in split_words(part, tokenizer.pattern):
            ids += [id_of[p] for p in encode_word_naive(word.encode(), tokenizer.merges)]
    return ids


@st.composite
def arbitrary_merges(draw):
    """Merges in any order: also such that a later one makes what an earlier one needs."""
    tokens = [b"a", b"b", b"c"]
    merges = []
    for _ in range(draw(st.integers(0, 12))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if pair not in merges and (pair[0] + pair[1]) not in tokens:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    tokens = [bytes([i]) for i in range(256)] + [t for t in tokens if len(t) > 1]
    return dict(enumerate(tokens)), draw(st.permutations(merges))


@settings(max_examples=250)
@given(
    made=arbitrary_merges(),
    words=st.lists(st.text("abcd", min_size=1, max_size=40), min_size=1, max_size=5),
)
def test_every_merge_implementation_equals_the_naive_one(made, words):
    vocab, merges = made
    id_of = check_vocab(vocab, {})
    _, table = check_merges(merges, id_of)
    words = [word.encode() for word in words]
    expected = [[id_of[p] for p in encode_word_naive(word, merges)] for word in words]
    assert [merge_short([id_of[bytes([b])] for b in w], table) for w in words] == expected
    assert [merge_long([id_of[bytes([b])] for b in w], table) for w in words] == expected
    many = words * 80  # enough of them to become a matrix
    ids, counts = Merger(id_of, table, False).merge_many(many)
    rows = np.split(ids, np.cumsum(counts)[:-1])
    assert [row.tolist() for row in rows] == expected * 80


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=150)
@given(text=special_text)
def test_encode_equals_the_naive_definition(pattern, text):
    tokenizer = prose_tokenizer(pattern)
    assert tokenizer.encode(text) == naive_ids(tokenizer, text, SPECIALS)
    assert tokenizer.encode(text, allowed_special=()) == naive_ids(tokenizer, text)
    assert tokenizer.encode(text, allowed_special={"<s>"}) == naive_ids(tokenizer, text, ["<s>"])


def test_twenty_thousand_strings_round_trip():
    rng = random.Random(0)
    strings = [random_text(rng, rng.randrange(30)) for _ in range(19_000)]
    strings += [chr(c) for c in range(1000)]  # NUL and the other controls among them
    for pattern in PATTERNS:
        tokenizer = prose_tokenizer(pattern)
        encoded = tokenizer.encode_batch(strings)
        assert [tokenizer.decode(ids) for ids in encoded] == strings


@settings(max_examples=400)
@given(text=texts)
def test_any_text_round_trips(text):
    tokenizer = prose_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(tokenizer.encode_array(text)) == text.encode()


def test_twenty_thousand_byte_strings_round_trip():
    tokenizer = prose_tokenizer()
    rng = random.Random(0)
    for _ in range(20_000):
        data = rng.randbytes(rng.randrange(12))
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


@settings(max_examples=300)
@given(data=st.binary(max_size=40), text=texts)
def test_any_bytes_round_trip(data, text):
    tokenizer = prose_tokenizer()
    for mixed in (data, text.encode() + data, data + text.encode()):
        ids = tokenizer.encode_bytes(mixed)
        assert tokenizer.decode_bytes(ids) == mixed
        assert tokenizer.decode(ids) == mixed.decode("utf-8", errors="replace")


@settings(max_examples=100)
@given(batch=st.lists(special_text, max_size=6))
def test_encode_batch_equals_encoding_each_text(batch):
    tokenizer = prose_tokenizer("gpt4")
    for allowed in ((), "all"):
        together = tokenizer.encode_batch(batch, allowed_special=allowed)
        alone = [tokenizer.encode(text, allowed_special=allowed) for text in batch]
        assert [ids.tolist() for ids in together] == alone


@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_texts_encoded_in_blocks_equal_the_naive_definition(pattern, monkeypatch):
    monkeypatch.setattr("scratchlm.tokenizer.wordcache.BLOCK", 50)
    tokenizer = prose_tokenizer(pattern)
    rng = random.Random(0)
    for length in (0, 49, 50, 51, 3000):
        batch = [random_text(rng, length), "", "x" * 120, " " * 120, random_text(rng, 70)]
        together = tokenizer.encode_batch(batch)
        assert [ids.tolist() for ids in together] == [naive_ids(tokenizer, t) for t in batch]


def test_clearing_the_word_cache_changes_nothing(monkeypatch):
    monkeypatch.setattr("scratchlm.tokenizer.wordcache.MAX_WORDS", 20)
    tokenizer = Tokenizer(prose_tokenizer().vocab, prose_tokenizer().merges)
    for _ in range(3):
        for line in PROSE.splitlines(keepends=True):
            assert tokenizer.encode(line) == naive_ids(tokenizer, line)


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=60)
@given(text=special_text, data=st.data())
def test_encode_iterable_equals_encode_for_any_chunking(pattern, text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    tokenizer = prose_tokenizer(pattern)
    piece = data.draw(st.integers(1, 30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scratchlm.tokenizer.streaming.settled_parts.__defaults__", (piece,))
        assert list(tokenizer.encode_iterable(pieces)) == tokenizer.encode(text)
        ordinary = tokenizer.encode_iterable(pieces, allowed_special=())
        assert list(ordinary) == tokenizer.encode(text, allowed_special=())


@settings(max_examples=100)
@given(text=special_text, data=st.data())
def test_nfc_and_unnamed_patterns_stream_too(text, data):
    base = prose_tokenizer("qwen2")
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    nfc = Tokenizer(base.vocab, base.merges, SPECIALS, "qwen2", normalization="NFC")
    unnamed = Tokenizer(base.vocab, base.merges, SPECIALS, r"\w+|\s+|[^\w\s]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scratchlm.tokenizer.streaming.settled_parts.__defaults__", (4,))
        for tokenizer in (nfc, unnamed):
            assert list(tokenizer.encode_iterable(pieces)) == tokenizer.encode(text)


def test_encode_iterable_is_lazy():
    def endless():
        while True:
            yield "word and another "

    ids = prose_tokenizer().encode_iterable(endless())
    assert len(list(itertools.islice(ids, 1000))) == 1000


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 419), max_size=30))
def test_streaming_decode_equals_the_whole_and_never_gives_half_a_character(ids):
    tokenizer = prose_tokenizer()
    decoder = tokenizer.stream_decoder()
    for _ in range(2):  # a finished decoder can be reused
        given_out = [decoder.push(i) for i in ids] + [decoder.finish()]
        assert "".join(given_out) == tokenizer.decode(ids)


@settings(max_examples=200)
@given(text=texts)
def test_streaming_decode_of_a_text_holds_no_replacement_character(text):
    tokenizer = prose_tokenizer()
    decoder = tokenizer.stream_decoder()
    out = "".join(decoder.push(i) for i in tokenizer.encode(text))
    assert out == text
    assert decoder.finish() == ""


def test_overlapping_special_tokens_go_to_the_longest():
    tokenizer = prose_tokenizer()
    one, two = SPECIALS[:2]
    ids = tokenizer.special_tokens
    assert tokenizer.encode(one * 5) == [ids[two], ids[two], ids[one]]
    assert tokenizer.encode(one * 2, allowed_special={one}) == [ids[one]] * 2
    assert tokenizer.decode(tokenizer.encode(one, allowed_special=())) == one
    assert not set(ids.values()) & set(tokenizer.encode(one, allowed_special=()))


def test_special_tokens_missing_from_the_vocabulary_get_new_ids():
    base = prose_tokenizer()
    tokenizer = Tokenizer(base.vocab, base.merges, ["<s>", "<new>", "<newer>"])
    assert tokenizer.special_tokens["<s>"] == base.special_tokens["<s>"]
    assert tokenizer.special_tokens["<new>"] == 420
    assert tokenizer.special_tokens["<newer>"] == 421
    assert tokenizer.vocab_size == 422
    assert 420 not in base.vocab
    assert tokenizer.encode("a<newer>") == [97, 421]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("ab\ud800c", ValueError, r"lone surrogate; got U\+D800 at character 2"),
        ("é" * (1 << 20) + "\udfff", ValueError, r"U\+DFFF at character 1048576"),
        (b"bytes", TypeError, "text must be str; got bytes"),
        (None, TypeError, "text must be str; got NoneType"),
    ],
)
def test_invalid_text_is_refused(text, error, message):
    tokenizer = prose_tokenizer()
    for encode in (tokenizer.encode, tokenizer.encode_array, lambda t: tokenizer.encode_batch([t])):
        with pytest.raises(error, match=message):
            encode(text)
    with pytest.raises(error):
        list(tokenizer.encode_iterable(["x", text]))


@pytest.mark.parametrize("token", [420, -1, 10**12, 1.5, "a", None])
def test_ids_outside_the_vocabulary_are_refused(token):
    tokenizer = prose_tokenizer()
    for decode in (tokenizer.decode, tokenizer.decode_bytes):
        with pytest.raises(ValueError, match="token id must be one of the vocabulary's 420"):
            decode([97, token])
    with pytest.raises(ValueError, match="token id"):
        tokenizer.stream_decoder().push(token)


def test_allowed_special_must_be_known():
    with pytest.raises(ValueError, match="'<x>', which is no special token here"):
        prose_tokenizer().encode("a", allowed_special={"<x>"})
    with pytest.raises(ValueError, match='"all" or a collection'):
        prose_tokenizer().encode("a", allowed_special="none")


BYTES = {i: bytes([i]) for i in range(256)}


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ({}, [], "all 256 bytes; 256 are missing"),
        ({i: bytes([i]) for i in range(255)}, [], "the first is 0xff"),
        ({**BYTES, 256: b"a"}, [], "twice, as 97 and 256"),
        ({**BYTES, 256: "ab"}, [], "bytes object"),
        ({**BYTES, 256: b""}, [], "non-empty"),
        ({**BYTES, -1: b"ab"}, [], "from 0 to"),
        ({**BYTES, 1 << 40: b"ab"}, [], "from 0 to"),
        ({**BYTES, "256": b"ab"}, [], "integer"),
        (BYTES, [(b"a", b"b")], "the vocabulary has no b'ab'"),
        ({**BYTES, 256: b"ab"}, [(b"a", b"b"), (b"a", b"b")], "twice"),
        ({**BYTES, 256: b"abc"}, [(b"ab", b"c")], "no b'ab'"),
        ({**BYTES, 256: b"ab"}, [(b"a", b"b", b"c")], "two byte strings"),
        ({**BYTES, 256: b"ab"}, [("a", "b")], "two byte strings"),
    ],
)
def test_a_wrong_vocabulary_is_refused(vocab, merges, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Tokenizer(vocab, merges)


def test_the_fingerprint_changes_with_every_setting():
    base = prose_tokenizer()
    again = Tokenizer(base.vocab, base.merges, SPECIALS)
    others = [
        prose_tokenizer(vocab_size=419),
        Tokenizer(base.vocab, base.merges),
        Tokenizer(base.vocab, base.merges, SPECIALS, "qwen2"),
        Tokenizer(base.vocab, base.merges[::-1], SPECIALS),
        Tokenizer(base.vocab, base.merges, SPECIALS, ignore_merges=True),
        Tokenizer(base.vocab, base.merges, SPECIALS, normalization="NFC"),
        Tokenizer(base.vocab, base.merges, SPECIALS[1:], added_tokens={SPECIALS[0]: 415}),
    ]
    assert again.fingerprint() == base.fingerprint()
    assert len({t.fingerprint() for t in [base, *others]}) == len(others) + 1
    # Any order of the same vocabulary is the same vocabulary.
    shuffled = dict(reversed(base.vocab.items()))
    assert Tokenizer(shuffled, base.merges, SPECIALS).fingerprint() == base.fingerprint()


def test_a_tokenizer_can_be_pickled():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        ids = pool.apply(prose_tokenizer("gpt4").encode, (PROSE,))
    assert ids == prose_tokenizer("gpt4").encode(PROSE)
