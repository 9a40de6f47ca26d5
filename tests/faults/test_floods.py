"""Input that could take memory without bound: refused by name, or taken in bounded memory."""

import json
import subprocess
import sys

import pytest

from scratchlm.tokenizer import load_tokenizer, naive, train_bpe, training
from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.patterns import PATTERNS, TIKTOKEN_SPELLINGS, compile_pattern

RECURSIVE = ["(?R)?a", "(?0)?a", "(a(?1)?)", "(?<x>a(?&x)?)", "(?P<x>a(?P>x)?)", "(?+1)(a)"]
FUZZY = ["(?:abc){e<=3}", "(a){i,d}", "(a){e}", "(a){1<=e<=4}"]


@pytest.mark.parametrize("pattern", [*RECURSIVE, *FUZZY, "a" * 20_000 + "+"])
def test_a_pattern_that_takes_memory_without_bound_is_refused(tmp_path, pattern):
    with pytest.raises(ValueError, match="pattern"):
        compile_pattern(pattern)
    (tmp_path / "text").write_text("some text")
    folder = tmp_path / "tokenizer"
    Tokenizer(*train_bpe(tmp_path / "text", 257), pattern="llama3").save(folder)
    table = json.loads((folder / "tokenizer.json").read_text())
    assert PATTERNS["llama3"] in json.dumps(table["pre_tokenizer"], ensure_ascii=False).replace(
        "\\\\", "\\"
    )
    table["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"tokenizer\.json: pattern"):
        load_tokenizer(folder)


def test_the_patterns_people_use_are_taken():
    for pattern in (*PATTERNS.values(), *TIKTOKEN_SPELLINGS, r"\p{N}{1,3}|a{2}|x{,3}|(?<=b)c"):
        compile_pattern(pattern)


@pytest.mark.parametrize("text", ["a" * 100, "ab" * 70 + " cd ef", "日本" * 40 + "x" * 33, "a b c"])
def test_words_that_are_too_long_are_cut_as_the_definition_cuts_them(tmp_path, monkeypatch, text):
    for module in (naive, training):
        monkeypatch.setattr(module, "MAX_WORD", 16)
    (tmp_path / "text").write_text(text)
    assert train_bpe(tmp_path / "text", 290) == naive.train_bpe_naive(text, 290)
    longest = max(map(len, train_bpe(tmp_path / "text", 290)[0].values()))
    assert longest <= 16


FLOOD = """
import sys
from scratchlm.tokenizer import train_bpe
vocab, merges = train_bpe(sys.argv[1], 300)
status = open("/proc/self/status").read()  # not getrusage: that counts the parent's memory, too
print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


def test_a_megaword_is_learnt_from_in_bounded_memory(tmp_path):
    """16 MB of one letter; before, 140 bytes for each byte of it: 2.3 GB."""
    (tmp_path / "text").write_text("a" * (16 << 20) + " and some words")
    done = subprocess.run(
        [sys.executable, "-c", FLOOD, str(tmp_path / "text")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 400  # MB, 60 of them Python and numpy
