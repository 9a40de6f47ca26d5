"""Training steps on a CPU that other programs use: beside 0, 1 and 2 busy processes.

    python bench/shared_cpu.py [--rounds 5] [--seconds 1.5] [--batch 4]

Columns: the default; torch's own waiting (OpenMP's spin count, set by hand); a spin count of 1,000;
no spinning; one thread. Each has a process of its own, which waits while another is measured; every
round measures every column, one after the other, so that what else the machine does falls on all
alike. Shown: the median of the rounds' mean ms a step, and the default beside the best column of
the row.
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


def measure_when_asked(seconds: float, batch_size: int) -> None:
    """Print, for every line that comes in, the mean seconds of a step of 418,272 parameters."""
    import torch

    from scratchlm import ModelConfig
    from scratchlm.data import Batch
    from scratchlm.training import Learner, TrainConfig, build_model, take_step

    model = build_model(ModelConfig(1024, 128, d_model=96, num_layers=2, num_heads=4), 0, "cpu")
    learner = Learner(model, TrainConfig(steps=1_000_000, batch_size=batch_size))
    ids = torch.randint(1024, (batch_size, 129), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    step = 0

    def mean_seconds(seconds: float) -> float:
        nonlocal step
        first, began = step, time.perf_counter()
        while step < first + 3 or time.perf_counter() - began < seconds:
            step += 1
            take_step(learner, batch, step, 1e-3)
        return (time.perf_counter() - began) / (step - first)

    for _ in sys.stdin:
        mean_seconds(1.5)  # the default takes a second to see that it is alone again
        print(json.dumps(mean_seconds(seconds)), flush=True)


class Column:
    """A process with a setting."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self) -> float:
        """Return the mean seconds of a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_when_asked(args.seconds, args.batch)
        return
    names = {name for settings in COLUMNS.values() for name in settings}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, __file__, "--one"]
    command += ["--seconds", str(args.seconds), "--batch", str(args.batch)]
    columns = [Column(command, {**plain, **settings}) for settings in COLUMNS.values()]
    rows = []
    for others in (0, 1, 2):
        found: list[list[float]] = [[] for _ in columns]
        with busy_processes(others):
            for _ in range(args.rounds):
                for column, times in zip(columns, found, strict=True):
                    times.append(column.measure())
        medians = [statistics.median(times) * 1e3 for times in found]
        ratio = f"**{medians[0] / min(medians):.2f}**"
        rows.append((others, *(f"{value:.1f}" for value in medians), ratio))
        print(*rows[-1], sep="  ", flush=True)
    for column in columns:
        column.close()
    write_section(
        "Training on a CPU that others use",
        f"python bench/shared_cpu.py --rounds {args.rounds} --seconds {args.seconds:g}",
        machine(),
        versions("torch"),
        f"ms a step of a model of 418,272 parameters, {args.batch} × 128 tokens, by `Learner`, "
        f"beside other processes that are always busy; median of {args.rounds} rounds.\n\n"
        + table(("busy processes", *COLUMNS, "default : best"), rows),
    )


if __name__ == "__main__":
    main()
