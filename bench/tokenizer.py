"""Measure the tokenizer beside HF `tokenizers` and tiktoken: training, and encoding one string.

`python bench/tokenizer.py TEXT` grows TEXT (tinyshakespeare is a good one) to about 11 MB twice:
- plain: repeated, so that no new words come;
- varied: repeated, with 15 % of the longer words respelt in each copy but the first, so that new
  words keep coming.
Ours and the peers run in turn, `--repeat` times; the figure is the median, the ratio the median of
the ratios within a turn. Encoding starts from a new tokenizer each time (nothing in its cache), and
is timed by both clocks: it runs on one core, so the processor's is the one a busy machine disturbs
less.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tiktoken
import tokenizers

from results import machine, table, versions, write_section
from scratchlm.tokenizer import PATTERNS, Tokenizer, train_bpe

SIZE = 11_000_000
VOCAB = 8192
SPECIAL = "<|endoftext|>"


def plain(text: str) -> str:
    return text * max(1, round(SIZE / len(text.encode())))


def varied(text: str) -> str:
    rng = random.Random(0)
    vowels, consonants = "aeiou", "bcdfghklmnprst"

    def respelt(word: str) -> str:
        letters = []
        for letter in word:
            kind = next((k for k in (vowels, consonants) if letter in k), "")
            letters.append(rng.choice(kind) if kind and rng.random() < 0.35 else letter)
        return "".join(letters)

    words = re.findall(r"\w+|\W+", text)
    copies = [text]
    for _ in range(max(1, round(SIZE / len(text.encode()))) - 1):
        copies.append(
            "".join(
                respelt(w) if len(w) > 3 and w.isalpha() and rng.random() < 0.15 else w
                for w in words
            )
        )
    return "".join(copies)


@dataclass
class Times:
    """What one job took, turn by turn, by both clocks."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def add(self, work: Callable[[], object]) -> None:
        """Time one turn."""
        wall, processor = time.perf_counter(), time.process_time()
        work()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)


def ratio(theirs: list[float], ours: list[float]) -> str:
    """Say how many times as long theirs took: the median of the turns."""
    return f"{statistics.median(a / b for a, b in zip(theirs, ours, strict=True)):.2f}×"


def compare(jobs: dict[str, Callable[[], object]], repeat: int) -> dict[str, Times]:
    """Time jobs in turn, so that a busy machine is busy for all of them."""
    times = {name: Times() for name in jobs}
    for _ in range(repeat):
        for name, job in jobs.items():
            times[name].add(job)
    return times


def train_theirs(path: str) -> None:
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train(
        [path], vocab_size=VOCAB, min_frequency=0, show_progress=False, special_tokens=[SPECIAL]
    )


def measure_training(corpora: dict[str, str], repeat: int) -> list[list[str]]:
    rows = []
    for name, text in corpora.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.txt"
            path.write_text(text, encoding="utf-8")
            jobs = {
                "theirs": lambda path=path: train_theirs(str(path)),
                "ours": lambda path=path: train_bpe(path, VOCAB, [SPECIAL]),
            }
            times = compare(jobs, repeat)
        theirs, ours = times["theirs"].wall, times["ours"].wall
        seconds = [f"{statistics.median(each):.2f} s" for each in (theirs, ours)]
        rows.append([name, *seconds, ratio(theirs, ours)])
    return rows


def measure_encoding(corpora: dict[str, str], repeat: int) -> list[list[str]]:
    rows = []
    for name, text in corpora.items():
        megabytes = len(text.encode()) / 1e6
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.txt"
            path.write_text(text, encoding="utf-8")
            vocab, merges = train_bpe(path, VOCAB, [SPECIAL])
            for pattern in ("gpt2", "gpt4"):
                warm = Tokenizer(vocab, merges, [SPECIAL], pattern)
                hf = tokenizers.Tokenizer.from_file(str(warm.save(folder)))
                ranks = {piece: i for i, piece in vocab.items() if i < VOCAB - 1}
                tik = tiktoken.Encoding(
                    "ours",
                    pat_str=PATTERNS[pattern],
                    mergeable_ranks=ranks,
                    special_tokens={SPECIAL: VOCAB - 1},
                )
                assert tik.encode_ordinary(text) == warm.encode(text, allowed_special=())
                cold = [Tokenizer(vocab, merges, [SPECIAL], pattern) for _ in range(repeat)]
                times = compare(
                    {
                        "tiktoken": lambda tik=tik, text=text: tik.encode_ordinary(text),
                        "ours": lambda cold=cold, text=text: cold.pop().encode(text),
                        "warm": lambda warm=warm, text=text: warm.encode_array(text),
                    },
                    repeat,
                )
                part = text[: len(text) // 10]
                hf_times = compare({"hf": lambda hf=hf, part=part: hf.encode(part)}, 1)["hf"]
                speeds = [
                    megabytes / statistics.median(times[who].processor)
                    for who in ("tiktoken", "ours", "warm")
                ]
                tik_times, our_times = times["tiktoken"], times["ours"]
                rows.append(
                    [
                        f"{name}, {pattern}",
                        *(f"{s:.1f}" for s in (megabytes / 10 / hf_times.processor[0], *speeds)),
                        ratio(tik_times.processor, our_times.processor),
                        ratio(tik_times.wall, our_times.wall),
                    ]
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path, help="an English text, such as tinyshakespeare.txt")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    corpora = {"plain": plain(text), "varied": varied(text)}
    words = {name: len(set(re.findall(r"\w+", corpus))) for name, corpus in corpora.items()}
    load = os.getloadavg()[0]
    training = measure_training(corpora, arguments.repeat)
    encoding = measure_encoding(corpora, arguments.repeat)
    sizes = ", ".join(
        f"{name}: {len(corpora[name].encode()) / 1e6:.1f} MB, {count:,} different words"
        for name, count in words.items()
    )
    body = "\n\n".join(
        [
            f"{arguments.text.name} grown to {sizes}. Median of {arguments.repeat} turns; ratio: "
            f"peer's time over ours, the median of the turns. Load of the machine at the "
            f"start: {load:.1f}.",
            f"Training to {VOCAB} tokens (wall time; HF and ours on all cores):",
            table(["text", "HF tokenizers", "ours", "ratio"], training),
            "Encoding (MB per second of processor time, all on one core; HF on the first tenth; "
            "ours as a list, from an empty cache; `encode_array` with a full one):",
            table(
                [
                    "text, pattern",
                    "HF",
                    "tiktoken",
                    "ours",
                    "ours, array, warm",
                    "ours : tiktoken",
                    "by wall time",
                ],
                encoding,
            ),
        ]
    )
    command = f"python bench/tokenizer.py {arguments.text.name}"
    with_ = versions("numpy", "regex", "tokenizers", "tiktoken")
    write_section("Tokenizer, CPU", command, machine(), with_, body)
    print(body)


if __name__ == "__main__":
    main()
