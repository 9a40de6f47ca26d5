"""The fast trainer learns what the naive definition defines."""

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchlm.tokenizer import Tokenizer, train_bpe, training
from scratchlm.tokenizer.naive import train_bpe_naive
from scratchlm.tokenizer.patterns import PATTERNS
from tokenizer.texts import PROSE, texts

# Two or three letters make many ties, and many overlapping pairs.
tied_text = st.text(st.sampled_from("ab "), max_size=80)
corpora = st.one_of(tied_text, st.text(st.sampled_from("abc'é<s>"), max_size=60), texts)


def write(folder, *contents):
    paths = []
    for i, content in enumerate(contents):
        path = folder / f"{i}.txt"
        path.write_bytes(content.encode())
        paths.append(path)
    return paths


@settings(max_examples=400)
@given(
    text=corpora,
    merges=st.integers(0, 40),
    specials=st.sampled_from([[], ["<s>"], ["ab", "aba"], ["<s", "<s>", "b "]]),
    pattern=st.sampled_from(list(PATTERNS)),
)
def test_the_fast_trainer_equals_the_naive_one(tmp_path_factory, text, merges, specials, pattern):
    size = 256 + len(specials) + merges
    (path,) = write(tmp_path_factory.mktemp("corpus"), text)
    assert train_bpe(path, size, specials, pattern) == train_bpe_naive(
        text, size, specials, pattern
    )


@settings(max_examples=60)
@given(text=tied_text, floor=st.sampled_from([1, 2, 10**6]))
def test_the_floor_of_tracked_pairs_changes_nothing(tmp_path_factory, text, floor):
    (path,) = write(tmp_path_factory.mktemp("corpus"), text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scratchlm.tokenizer.learning.FLOOR", floor)
        assert train_bpe(path, 290) == train_bpe_naive(text, 290)


@settings(max_examples=60)
@given(text=corpora, step=st.integers(1, 7), threads=st.integers(1, 3))
def test_reading_in_small_pieces_changes_nothing(tmp_path_factory, text, step, threads):
    (path,) = write(tmp_path_factory.mktemp("corpus"), text * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "READ", step)
        learnt = train_bpe(path, 290, ["<s>"], "gpt4", threads=threads)
    assert learnt == train_bpe_naive(text * 3, 290, ["<s>"], "gpt4")


def test_words_do_not_join_across_files(tmp_path):
    paths = write(tmp_path, "ab", "", "cd", "a")
    vocab, merges = train_bpe(paths, 400)
    assert sorted(merges) == [(b"a", b"b"), (b"c", b"d")]
    assert len(vocab) == 258


@pytest.mark.parametrize("text", ["", "a", "\n", "é"])
def test_nearly_empty_files_train(tmp_path, text):
    (path,) = write(tmp_path, text)
    assert train_bpe(str(path), 300, ["<s>"]) == train_bpe_naive(text, 300, ["<s>"])


def test_ties_go_to_the_lexicographically_larger_pair(tmp_path):
    # Sennrich's example, with ties: (s, t) and (e, s) nine times each; (s, t) is greater.
    (path,) = write(
        tmp_path, "low low low low low lower lower widest widest widest" + " newest" * 6
    )
    _, merges = train_bpe(path, 256 + 6)
    assert merges[:3] == [(b"s", b"t"), (b"e", b"st"), (b"o", b"w")]


def test_ids_are_bytes_then_merges_then_special_tokens(tmp_path):
    (path,) = write(tmp_path, PROSE)
    vocab, merges = train_bpe(path, 300, ["<s>", "<pad>"])
    assert list(vocab) == list(range(300))
    assert [vocab[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [vocab[256 + i] for i in range(42)] == [a + b for a, b in merges]
    assert [vocab[298], vocab[299]] == [b"<s>", b"<pad>"]
    assert Tokenizer(vocab, merges, ["<s>", "<pad>"]).special_tokens == {"<s>": 298, "<pad>": 299}


@settings(max_examples=200)
@given(text=tied_text)
def test_no_two_merges_make_the_same_token(text):
    vocab, _ = train_bpe_naive(text, 400)
    assert len(set(vocab.values())) == len(vocab)


def test_line_ends_stay_as_they_are(tmp_path):
    (path,) = write(tmp_path, "a\r\nb\r\nc\r\n" * 3)
    vocab, _ = train_bpe(path, 258)
    assert b"\r\n" in vocab.values()


@pytest.mark.parametrize(
    ("size", "specials", "message"),
    [
        (255, [], "vocab_size must be from 256"),
        (257, ["<a>", "<b>"], "vocab_size must be from 258 .256 bytes and 2 special tokens"),
        (1 << 25, [], "vocab_size must be"),
        (300.0, [], "vocab_size must be an integer"),
        (300, [""], "must not be empty"),
        (300, ["<a>", "<a>"], "twice"),
        (300, ["a"], "single byte"),
        (300, "<a>", "list of strings"),
        (300, [3], "must be a string"),
        (300, ["\ud800"], "surrogate"),
    ],
)
def test_wrong_sizes_and_special_tokens_are_refused(tmp_path, size, specials, message):
    (path,) = write(tmp_path, "text")
    with pytest.raises((ValueError, TypeError), match=message):
        train_bpe(path, size, specials)


def test_a_file_that_is_no_utf8_is_refused_with_the_place(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"x" * (training.READ - 1) + "é".encode() + b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=rf"latin.txt: not UTF-8 text .byte {training.READ + 4}:"):
        train_bpe(path, 300)
    path.write_bytes("trunc é".encode()[:-1])
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 6: unexpected end"):
        train_bpe(path, 300)
    with pytest.raises(FileNotFoundError):
        train_bpe(tmp_path / "missing", 300)
    with pytest.raises(ValueError, match="at least one file"):
        train_bpe([], 300)


def test_progress_tells_bytes_and_merges(tmp_path):
    (path,) = write(tmp_path, PROSE)
    reported = []
    train_bpe(path, 266, progress=lambda *report: reported.append(report))
    size = path.stat().st_size
    assert ("count", size, size) in reported
    assert reported[-1] == ("merge", 10, 10)


def test_a_corpus_larger_than_the_memory_allowed_trains(tmp_path):
    path = tmp_path / "large.txt"
    block = "It's the 2nd of May: the cat and the other cats, they'd said.\n" * (1 << 14)
    with path.open("w") as file:
        for _ in range(100):
            file.write(block)
    script = """
        import resource, sys
        from scratchlm.tokenizer import train_bpe
        train_bpe(sys.argv[2], 300)  # whatever importing and warming up takes is not ours
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limit = size + 64 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        vocab, merges = train_bpe(sys.argv[1], 270)
        print(len(vocab))
    """
    small = tmp_path / "small.txt"
    small.write_text(PROSE)
    assert path.stat().st_size > 95 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path), str(small)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "270", done.stderr[-500:]
