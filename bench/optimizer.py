"""AdamW's update on a GPU: our kernel beside torch's fused one, as a share of a copy's bandwidth.

    python bench/optimizer.py
    python bench/optimizer.py --only medium --tune      other tilings of the kernel, best first

Parameters and gradients of a model's shapes, float32. An update moves 28 bytes a parameter: θ, m
and v read and written, g read. Clipping scales the gradients by a number on the device: torch's
way writes them once more, ours multiplies as it reads. Everybody in turn, again and again; times
are the device's, from events, behind a pause that lets the host run ahead; "host" is how long the
call takes to return.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch

from results import table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate.kernels.triton.adamw import Tiling
from scratchlm.training.kernel_adamw import KernelAdamW
from train_gpu import SHAPES

BYTES = 28
PAUSE = 20_000_000  # cycles: about 10 ms
COPIED = 1 << 28  # numbers
Work = Callable[[], object]
Times = dict[str, tuple[float, float]]  # who -> seconds of the device, seconds of the host


def in_turn(contestants: dict[str, Work], repeats: int) -> Times:
    """Return the medians of all, taken in turn."""
    for work in contestants.values():
        work()  # what is compiled or laid out on first use
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event, float]]] = {}
    for _ in range(repeats):
        for name, work in contestants.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(PAUSE)
            begin.record()
            called = time.perf_counter()
            work()
            host = time.perf_counter() - called
            end.record()
            spans.setdefault(name, []).append((begin, end, host))
    torch.cuda.synchronize()
    return {
        name: (
            statistics.median(begin.elapsed_time(end) for begin, end, _ in found) / 1e3,
            statistics.median(host for _, _, host in found),
        )
        for name, found in spans.items()
    }


def parameters_of(config: ModelConfig) -> list[torch.nn.Parameter]:
    """Make parameters of a model's shapes, with gradients."""
    made = []
    for like in TransformerLM(config, device="meta").parameters():
        p = torch.nn.Parameter(torch.randn(like.shape, device="cuda"))
        p.grad = torch.randn_like(p)
        made.append(p)
    return made


def groups_of(params: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def copying() -> Work:
    source = torch.randn(COPIED, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def compare(params: list[torch.nn.Parameter], repeats: int) -> Times:
    """Time ours, torch's, both with clipping, and a copy."""
    ours = KernelAdamW(groups_of(params), lr=1e-5)
    fused = torch.optim.AdamW(groups_of(params), lr=1e-5, fused=True)
    factor = torch.tensor(1.0, device="cuda")
    gradients = [p.grad for p in params if p.grad is not None]

    def scale_then_step() -> None:
        torch._foreach_mul_(gradients, factor)
        fused.step()

    return in_turn(
        {
            "copy": copying(),
            "torch fused": fused.step,
            "ours": ours.step,
            "torch fused, clipped": scale_then_step,
            "ours, clipped": lambda: ours.step(scale=factor),
        },
        repeats,
    )


def tilings() -> Iterator[Tiling]:
    for (block, warps), rounds, hint in product(
        [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16)],
        [1, 2, 4, 8],
        ["", "evict_first"],
    ):
        yield Tiling(block, rounds, warps, hint)


def tune(params: list[torch.nn.Parameter], repeats: int) -> None:
    """Print the kernel's time for every tiling, best first."""

    def with_tiling(tiling: Tiling) -> Work:
        optimizer = KernelAdamW(groups_of(params), lr=1e-5)
        optimizer.tiling, optimizer.state = tiling, state
        return optimizer.step

    first = KernelAdamW(groups_of(params), lr=1e-5)
    first.step()
    state = first.state  # one for all: what it holds does not matter here
    times = in_turn({str(tuple(t)): with_tiling(t) for t in tilings()}, repeats)
    for name, (device, _) in sorted(times.items(), key=lambda item: item[1]):
        print(f"  {name}: {device * 1e3:.3f} ms", flush=True)


def rows_of(shape: str, count: int, times: Times) -> list[list[str]]:
    speed = 8 * COPIED / times["copy"][0]
    rows = []
    for name, (device, host) in times.items():
        rate = BYTES * count / device
        if name != "copy":
            rows.append(
                [
                    f"{shape}, {count / 1e6:,.0f} M",
                    name,
                    f"{device * 1e3:.3f}",
                    f"{rate / 1e12:.2f}",
                    f"{rate / speed:.3f}",
                    f"{host * 1e3:.2f}",
                ]
            )
    return rows


def report(rows: list[list[str]], copies: list[float], repeats: int) -> None:
    header = ["shape", "who", "ms", "TB/s", "share of a copy", "host, ms"]
    body = table(header, rows) + (
        f"\n\nTB/s: 28 bytes a parameter. A copy of {4 * COPIED / 2**30:.0f} GiB, measured in turn "
        f"with them: {statistics.median(copies) / 1e12:.2f} TB/s. Medians of {repeats}."
    )
    print(body)
    write_section(
        "AdamW on a GPU",
        "python bench/optimizer.py",
        torch.cuda.get_device_name(),
        versions("torch", "triton"),
        body,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = ["medium", "gpt2-xl", "gpt2"]
    parser.add_argument("--only", nargs="*", default=known, choices=known)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="time the kernel's tilings instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a CUDA device")
    rows: list[list[str]] = []
    copies = []
    for name in options.only:
        params = parameters_of(SHAPES[name].config)
        count = sum(p.numel() for p in params)
        print(f"{name}: {count / 1e6:,.1f} M parameters in {len(params)} tensors", flush=True)
        if options.tune:
            tune(params, options.repeats)
        else:
            times = compare(params, options.repeats)
            copies.append(8 * COPIED / times["copy"][0])
            rows += rows_of(name, count, times)
        del params
        torch.cuda.empty_cache()
    if rows:
        report(rows, copies, options.repeats)


if __name__ == "__main__":
    main()
