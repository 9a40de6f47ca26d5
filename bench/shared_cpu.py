"""Training steps on a CPU that other programs use: beside 0, 1 and 2 busy processes.

    python bench/shared_cpu.py [--rounds 3] [--seconds 4] [--batch 4]

Columns: the default; torch's own waiting (OpenMP's spin count, set by hand); a spin count of 1,000;
no spinning; one thread. Every round measures every column in a process of its own, one after the
other, so that what else the machine does falls on all alike. Shown: the median of the rounds' mean
ms a step, and the default beside the best column of the row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from results import machine, table, versions, write_section

COLUMNS = {
    "default": {},
    "torch's own": {"GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "no spinning": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def measure(seconds: float, batch_size: int) -> float:
    """Return the mean seconds of a step of a model of 418,272 parameters."""
    import torch

    from scratchlm import ModelConfig
    from scratchlm.data import Batch
    from scratchlm.training import Learner, TrainConfig, build_model, take_step

    model = build_model(ModelConfig(1024, 128, d_model=96, num_layers=2, num_heads=4), 0, "cpu")
    learner = Learner(model, TrainConfig(steps=1_000_000, batch_size=batch_size))
    ids = torch.randint(1024, (batch_size, 129), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    step, warm = 0, time.perf_counter() + 1.0
    while step < 3 or time.perf_counter() < warm:
        step += 1
        take_step(learner, batch, step, 1e-3)
    first, began = step, time.perf_counter()
    while step < first + 3 or time.perf_counter() - began < seconds:
        step += 1
        take_step(learner, batch, step, 1e-3)
    return (time.perf_counter() - began) / (step - first)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    until_we_end = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    loop = [sys.executable, "-c", until_we_end]
    others = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.seconds, args.batch)))
        return
    names = {name for settings in COLUMNS.values() for name in settings}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, __file__, "--one"]
    command += ["--seconds", str(args.seconds), "--batch", str(args.batch)]
    rows = []
    for others in (0, 1, 2):
        found: dict[str, list[float]] = {column: [] for column in COLUMNS}
        with busy_processes(others):
            for _ in range(args.rounds):
                for column, settings in COLUMNS.items():
                    done = subprocess.run(
                        command, env={**plain, **settings}, capture_output=True, check=True
                    )
                    found[column].append(json.loads(done.stdout))
        medians = [statistics.median(times) * 1e3 for times in found.values()]
        ratio = f"**{medians[0] / min(medians):.2f}**"
        rows.append((others, *(f"{value:.1f}" for value in medians), ratio))
        print(*rows[-1], sep="  ", flush=True)
    write_section(
        "Training on a CPU that others use",
        f"python bench/shared_cpu.py --rounds {args.rounds}",
        machine(),
        versions("torch"),
        f"ms a step of a model of 418,272 parameters, {args.batch} × 128 tokens, by `Learner`, "
        f"beside other processes that are always busy; median of {args.rounds} rounds.\n\n"
        + table(("busy processes", *COLUMNS, "default : best"), rows),
    )


if __name__ == "__main__":
    main()
