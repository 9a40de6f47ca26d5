"""prepare: text → token files that depend on the text, the tokenizer and the options alone."""

import json
import os
import subprocess
import sys
import threading
import zlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.standin import EOT, WordTokenizer
from scratchlm.data import TokenFile, parts, plan, prepare, reading
from scratchlm.data.split import side_of
from scratchlm.errors import ScratchLMError
from waiting import PATIENCE


def ids_of(path):
    with TokenFile(path) as tokens:
        tokens.validate()
        return tokens.read(0, len(tokens)).tolist()


def documents_of(path, eot):
    """The documents of a token file, as tuples of ids."""
    found, current = [], []
    for i in ids_of(path):
        if i == eot:
            found.append(tuple(current))
            current = []
        else:
            current.append(i)
    assert not current, "the last document is not closed"
    return found


@pytest.fixture
def corpus(tmp_path):
    """Documents in every kind of file, with duplicates."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"Story {i}. Once there were {i * i} mice, and {i % 7} cats." for i in range(400)]
    (folder / "a.txt").write_text(EOT.join(texts[:150]))
    rows = [{"text": text} for text in texts[150:300]]
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([{"text": t} for t in texts[300:]]), folder / "c.parquet")
    return folder, texts


def test_all_documents_arrive_once_on_the_right_side(corpus, tmp_path):
    folder, texts = corpus
    tokenizer = WordTokenizer()
    made = prepare([folder], tokenizer, tmp_path / "out", separator=EOT, val_fraction=0.2)
    eot = tokenizer.special_tokens[EOT]
    expected = {"train": [], "val": []}
    for text in texts:
        expected[side_of(text, 0.2)].append(tuple(tokenizer.encode_array(text).tolist()))
    for side, info in (("train", made.train), ("val", made.val)):
        assert documents_of(tmp_path / "out" / side, eot) == expected[side]
        assert info.documents == len(expected[side])
    assert 40 < made.val.documents < 120


def test_the_sidecar_says_where_the_ids_come_from(corpus, tmp_path):
    import hashlib

    folder, _ = corpus
    tokenizer, out = WordTokenizer(), tmp_path / "out"
    prepare([folder], tokenizer, out, separator=EOT)
    assert sorted(os.listdir(out)) == [
        "tokenizer.json",
        "train.bin",
        "train.json",
        "val.bin",
        "val.json",
    ]
    sidecar = json.loads((out / "train.json").read_text())
    data = (out / "train.bin").read_bytes()
    assert sidecar["count"] * 2 == len(data)
    assert sidecar["dtype"] == "uint16"
    assert sidecar["vocab_size"] == 1001
    assert sidecar["tokenizer"] == tokenizer.fingerprint()
    assert sidecar["end_of_text"] == 1000
    assert sidecar["crc32"] == zlib.crc32(data)
    assert sidecar["sources"] == [
        {
            "name": str(folder / name),
            "size": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in ("a.txt", "b.jsonl", "c.parquet")
    ]


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(st.sampled_from("ab \n.,é中。 1"), min_size=1, max_size=300),
    part=st.integers(1, 100),
    piece=st.integers(1, 50),
)
def test_a_document_cut_into_parts_and_pieces_has_the_ids_of_the_whole(
    tmp_path_factory, text, part, piece
):
    folder = tmp_path_factory.mktemp("cut")
    (folder / "a.txt").write_bytes(b"x" + text.encode())
    tokenizer = WordTokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", part)
        patch.setattr(reading, "PIECE_CHARS", piece)
        patch.setattr(reading, "HEAD_CHARS", 0)
        patch.setattr(reading, "CHUNK_BYTES", 7)
        patch.setattr(os, "fsync", lambda fd: None)  # hundreds of tiny parts
        prepare([folder / "a.txt"], tokenizer, folder / "out", val_fraction=0)
    expected = [*tokenizer.encode_array("x" + text).tolist(), tokenizer.special_tokens[EOT]]
    assert ids_of(folder / "out" / "train") == expected


# ---- the split


def test_duplicates_are_never_in_both_splits(tmp_path):
    rng = np.random.default_rng(0)
    texts = [f"unique text number {i}, with words" for i in range(300)]
    lines = [texts[i] for i in rng.integers(0, 300, 3000)]
    lines = [" " * int(rng.integers(3)) + t + "\n" * int(rng.integers(3)) for t in lines]
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(EOT.join(lines[name == "b" :: 2]))
    tokenizer = WordTokenizer(words=1 << 31)
    sources = [tmp_path / "a.txt", tmp_path / "b.txt"]
    prepare(sources, tokenizer, tmp_path / "out", separator=EOT, val_fraction=0.3)
    eot = tokenizer.special_tokens[EOT]
    space = {tokenizer.id_of(s) for s in (" ", "  ", "\n", "\n\n")}
    # white space before the first word hangs on it in this pattern: compare what follows it
    sides = [
        {tuple(i for i in d if i not in space)[1:] for d in documents_of(tmp_path / "out" / s, eot)}
        for s in ("train", "val")
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 300
    assert len(sides[1]) > 50


def test_the_fraction_is_about_what_was_asked_for():
    sides = [side_of(f"document {i}", 0.1) for i in range(20_000)]
    assert 0.09 < sides.count("val") / 20_000 < 0.11


def test_a_larger_fraction_only_moves_documents_to_validation():
    texts = [f"document {i}" for i in range(1000)]
    small = {t for t in texts if side_of(t, 0.1) == "val"}
    assert small < {t for t in texts if side_of(t, 0.3) == "val"}


def test_documents_that_share_a_long_beginning_stay_together(tmp_path):
    beginning = "The same beginning. " * 4000
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": beginning + f"End {i}."}) + "\n" for i in range(20))
    )
    with pytest.raises(ScratchLMError, match="nothing falls on the"):
        prepare(
            [tmp_path / "a.jsonl"],
            WordTokenizer(),
            tmp_path / "out",
            val_fraction=0.5,
            split="documents",
        )
    assert not (tmp_path / "out").exists()


def test_a_large_document_falls_on_the_same_side_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE_CHARS", 1000)
    monkeypatch.setattr(reading, "HEAD_CHARS", 500)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 64)
    sides = []
    large = [f"Large {i}. " + "x" * 1020 + " and more. " * 300 for i in range(40)]
    for shift in (0, 17, 40):
        text = EOT.join(["s" * shift + " short", *large])
        (tmp_path / f"{shift}.txt").write_text(text)
        tokenizer = WordTokenizer()
        prepare(
            [tmp_path / f"{shift}.txt"],
            tokenizer,
            tmp_path / str(shift),
            separator=EOT,
            val_fraction=0.5,
        )
        eot = tokenizer.special_tokens[EOT]
        large_ones = [d for d in documents_of(tmp_path / str(shift) / "val", eot) if len(d) > 9]
        sides.append(large_ones)
    assert 5 < len(sides[0]) < 35
    assert sides[0] == sides[1] == sides[2]


def test_one_long_document_is_split_at_its_tail_as_nanogpt_does(tmp_path):
    text = " ".join(f"w{i}" for i in range(5000))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = WordTokenizer(special=())
    made = prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "out", val_fraction=0.1)
    ids = tokenizer.encode_array(text).tolist()
    assert ids_of(tmp_path / "out/train") == ids[: int(len(ids) * 0.9)]
    assert ids_of(tmp_path / "out/val") == ids[int(len(ids) * 0.9) :]
    assert made.train.split == "tail 0.1"


@pytest.mark.parametrize("shift", range(8))  # whatever side the hashes choose
@pytest.mark.parametrize("kind", ["two files", "records"])
def test_where_whole_documents_would_hold_out_too_little_or_too_much_the_end_is(
    tmp_path, kind, shift
):
    texts = [" ".join(f"w{i}" for i in range(first, first + 500)) for first in (shift, 900)]
    folder, tokenizer = tmp_path / "texts", WordTokenizer()
    folder.mkdir()
    if kind == "two files":
        for name, text in zip("ab", texts, strict=True):
            (folder / name).write_text(text)
    else:
        texts = [text for text in texts if side_of(text, 0.1) == "train"]
        (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    made = prepare([folder], tokenizer, tmp_path / "out", val_fraction=0.1)
    closing = tokenizer.special_tokens[EOT]
    ids = [i for text in texts for i in (*tokenizer.encode_array(text).tolist(), closing)]
    keep = int((len(ids) - 1) * 0.9)
    assert ids_of(tmp_path / "out/train") == ids[:keep]
    assert ids_of(tmp_path / "out/val") == ids[keep:]
    assert made.train.split == "tail 0.1"
    assert "too few" in "".join(made.notes)
    again = prepare([folder], tokenizer, tmp_path / "out", val_fraction=0.1)
    assert again.resumed_parts == again.parts


def test_many_files_are_held_out_whole(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in range(100):
        (folder / f"{name}.txt").write_text(f"text {name}, " + "words " * 20)
    made = prepare([folder], WordTokenizer(), tmp_path / "out", val_fraction=0.2)
    assert made.train.split == "documents 0.2"
    assert made.train.documents + made.val.documents == 100


def test_no_validation_writes_no_validation_file(tmp_path):
    (tmp_path / "a.txt").write_text("some words")
    made = prepare([tmp_path / "a.txt"], WordTokenizer(), tmp_path / "out", val_fraction=0)
    assert made.val is None
    assert not (tmp_path / "out/val.bin").exists()


# ---- details a user meets


def test_text_that_looks_like_a_special_token_stays_text_and_is_mentioned(tmp_path):
    (tmp_path / "a.txt").write_text(f"one {EOT} two")
    tokenizer = WordTokenizer()
    made = prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "out", val_fraction=0)
    assert ids_of(tmp_path / "out/train").count(tokenizer.special_tokens[EOT]) == 1  # the end
    assert "stays plain text" in made.notes[0]


def test_empty_documents_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text(f"one{EOT}{EOT} \n{EOT}two{EOT}\n")
    tokenizer = WordTokenizer()
    made = prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "o", separator=EOT, val_fraction=0)
    assert made.train.documents == 2
    assert made.empty_documents == 3
    assert made.notes == ("3 empty documents were left out",)


def test_the_end_of_text_token_can_be_chosen(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    tokenizer = WordTokenizer(special=("<a>", "<b>"))
    made = prepare(
        [tmp_path / "a.txt"], tokenizer, tmp_path / "out", val_fraction=0, end_of_text="<b>"
    )
    assert made.train.end_of_text == 1001
    assert ids_of(tmp_path / "out/train")[-1] == 1001
    with pytest.raises(ValueError, match="'<c>' is not a special token of the tokenizer: '<a>'"):
        prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "x", end_of_text="<c>")


def test_without_an_end_of_text_token_documents_run_together_with_a_note(tmp_path):
    (tmp_path / "a.txt").write_text("one|two")
    made = prepare(
        [tmp_path / "a.txt"],
        WordTokenizer(special=()),
        tmp_path / "out",
        separator="|",
        val_fraction=0,
    )
    assert made.train.end_of_text is None
    assert made.train.count == 2
    assert "run into each other" in made.notes[0]


def test_a_large_vocabulary_is_written_in_four_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    tokenizer = WordTokenizer(words=200_000)
    made = prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "out", val_fraction=0)
    assert made.train.dtype == "uint32"
    assert ids_of(tmp_path / "out/train")[:-1] == tokenizer.encode_array("one two three").tolist()


def test_progress_reaches_its_total_in_both_stages(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    seen = []
    prepare([corpus[0] / "a.txt"], WordTokenizer(), tmp_path / "out", progress=seen.append)
    for stage in ("check", "encode"):
        mine = [p for p in seen if p.stage == stage]
        assert [p.done for p in mine] == sorted(p.done for p in mine)
        assert mine[-1].done == mine[-1].total
    assert len([p for p in seen if p.stage == "encode"]) > 3


def test_a_second_run_finds_the_work_done_and_another_one_is_not_overwritten(corpus, tmp_path):
    folder, _ = corpus
    out = tmp_path / "out"
    prepare([folder], WordTokenizer(), out, separator=EOT)
    before = (out / "train.bin").stat().st_mtime_ns, (out / "train.bin").read_bytes()
    again = prepare([folder], WordTokenizer(), out, separator=EOT)
    assert again.resumed_parts == again.parts
    with pytest.raises(ScratchLMError, match="made from other sources or options"):
        prepare([folder], WordTokenizer(), out, separator=EOT, val_fraction=0.2)
    assert ((out / "train.bin").stat().st_mtime_ns, (out / "train.bin").read_bytes()) == before
    changed = prepare([folder], WordTokenizer(), out, val_fraction=0, separator=EOT, overwrite=True)
    assert changed.train.count > len(before[1]) // 2
    assert not (out / "val.bin").exists()


# ---- bad input leaves nothing behind


def bad_files(folder):
    (folder / "binary.txt").write_bytes(b"text\x00")
    (folder / "latin1.txt").write_bytes("Müller".encode("latin-1"))
    (folder / "empty.txt").touch()
    (folder / "cut.jsonl").write_text('{"text": "fine"}\n{"text": "cu')
    (folder / "field.jsonl").write_text('{"body": "fine"}\n')
    (folder / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    (folder / "cut.txt.gz").write_bytes(b"\x1f\x8b\x08")
    (folder / "blank.txt").write_text(" \n ")
    return sorted([*os.listdir(folder), "missing.txt"])


BAD = ["binary.txt", "blank.txt", "cut.jsonl", "cut.parquet", "cut.txt.gz", "empty.txt"]
BAD += ["field.jsonl", "latin1.txt", "missing.txt"]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("with_good", [False, True])
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, name, existed, with_good):
    folder, out = tmp_path / "bad", tmp_path / "out"
    folder.mkdir()
    assert name in bad_files(folder)
    (tmp_path / "good.txt").write_text("good words, enough of them. " * 100)
    sources = [tmp_path / "good.txt"] * with_good + [folder / name]
    if name == "blank.txt" and with_good:
        pytest.skip("one blank file among others is an empty document, not an error")
    if existed:
        out.mkdir()
        (out / "mine.txt").write_text("keep")
    with pytest.raises((ScratchLMError, ValueError)) as caught:
        prepare(sources, WordTokenizer(), out, split="tail", workers=1)
    assert "\n" not in str(caught.value)
    assert (os.listdir(out) == ["mine.txt"]) if existed else (not out.exists())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\); got 1.0"),
        ({"val_fraction": float("nan")}, "val_fraction must be in"),
        ({"split": "random"}, "split must be one of auto, documents, tail; got 'random'"),
        ({"separator": ""}, "separator must not be empty"),
        ({"workers": 0}, "workers must be >= 1; got 0"),
    ],
)
def test_bad_options_are_one_line(tmp_path, options, message):
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / "a.txt"], WordTokenizer(), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(ScratchLMError, match="exists and is not a directory"):
        prepare([tmp_path / "a.txt"], WordTokenizer(), tmp_path / "a.txt")


def test_a_source_that_changes_under_the_reader_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    path = tmp_path / "a.txt"
    path.write_text("some words and more. " * 500)

    def meddle(progress):
        if progress.stage == "encode":
            with open(path, "r+b") as file:
                file.write(b"OTHER")
            os.utime(path, ns=(1, 1))

    with pytest.raises(ScratchLMError, match="changed while it was being read"):
        prepare([path], WordTokenizer(), tmp_path / "out", progress=meddle)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_whose_ids_exceed_its_vocab_size_is_refused(tmp_path):
    tokenizer = WordTokenizer()
    tokenizer.vocab_size = 10
    (tmp_path / "a.txt").write_text("some words and more. " * 500)
    with pytest.raises(ScratchLMError, match="not below its vocab_size=10"):
        prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_runs_at_once_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some words")

    def second(progress):
        with pytest.raises(ScratchLMError, match="another prepare is writing there"):
            prepare([tmp_path / "a.txt"], WordTokenizer(), tmp_path / "out")

    prepare([tmp_path / "a.txt"], WordTokenizer(), tmp_path / "out", progress=second)
    assert ids_of(tmp_path / "out/train")


@pytest.mark.parametrize("names", [("bad.txt", "good.txt"), ("good.txt", "bad.txt")])
def test_one_bad_source_does_not_wait_for_a_large_good_one(tmp_path, names, monkeypatch):
    (tmp_path / "good.txt").write_text("good words. " * 200_000)  # more than is read at once
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    check_source, stopping, seen = plan.check_source, threading.Event(), []

    def check(source, marker, advance):
        def slow(count):  # the good file is read on once the bad one has been seen
            assert stopping.wait(PATIENCE)
            advance(count)

        return check_source(source, marker, slow if source.name.endswith("good.txt") else advance)

    monkeypatch.setattr(plan, "check_source", check)
    events = SimpleNamespace(Event=lambda: stopping, Lock=threading.Lock)
    monkeypatch.setattr(plan, "threading", events)
    sources = [tmp_path / name for name in names]
    with pytest.raises(ScratchLMError, match="byte 0 is not UTF-8"):
        prepare(sources, WordTokenizer(), tmp_path / "out", progress=seen.append)
    assert not seen or seen[-1].done < seen[-1].total
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_memory_stays_flat_over_a_file_much_larger_than_it(tmp_path):
    """128 MB of text in one document, through a process that may grow by 64 MiB."""
    path = tmp_path / "large.txt"
    words = " ".join(f"{'abcdefgh'[i % 8]}{i * i} and" for i in range(60_000)) + "\n"
    path.write_text(words * ((128 << 20) // len(words)))
    code = """
import resource, sys
from scratchlm.data import prepare
from scratchlm.tokenizer import Tokenizer
tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
tokenizer.encode_array("warm up " * 1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = prepare([sys.argv[1]], tokenizer, sys.argv[2], workers=1)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(made.train.count + made.val.count, grown)
"""
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    count, grown = map(int, result.stdout.split())
    assert count == path.stat().st_size
    assert grown < 64 << 10  # KiB
