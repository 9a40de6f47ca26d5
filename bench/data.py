"""Data loading on the CPU: our batches beside a memory-mapped random-crop loader.

The peer is the loader most small training scripts use: np.memmap, random starts, a slice and a
conversion per row, a stack. It promises less (no epochs, no repeatable order, and a truncated
file kills the process); the question is what our promises cost.

Run as `python bench/data.py`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import results
from scratchlm.data import Batches, TokenFile, write_token_file
from scratchlm.data.batches import Batch

TOKENS = 100_000_000
SHAPES = [(12, 64), (64, 256), (32, 1024), (8, 8192)]
ROUNDS, SECONDS = 7, 0.4
STEP_SECONDS = 0.010  # a training step that reading ahead can hide behind


def crops(data: np.ndarray, batch_size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - context, (batch_size,))
    x = [torch.from_numpy(data[i : i + context].astype(np.int64)) for i in starts]
    y = [torch.from_numpy(data[i + 1 : i + 1 + context].astype(np.int64)) for i in starts]
    return torch.stack(x), torch.stack(y)


def mapped(path: Path) -> np.ndarray:
    return np.memmap(path, dtype=np.uint16, mode="r")


def in_order(batches: Batches) -> Callable[[], Batch]:
    step = 0

    def batch() -> Batch:
        nonlocal step
        step += 1
        return batches.batch(step)

    return batch


def tokens_per_second(make: Callable[[], object], tokens: int) -> float:
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < SECONDS:
        make()
        count += 1
    return count * tokens / passed


def waiting(make: Callable[[], object]) -> float:
    """Seconds a step waits for its batch when the step itself takes STEP_SECONDS elsewhere."""
    waits = []
    for _ in range(60):
        time.sleep(STEP_SECONDS)  # the accelerator works, the CPU is free
        start = time.perf_counter()
        make()
        waits.append(time.perf_counter() - start)
    return statistics.median(waits[5:])


def compare(tokens: TokenFile, batch_size: int, context: int) -> list[object]:
    ours = Batches(tokens, context, batch_size, seed=1)
    isolated = Batches(tokens, context, batch_size, seed=1, document_ids=True)
    ahead, once = ours.iterate(), mapped(tokens.path)
    makers: dict[str, Callable[[], object]] = {
        "crops": lambda: crops(mapped(tokens.path), batch_size, context),
        "mapped": lambda: crops(once, batch_size, context),
        "ours": in_order(ours),
        "ahead": lambda: next(ahead),
        "documents": in_order(isolated),
    }
    rates: dict[str, list[float]] = {name: [] for name in makers}
    for make in makers.values():
        make()
    for _ in range(ROUNDS):  # interleaved: the machine's moods fall on all alike
        for name, make in makers.items():
            rates[name].append(tokens_per_second(make, batch_size * context))
    best = {name: statistics.median(values) for name, values in rates.items()}
    waits = [waiting(makers["mapped"]), waiting(makers["ahead"])]
    ahead.close()  # type: ignore[attr-defined]
    return [
        f"{batch_size} × {context}",
        *(f"{best[name] / 1e6:.1f}" for name in makers),
        f"**{best['ours'] / best['mapped']:.2f}**",
        f"{waits[0] * 1e6:.0f} / {waits[1] * 1e6:.0f}",
    ]


def one_window(tokens: TokenFile, context: int) -> tuple[float, float]:
    """Seconds to copy one random window: by pread, and out of a memory map."""
    starts = np.random.default_rng(1).integers(0, len(tokens) - context, 4000).tolist()
    out, data = np.empty(context, dtype=np.uint16), mapped(tokens.path)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for start in starts:
            tokens.read_into(start, out)
        between = time.perf_counter()
        for start in starts:
            out[:] = data[start : start + context]
        times[0].append(between - begin)
        times[1].append(time.perf_counter() - between)
    pread, memory_map = (statistics.median(found) / len(starts) for found in times)
    return pread, memory_map


def validation_rate(tokens: TokenFile) -> float:
    start = time.perf_counter()
    tokens.validate()
    return len(tokens) * 2 / (time.perf_counter() - start)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ids = np.random.default_rng(0).integers(0, 50_257, TOKENS, dtype=np.uint16)
        path = Path(folder) / "tokens"
        write_token_file(path, ids, vocab_size=50_257, tokenizer="bench", end_of_text=50_256)
        assert zlib.crc32(ids.data)  # keep the pages warm for everybody
        with TokenFile(path) as tokens:
            rows = [compare(tokens, *shape) for shape in SHAPES]
            pread, memory_map = one_window(tokens, 1025)
            checked = validation_rate(tokens)
    header = ["batch", "crops", "crops, mapped once", "ours", "ours, read ahead"]
    header += ["ours, document ids", "ours ÷ crops mapped once", "wait per step, crops / ours (µs)"]
    body = (
        f"Million tokens/s, median of {ROUNDS} interleaved rounds; {TOKENS / 1e6:.0f} M ids of "
        "uint16 in the page cache, one torch thread. Crops: np.memmap and random starts, opened "
        "for every batch as nanoGPT does, or mapped once. The last column is how long a step "
        f"waits for its batch when it spends {STEP_SECONDS * 1e3:.0f} ms elsewhere.\n\n"
        + results.table(header, rows)
        + f"\n\nOne window of 1,025 ids: {pread * 1e6:.1f} µs by pread, {memory_map * 1e6:.1f} µs "
        "out of a memory map, which turns a truncated file into SIGBUS."
        + f"\n\nFull validation of a token file (ids and CRC-32): {checked / 1e9:.2f} GB/s."
    )
    results.write_section(
        "Data loading, CPU",
        "python bench/data.py",
        results.machine(),
        results.versions("numpy", "torch"),
        body,
    )
    print(body)


if __name__ == "__main__":
    main()
