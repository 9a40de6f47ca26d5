"""`scratchlm prepare` as a person uses it."""

import io
import os
import signal
import sys
import time

import pytest

from data.standin import EOT
from forked import ForkedCommand
from scratchlm.data import TokenFile
from scratchlm.tokenizer import CharTokenizer, Tokenizer, load_tokenizer


@pytest.fixture
def prepare(cli, monkeypatch):
    """Run `scratchlm prepare` with this on stdin; return its exit status, stdout and stderr."""

    def run(*arguments, stdin=""):
        piped = io.TextIOWrapper(io.BytesIO(stdin.encode()))
        monkeypatch.setattr(sys, "stdin", piped)
        return cli("prepare", *arguments)

    return run


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer({i: bytes([i]) for i in range(256)}, [], [EOT]).save(folder)
    return folder


def test_text_becomes_token_files_that_decode_to_it(prepare, tmp_path, tokenizer):
    text = "It was a dark night. 夜は暗い。🎉\n" * 50
    (tmp_path / "a.txt").write_text(text)
    status, stdout, stderr = prepare(
        tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", tmp_path / "out"
    )
    assert (status, stderr) == (0, "")
    assert [line.split()[0] for line in stdout.splitlines()] == ["train", "val"]
    same = load_tokenizer(tmp_path / "out")
    ids = []
    for side in ("train", "val"):
        with TokenFile(tmp_path / "out" / side, expect_fingerprint=same.fingerprint()) as tokens:
            ids += tokens.read(0, len(tokens)).tolist()
    assert same.decode(ids) == text + EOT


def test_a_character_tokenizer_gives_nanogpts_split(prepare, tmp_path):
    text = "".join(chr(97 + i * i % 26) for i in range(10_007))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "c").mkdir()
    CharTokenizer.of_text(text).save(tmp_path / "c")
    status, _, stderr = prepare(
        tmp_path / "a.txt", "--tokenizer", tmp_path / "c", "--out", tmp_path / "out"
    )
    assert status == 0, stderr
    chars = {ch: i for i, ch in enumerate(sorted(set(text)))}  # as nanoGPT numbers them
    with TokenFile(tmp_path / "out/train") as train, TokenFile(tmp_path / "out/val") as val:
        assert train.read(0, len(train)).tolist() == [chars[c] for c in text[: int(10_007 * 0.9)]]
        assert val.read(0, len(val)).tolist() == [chars[c] for c in text[int(10_007 * 0.9) :]]


def test_stdin_is_read(prepare, tmp_path, tokenizer):
    status, _, stderr = prepare(
        *("-", "--tokenizer", tokenizer, "--out", tmp_path / "o", "--val-fraction", "0"),
        *("--separator", "|"),
        stdin="one|two",
    )
    assert status == 0, stderr
    with TokenFile(tmp_path / "o/train") as tokens:
        assert tokens.info.documents == 2
        assert tokens.info.sources[0].name == "-"
    assert sorted(os.listdir(tmp_path / "o")) == ["tokenizer.json", "train.bin", "train.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.txt"], "error: no.txt: no such file"),
        (["empty.txt"], "error: empty.txt: the file is empty"),
        (["bin.txt"], "error: bin.txt: byte 2 is NUL: this is no text file"),
        (["a.txt", "--val-fraction", "1.5"], "error: --val-fraction must be in [0, 1); got 1"),
        (["a.txt", "--field", "x"], "error: --field is for JSON Lines and Parquet; the data is pl"),
        (["a.jsonl", "--separator", "x"], "error: --separator is for text files; JSON Lines and"),
        (["a.txt", "--format", "csv"], "error: format must be one of text, jsonl, parquet; got"),
        (["a.txt", "--end-of-text", "<x>"], "error: --end-of-text '<x>' is not a special to"),
        (["a.jsonl", "--field", "body"], "error: a.jsonl: line 1: no field 'body'; it has 'text'"),
        (["-"], "error: -: stdin is empty"),
    ],
)
def test_errors_are_one_line_and_leave_no_files(
    prepare, tmp_path, tokenizer, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bin.txt").write_bytes(b"MZ\0")
    before = sorted(os.listdir(tmp_path))
    status, stdout, stderr = prepare(*arguments, "--tokenizer", "tokenizer", "--out", "out")
    assert (status, stdout) == (2, "")
    assert stderr.startswith(message)
    assert stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_ctrl_c_says_how_to_go_on(tmp_path, tokenizer):
    source, out = tmp_path / "a.txt", tmp_path / "out"
    with open(source, "w") as file:
        for i in range(6):
            file.write(f"part {i} " + "and so it went on and on, " * 300_000)
    journal = out / ".prepare" / "journal.jsonl"
    words = ["prepare", source, "--tokenizer", tokenizer, "--out", out, "--workers", "2"]
    process = ForkedCommand(*words)
    while not (journal.exists() and journal.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert stderr == "stopped; the same command goes on from here\n"
    assert os.listdir(out) == [".prepare"]
