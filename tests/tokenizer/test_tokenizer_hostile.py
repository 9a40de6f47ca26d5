"""Hostile text costs no more than its length, in steps and in memory."""

import subprocess
import sys
import textwrap

import pytest

from scratchlm.tokenizer import Tokenizer, train_bpe
from scratchlm.tokenizer.merging import Merger, merge_short
from scratchlm.tokenizer.naive import train_bpe_naive
from scratchlm.tokenizer.vocabulary import check_merges, check_vocab

MEGABYTE = 1 << 20
HOSTILE = {
    "one letter": "a",
    "spaces": " ",
    "line ends": "\n",
    "combining marks": "\u0301\u0323",
    "CJK": "我能吞下玻璃而不伤身体",
    "emoji": "👩‍👩‍👧🏳️‍🌈",
    "apostrophes": "''s",
    "digits": "1",
}


def lines_run(function, *arguments):
    """Count the lines of `merging.py` that a call runs: its work, without a clock."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.endswith("merging.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


def hostile(name, size):
    unit = HOSTILE[name]
    return unit * (size // len(unit.encode()) + 1)


def learnt(name):
    """Train on the hostile text itself, so that there is something to merge."""
    return train_bpe_naive(hostile(name, 600) + " " + hostile(name, 150), 256 + 12)


@pytest.mark.parametrize("name", HOSTILE)
def test_merging_takes_steps_by_the_length_not_its_square(name):
    vocab, merges = learnt(name)
    id_of = check_vocab(vocab, {})
    merger = Merger(id_of, check_merges(merges, id_of)[1], ignore_merges=False)
    per_byte = {}
    for size in (1 << 9, 1 << 13):
        word = hostile(name, size).encode()
        per_byte[size] = lines_run(merger.merge, word) / len(word)
    assert per_byte[1 << 13] < 1.2 * per_byte[1 << 9]


def test_the_count_of_steps_tells_a_quadratic_loop():
    id_of = check_vocab(learnt("one letter")[0], {})
    _, table = check_merges(learnt("one letter")[1], id_of)
    small, large = (lines_run(merge_short, [97] * size, table) / size for size in (1 << 7, 1 << 9))
    assert large > 2 * small


# The texts of the promise at full size; the others, and the second pattern, at an eighth.
FULL = {("gpt2", name) for name in ("one letter", "spaces", "combining marks", "CJK", "emoji")}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_a_hostile_megabyte_goes_through(name, pattern):
    tokenizer = Tokenizer(*learnt(name), pattern=pattern)
    text = hostile(name, MEGABYTE if (pattern, name) in FULL else MEGABYTE // 8)
    ids = tokenizer.encode_array(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert len(ids) < len(text.encode())


def test_training_on_a_hostile_megabyte_goes_through(tmp_path):
    path = tmp_path / "hostile.txt"
    path.write_text("".join(hostile(name, MEGABYTE // 8) for name in HOSTILE))
    vocab, merges = train_bpe(path, 300)
    assert len(vocab) == 300
    assert len(merges) == 44


def test_encode_iterable_uses_no_more_memory_for_a_file_a_hundred_times_larger(tmp_path):
    script = """
        import resource, sys, tracemalloc
        from scratchlm.tokenizer import Tokenizer, train_bpe
        from scratchlm.tokenizer.naive import train_bpe_naive
        line = "It's the 2nd of May: the cat and the other cats, they'd said: naïve.\\n"
        tokenizer = Tokenizer(*train_bpe_naive(line, 280))
        path = sys.argv[1]
        def peak(lines):
            with open(path, "w") as file:
                for _ in range(lines // 1000):
                    file.write(line * 1000)
            tracemalloc.start()
            with open(path) as file:
                count = sum(1 for _ in tokenizer.encode_iterable(file))
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert count > lines
            return found
        peak(1000)
        print(peak(1000), peak(100_000))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "text")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large < 1.5 * small
    assert large < 32 * MEGABYTE
