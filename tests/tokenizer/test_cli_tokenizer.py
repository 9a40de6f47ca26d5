"""The commands, as a person uses them."""

import os
import signal
import subprocess
import sys

import pytest

from check.command import run
from scratchlm.cli.tokenizer import piece_text
from scratchlm.tokenizer import load_tokenizer
from tokenizer.texts import PROSE


def scratchlm(*arguments, stdin=b"", **options):
    command = [sys.executable, "-c", "from scratchlm.cli import main; main()", "tokenizer"]
    return subprocess.run(
        [*command, *map(str, arguments)], input=stdin, capture_output=True, check=False, **options
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_bytes(PROSE.encode())
    out = folder / "out"
    done = scratchlm(
        "train", folder / "text.txt", "--vocab-size", 320, "--special", "<s>", "--out", out
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"{out / 'tokenizer.json'}: 320 tokens\n"
    return out


def test_encode_then_decode_gives_the_text_back(trained, tmp_path):
    text = PROSE + "<s>"
    ids = scratchlm("encode", "-t", trained, stdin=text.encode()).stdout
    assert list(map(int, ids.split())) == load_tokenizer(trained).encode(text)
    assert scratchlm("decode", "-t", trained, stdin=ids).stdout == text.encode()
    (tmp_path / "ids").write_bytes(ids)
    from_file = scratchlm("decode", "-t", trained, "--file", tmp_path / "ids").stdout
    assert from_file == text.encode()
    assert scratchlm("decode", "-t", trained, 104, 105).stdout == b"hi"
    assert scratchlm("encode", "-t", trained, "<s>").stdout == b"319\n"
    assert b"319" not in scratchlm("encode", "-t", trained, "--no-special", "<s>").stdout


def test_show_names_each_piece_and_its_id(trained):
    done = scratchlm("show", "-t", trained, "the naïve<s>\n", env={**os.environ, "NO_COLOR": "1"})
    out = done.stdout.decode()
    assert "\x1b" not in out  # readable without colour, too
    assert "<s>" in out
    assert "319" in out
    assert "↵" in out
    ids = load_tokenizer(trained).encode("the naïve<s>\n")
    assert f"{len(ids)} tokens, 13 characters, 14 bytes" in out
    assert [int(n) for line in out.splitlines()[1:-1:2] for n in line.split()] == ids


def test_whitespace_and_stray_bytes_are_shown_visibly():
    assert piece_text(b" a\n\t") == "·a↵→"
    assert piece_text("é".encode()[:1]) == "<C3>"
    assert piece_text("\u200d\0".encode()) == "<U+200D><U+0000>"


def test_characters_and_standard_input(tmp_path):
    done = scratchlm("train", "-", "--char", "--out", tmp_path, stdin="banaña".encode())
    assert done.returncode == 0, done.stderr
    assert load_tokenizer(tmp_path).characters == ["a", "b", "n", "ñ"]


def test_running_out_of_pairs_is_reported(tmp_path):
    done = scratchlm("train", "-", "--vocab-size", 400, "--out", tmp_path, stdin=b"ab ab")
    assert done.returncode == 0
    assert b"258 tokens" in done.stdout
    assert b"no pair left to merge; 400 tokens were asked for" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt", "--vocab-size", 300], "missing.txt: No such file"),
        (["empty.txt", "--vocab-size", 300], "nothing to learn from: empty.txt is empty"),
        (["empty.txt", "--char"], "at least one character"),
        (["binary.bin", "--vocab-size", 300], "binary.bin: not UTF-8 text (byte 2"),
        (["folder", "--vocab-size", 300], "folder: Is a directory"),
        (["text.txt", "--vocab-size", 200], "--vocab-size must be from 256"),
        (["text.txt", "--vocab-size", 256, "--special", "<s>"], "--vocab-size must be from 257"),
        (["text.txt"], "--vocab-size is needed"),
        (["text.txt", "--char", "--vocab-size", 300], "leave --vocab-size out"),
        (["text.txt", "--char", "--pattern", "gpt4"], "leave --pattern out"),
        (["text.txt", "--vocab-size", 300, "--pattern", "gpt9"], "--pattern must be one of"),
        (["text.txt", "--vocab-size", 300, "--special", ""], "must not be empty"),
    ],
)
def test_errors_are_one_line_and_leave_no_files(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.bin").write_bytes(b"ab\xff\x00")
    (tmp_path / "folder").mkdir()
    done = run("tokenizer", "train", *arguments, "--out", "out")
    assert done.status == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_there_stays(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("some text")
    assert run("tokenizer", "train", text, "--char", "--out", out).status == 0
    before = (out / "tokenizer.json").read_bytes()
    done = run("tokenizer", "train", text, "--vocab-size", 258, "--out", out)
    assert done.status == 2
    assert "tokenizer.json exists already and is not overwritten" in done.stderr
    assert (out / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", 99999], "token id must be one of the vocabulary's 320; got 99999"),
        (["decode", "x1"], "a token id must be a number; got 'x1'"),
        (["encode", "a", "--file", "b"], "give a text or --file, not both"),
        (["encode", "--file", "missing"], "missing: No such file"),
    ],
)
def test_wrong_use_of_a_tokenizer_is_one_line(trained, arguments, message):
    done = run("tokenizer", *arguments, "-t", trained)
    assert done.status == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_interrupted_training_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from scratchlm.cli import main; main()", "tokenizer"]
    running = subprocess.Popen(
        [*command, "train", "-", "--vocab-size", "300", "--out", str(out)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # More than a pipe holds: once it is written, the command is at work. The input never ends, so
    # it cannot finish.
    running.stdin.write(PROSE.encode() * 1000)
    running.stdin.flush()
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate()
    assert running.returncode == 130
    assert stderr.splitlines()[-1] == b"stopped"
    assert b"Traceback" not in stderr
    assert not out.exists()
