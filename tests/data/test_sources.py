"""Text is read from every kind of source, in bounded memory; errors are one line."""

import gzip
import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.standin import EOT, WORDS
from scratchlm.data import iter_documents, parts, reading
from scratchlm.data.sources import check_source, find_sources
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer.patterns import PATTERNS, compile_pattern


def documents(*sources, **options):
    return list(iter_documents([*map(str, sources)], **options))


def refusal(*sources, **options):
    with pytest.raises((ScratchLMError, ValueError)) as caught:
        documents(*sources, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is found


def test_a_text_file_is_one_document_kept_to_the_last_byte(tmp_path):
    text = "Ä\r\n two \n\n 日本 🎉\t"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert documents(tmp_path / "a.txt") == [text]


def test_a_separator_splits_documents(tmp_path):
    (tmp_path / "a.txt").write_text(f"one{EOT}\ntwo{EOT}{EOT}three")
    assert documents(tmp_path / "a.txt", separator=EOT) == ["one", "\ntwo", "", "three"]


def test_jsonl_and_parquet_give_the_named_field(tmp_path):
    rows = [{"id": 1, "body": "one"}, {"id": 2, "body": "zwei ü\n"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "b.ndjson").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=1)
    for name in ("a.jsonl", "b.ndjson", "c.parquet"):
        assert documents(tmp_path / name, field="body") == ["one", "zwei ü\n"]


def test_a_large_document_of_jsonl_or_parquet_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE_CHARS", 100)
    monkeypatch.setattr(reading, "HEAD_CHARS", 10)
    texts = ["short", "words, and more of them. " * 40, ""]
    rows = [{"text": text} for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        pieces = list(reading.read_pieces(find_sources([tmp_path / name])[0]))
        assert len(pieces) > 5
        assert max(len(piece.text) for piece in pieces) <= 200
        assert documents(tmp_path / name) == texts


def test_gzipped_text_and_jsonl_are_unpacked(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"plain"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "line"}\n'))
    assert documents(tmp_path) == ["plain", "line"]


def test_directories_are_read_recursively_in_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/c.md", ".hidden", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == ["a/c.md", "a/z.txt", "b.txt"]
    assert documents(f"{tmp_path}/**/*.txt") == ["a/z.txt", "b.txt"]
    assert documents(tmp_path / "b.txt", tmp_path / "a") == ["b.txt", "a/c.md", "a/z.txt"]


def test_a_file_named_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("brackets")
    assert documents(tmp_path / "a[1].txt") == ["brackets"]


def test_stdin_is_a_source():
    code = "from scratchlm.data import iter_documents as d; print(list(d(['-'], separator='|')))"
    result = subprocess.run(
        [sys.executable, "-c", code], input="a|b", capture_output=True, text=True
    )
    assert result.stdout == "['a', 'b']\n"


def test_the_format_can_be_given_explicitly(tmp_path):
    (tmp_path / "data").write_text('{"text": "x"}\n')
    assert documents(tmp_path / "data", format="jsonl") == ["x"]


# ---- what is refused


def test_missing_things_are_named(tmp_path):
    assert refusal(tmp_path / "no.txt") == f"{tmp_path}/no.txt: no such file"
    assert refusal(f"{tmp_path}/*.txt") == f"{tmp_path}/*.txt: no file matches"
    assert "holds no files" in refusal(tmp_path)
    os.symlink("nowhere", tmp_path / "link")
    assert "broken link" in refusal(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    assert "no sources given" in refusal()
    assert "given twice" in refusal("-", "-")
    assert "format must be one of text, jsonl, parquet; got 'csv'" in refusal("-", format="csv")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    assert refusal(tmp_path / name) == f"{tmp_path / name}: the file is empty"


@pytest.mark.parametrize("padding", [0, 5, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize(
    ("bad", "at", "why"),
    [
        (b"\x00", 0, "is NUL: this is no text file"),
        (b"\xff\xfeh\x00i", 4, "is NUL"),  # the NUL is found first: it says more
        (b"\xff", 0, "is not UTF-8 (invalid start byte)"),
        (b"\xc3(", 0, "is not UTF-8 (invalid continuation byte)"),
        (b"\xf0\x9f\x8e", 0, "is not UTF-8 (the file is cut off within a character)"),
        (b"\xed\xa0\x80", 0, "is not UTF-8 (invalid continuation byte)"),
    ],
)
def test_binary_and_wrongly_encoded_text_names_file_and_byte(tmp_path, padding, bad, at, why):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * padding + bad)
    expected = f"{path}: byte {padding + at:,} {why}"
    if b"\x00" in bad and bad[0] == 0xFF:
        expected = f"{path}: byte {padding + 3:,} {why}"
        if padding + 3 >= 1 << 20 and padding < 1 << 20:
            expected = f"{path}: byte {padding:,} is not UTF-8"
    assert refusal(path).startswith(expected)
    with pytest.raises(ScratchLMError, match=re.escape(expected)):
        check_source(find_sources([path])[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut o', "line 3: cut off: the file ends within a JSON value"),
        ("nonsense\n", "line 3: not JSON (Expecting value"),
        ("[1]\n", "line 3: expected a JSON object, got list"),
        ('{"body": 1, "id": 2}\n', "line 3: no field 'text'; it has 'body', 'id'"),
        ('{"text": null}\n', "line 3: field 'text' must be a string; got NoneType"),
        ('{"text": "\\ud800"}\n', "line 3: field 'text' holds half a surrogate pair"),
        ("[" * 100_000 + "\n", "line 3: not JSON"),
        ("1" * 10_000 + "\n", "line 3: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' + line)
    assert refusal(path).startswith(f"{path}: {message}")


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert refusal(path) == f"{path}: line 2: not UTF-8 (invalid start byte at byte 10 of it)"


def test_the_line_number_counts_from_the_start_of_the_file_in_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "0123456789"}\n' * 49 + "bad\n")
    (source,) = find_sources([path])
    pieces = parts.cut_source(source, None, 0.1)
    assert len(pieces) > 5
    with pytest.raises(ScratchLMError, match="line 50: not JSON"):
        list(reading.read_pieces(source, start=pieces[-1].start, end=pieces[-1].end))


def test_broken_parquet_is_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["word " * 1000] * 50}), path, compression="none")
    whole = path.read_bytes()
    assert "no column 'body'; it has 'text'" in refusal(path, field="body")
    for size in (3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "not a Parquet file, cut off or damaged" in refusal(path)
    pq.write_table(pa.table({"text": [1, 2]}), path)
    assert "column 'text' must hold strings; got int64" in refusal(path)
    pq.write_table(pa.table({"text": ["a", None]}), path)
    assert "row 2: 'text' is null" in refusal(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.delattr(pa, "parquet")
    assert "pip install 'scratchlm[parquet]'" in refusal(tmp_path / "a.parquet")


@pytest.mark.parametrize("keep", [5, 15, -1])
def test_a_cut_off_gzip_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(range(32, 127)) * 50)[:keep])
    assert "broken or cut off gzip data" in refusal(path)


def test_a_gz_file_that_is_not_gzip_is_refused(tmp_path):
    (tmp_path / "a.gz").write_text("not packed")
    assert "broken or cut off gzip data" in refusal(tmp_path / "a.gz")


# ---- cutting


words = st.text(
    st.one_of(
        st.sampled_from(" \n\t.,'!?aZ9é中。_-\u0301\u00a0²🎉"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\x00"),
    ),
    max_size=200,
)


@settings(max_examples=300, deadline=None)
@given(text=words)
def test_pieces_have_the_words_of_the_whole(text):
    """At every safe place, the words left and right are the words of the text, in all patterns."""
    compiled = [WORDS, *map(compile_pattern, PATTERNS)]
    for match in reading.SAFE_CUT.finditer(text):
        left, right = text[: match.end()], text[match.end() :]
        for pattern in compiled:
            split = [m.group() for part in (left, right) for m in pattern.finditer(part)]
            assert split == [m.group() for m in pattern.finditer(text)]


SEPARATORS = ["ab", "a", "\n\n", "<|e|>", "x. y"]
with_separators = st.lists(st.one_of(words, st.sampled_from(SEPARATORS)), max_size=20).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    text=with_separators,
    chunk=st.integers(1, 20),
    piece=st.integers(1, 40),
    most=st.integers(1, 80),
    separator=st.sampled_from([None, *SEPARATORS]),
)
def test_streaming_gives_the_documents_of_the_whole(text, chunk, piece, most, separator):
    chunks = (text[i : i + chunk] for i in range(0, len(text), chunk))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_CHARS", piece)
        patch.setattr(reading, "MAX_PIECE_CHARS", piece + most)
        patch.setattr(reading, "HEAD_CHARS", min(piece, 4))
        got, current = [], ""
        for part in reading._text_pieces(chunks, separator, True):
            assert len(part.text) <= piece + most + 2 * chunk
            current += part.text
            if part.ends_document:
                got.append(current)
                current = ""
    assert current == ""
    expected = text.split(separator) if separator else [text]
    if expected[-1] == "":
        expected.pop()
    assert got == expected


@settings(max_examples=200, deadline=None)
@given(
    text=with_separators,
    size=st.integers(1, 50),
    separator=st.sampled_from([None, *(s for s in SEPARATORS if s != "\n\n")]),
)
def test_parts_of_a_file_make_up_the_file(tmp_path_factory, text, size, separator):
    path = tmp_path_factory.mktemp("parts") / "a.txt"
    path.write_bytes((text + "end").encode())
    (source,) = find_sources([path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", size)
        cut = parts.cut_source(source, separator, 0.5)
    assert cut[0].start == 0
    assert cut[-1].end == source.size
    assert all(a.end == b.start for a, b in pairwise(cut))
    got = []
    for part in cut:
        pieces = reading.read_pieces(
            source,
            separator=separator,
            start=part.start,
            end=part.end,
            ends_document=part.ends_document,
        )
        got += [(p.text, p.ends_document) for p in pieces]
    if separator is None:
        assert "".join(t for t, _ in got) == text + "end"
        assert [end for _, end in got] == [False] * (len(got) - 1) + [True]
    else:
        assert [t for t, _ in got] == documents(path, separator=separator)


def test_memory_stays_flat_over_a_file_much_larger_than_it(tmp_path):
    """256 MB of text, in one document, through a process that may not grow by more than 48 MB."""
    path = tmp_path / "large.txt"
    line = b"The quick brown fox jumps over the lazy dog, and then it sleeps.\n"
    with open(path, "wb") as file:
        for _ in range(64):
            file.write(line * ((4 << 20) // len(line)))
    code = """
import resource, sys
from scratchlm.data.reading import read_pieces
from scratchlm.data.sources import find_sources, check_source
source, = find_sources(sys.argv[1:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
check_source(source, "<|endoftext|>")
total = sum(len(piece.text) for piece in read_pieces(source, separator="<|endoftext|>"))
print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    total, grown = map(int, result.stdout.split())
    assert total == path.stat().st_size
    assert grown < 48 << 10  # KiB
