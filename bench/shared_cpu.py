"""Training steps on a CPU that other programs use: beside 0, 1 and 2 busy processes.

    python bench/shared_cpu.py [--rounds 5] [--seconds 1.5] [--batch 4]
    python bench/shared_cpu.py --command [--rounds 3] [--batch 4]      by `scratchlm train`

Columns: the default; torch's own waiting (OpenMP's spin count, set by hand); a spin count of 1,000;
no spinning; one thread. Each has a process of its own, which waits while another is measured; every
round measures every column, one after the other, so that what else the machine does falls on all
alike. Shown: the median of the rounds' mean ms a step, and the default beside the best column of
the row. With --command every measurement is a run of the command line; its first steps, in which
the default sees who else is there, do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

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


STEPS, NOT_COUNTED = 180, 90  # of a run


def prepare(folder: Path) -> None:
    """Write token files that the runs read."""
    text = folder / "text.txt"
    words = (f"{n} is {n % 7} and {n * n % 1009}" for n in range(20_000))
    text.write_text("\n".join(words), encoding="utf-8")
    tokenizer, data = str(folder / "tokenizer"), str(folder / "data")
    for words in (
        ["tokenizer", "train", str(text), "--vocab-size", "1024", "--out", tokenizer],
        ["prepare", str(text), "--tokenizer", tokenizer, "--out", data],
    ):
        command = [sys.executable, "-m", "scratchlm", *words]
        subprocess.run(command, check=True, capture_output=True)


def measure_command(folder: Path, environment: dict[str, str], batch_size: int) -> float:
    """Return the mean seconds of a step of `scratchlm train`, the same model."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        words = ["train", str(folder / "data"), "--out", f"{out}/run", "--steps", str(STEPS)]
        words += ["--device", "cpu", f"train.batch_size={batch_size}", f"train.eval_every={STEPS}"]
        words += ["model.context_length=128", "model.d_model=96", "model.num_layers=2"]
        words += ["model.num_heads=4"]
        command = [sys.executable, "-m", "scratchlm", *words]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        lines = Path(f"{out}/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if "loss" in record]
        seconds = {record["step"]: record["clock"]["seconds"] for record in records}
    return (seconds[STEPS] - seconds[NOT_COUNTED]) / (STEPS - NOT_COUNTED)


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
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_when_asked(args.seconds, args.batch)
        return
    names = {name for settings in COLUMNS.values() for name in settings}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    environments = [{**plain, **settings} for settings in COLUMNS.values()]
    rounds = args.rounds or (3 if args.command else 5)
    if args.command:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            rows = measure_all(
                [partial(measure_command, Path(folder), one, args.batch) for one in environments],
                rounds,
            )
        title, options, door = ", by the command line", "--command", "`scratchlm train`"
    else:
        command = [sys.executable, __file__, "--one"]
        command += ["--seconds", str(args.seconds), "--batch", str(args.batch)]
        columns = [Column(command, environment) for environment in environments]
        rows = measure_all([column.measure for column in columns], rounds)
        for column in columns:
            column.close()
        title, options, door = "", f"--seconds {args.seconds:g}", "`Learner`"
    write_section(
        f"Training on a CPU that others use{title}",
        f"python bench/shared_cpu.py {options} --rounds {rounds}",
        machine(),
        versions("torch"),
        f"ms a step of a model of 418,272 parameters, {args.batch} × 128 tokens, by {door}, "
        f"beside other processes that are always busy; median of {rounds} rounds.\n\n"
        + table(("busy processes", *COLUMNS, "default : best"), rows),
    )


def measure_all(columns: list[Callable[[], float]], rounds: int) -> list[tuple[object, ...]]:
    """Return the rows of the table: every column in every round, one after the other."""
    rows: list[tuple[object, ...]] = []
    for others in (0, 1, 2):
        found: list[list[float]] = [[] for _ in columns]
        with busy_processes(others):
            for _ in range(rounds):
                for measure, times in zip(columns, found, strict=True):
                    times.append(measure())
        medians = [statistics.median(times) * 1e3 for times in found]
        ratio = f"**{medians[0] / min(medians):.2f}**"
        rows.append((others, *(f"{value:.1f}" for value in medians), ratio))
        print(*rows[-1], sep="  ", flush=True)
    return rows


if __name__ == "__main__":
    main()
