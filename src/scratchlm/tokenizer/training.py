"""Train byte-level BPE on files: count their words in bounded memory, then learn merges.

Ids: 0 to 255 are the bytes, then come the merges in order, then the special tokens. `vocab_size`
counts all of them.

Files are read a piece at a time and cut at special tokens, or where cutting cannot change a word;
the pieces are counted by a few threads (the array operations release the GIL).
Memory grows with the number of distinct words, not with the files.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from scratchlm.tokenizer.learning import learn_merges
from scratchlm.tokenizer.naive import MAX_WORD
from scratchlm.tokenizer.patterns import compile_pattern, pattern_name
from scratchlm.tokenizer.splitting import RULES, SEPARATOR_BYTE, last_cut
from scratchlm.tokenizer.streaming import settled_parts
from scratchlm.tokenizer.vocabulary import MAX_ID, check_special_tokens
from scratchlm.tokenizer.words import WordIndex, split_bytes
from scratchlm.untrusted import BOM

# Arguments of a progress callback: the stage ("count": bytes, "merge": merges), done, of how many
# (0: not known).
Progress = Callable[[str, int, int], None]
Files = str | Path | Sequence[str | Path]

READ = 1 << 18  # bytes read, and characters counted, at a time
STDIN = "-"


def train_bpe(
    files: Files,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    pattern: str = "gpt2",
    *,
    progress: Progress | None = None,
    threads: int | None = None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Learn a vocabulary and merges from one file or several; `-` is standard input.

    Returns fewer than `vocab_size` tokens when the text has no pair left to merge.
    """
    specials = check_special_tokens(special_tokens)
    check_vocab_size(vocab_size, len(specials))
    compile_pattern(pattern)
    words, counts = count_words(files, specials, pattern, progress=progress, threads=threads)

    def merged(done: int, total: int) -> None:
        if progress is not None:
            progress("merge", done, total)

    merges = learn_merges(words, counts, vocab_size - 256 - len(specials), merged)
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [left + right for left, right in merges]
    tokens += [token.encode("utf-8") for token in specials]
    return dict(enumerate(tokens)), merges


def check_vocab_size(vocab_size: int, specials: int) -> None:
    """Refuse a vocabulary that cannot hold the bytes and the special tokens."""
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise TypeError(f"vocab_size must be an integer; got {vocab_size!r}")
    if not 256 + specials <= vocab_size <= MAX_ID + 1:
        raise ValueError(
            f"vocab_size must be from {256 + specials} (256 bytes and {specials} special tokens) "
            f"to {MAX_ID + 1}; got {vocab_size}"
        )


def count_words(
    files: Files,
    special_tokens: Sequence[str] = (),
    pattern: str = "gpt2",
    *,
    progress: Progress | None = None,
    threads: int | None = None,
) -> tuple[list[bytes], np.ndarray]:
    """Count the words between the special tokens of files: the different ones, and how often."""
    pattern = pattern_name(pattern) or pattern
    specials = frozenset(special_tokens)
    cut = last_cut if pattern in RULES else (lambda text, low, high: low)
    workers = threads or min(4, os.cpu_count() or 1)
    counters = [_Counter(pattern) for _ in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        waiting: list[Future[None] | None] = [None] * workers
        turn = 0
        for texts in _batches(_texts(files, specials, cut, progress)):
            busy = waiting[turn]
            if busy is not None:
                busy.result()  # at most one piece waits per worker, so memory stays bounded
            waiting[turn] = pool.submit(counters[turn].add, texts)
            turn = (turn + 1) % workers
        for future in waiting:
            if future is not None:
                future.result()
    return _joined(counters)


class _Counter:
    """Counts of the words one worker has seen."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.index = WordIndex()
        self.counts = np.zeros(0, dtype=np.int64)

    def add(self, texts: list[str]) -> None:
        data, borders = split_bytes(texts, self.pattern)
        borders = cut_long_words(borders)
        numbers = self.index.numbers(data, borders)
        counted = np.bincount(numbers, minlength=len(self.index)).astype(np.int64)
        counted[: len(self.counts)] += self.counts
        self.counts = counted


def cut_long_words(borders: np.ndarray) -> np.ndarray:
    """Add borders within words of more than MAX_WORD bytes, at its multiples."""
    lengths = np.diff(borders)
    long = np.flatnonzero(lengths > MAX_WORD)
    if not len(long):
        return borders
    inner = [
        np.arange(borders[i] + MAX_WORD, borders[i + 1], MAX_WORD, dtype=borders.dtype)
        for i in long.tolist()
    ]
    return np.sort(np.concatenate([borders, *inner]))


def _joined(counters: list[_Counter]) -> tuple[list[bytes], np.ndarray]:
    separator = bytes([SEPARATOR_BYTE])
    total: dict[bytes, int] = {}
    for counter in counters:
        for word, count in zip(counter.index.words, counter.counts.tolist(), strict=True):
            total[word] = total.get(word, 0) + count
    total.pop(separator, None)
    return list(total), np.fromiter(total.values(), dtype=np.int64, count=len(total))


def _texts(
    files: Files,
    specials: frozenset[str],
    cut: Callable[[str, int, int], int],
    progress: Progress | None,
) -> Iterator[str]:
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise ValueError("training needs at least one file")
    known = [os.path.getsize(path) for path in paths if str(path) != STDIN]
    total = sum(known) if len(known) == len(paths) else 0
    done = 0

    def on_read(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress("count", done, total)

    for path in paths:
        for parts in settled_parts(read_text(path, on_read), specials, cut, READ):
            yield from parts[::2]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if text:
            batch.append(text)
            size += len(text) + 1
        if size >= READ:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_text(path: str | Path, on_read: Callable[[int], None] | None = None) -> Iterator[str]:
    """Read a UTF-8 file, or standard input for `-`, in pieces; line ends stay as they are.

    A byte order mark before the text is dropped.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, begins = 0, True
    from_stdin = str(path) == STDIN
    file = sys.stdin.buffer if from_stdin else open(path, "rb")  # noqa: SIM115 closed below
    try:
        while data := file.read(READ):
            text = _decoded(decoder, data, False, path, offset)
            if begins and text:
                begins, text = False, text.removeprefix(BOM)
            yield text
            offset += len(data)
            if on_read is not None:
                on_read(len(data))
        yield _decoded(decoder, b"", True, path, offset)
    finally:
        if not from_stdin:
            file.close()


def _decoded(
    decoder: codecs.IncrementalDecoder, data: bytes, final: bool, path: str | Path, offset: int
) -> str:
    held = len(decoder.getstate()[0])
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text (byte {offset - held + error.start}: {error.reason})"
        ) from None
