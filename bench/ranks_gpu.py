"""Ranks on one GPU: one of eight alone, whose collectives are copies; and two that share it.

Memory and time of one rank are real, what it would wait for the others is not: its gradients are
its own, and the weights it gathers are its own part again. Every case runs in a process of its own.
Writes the section "Several ranks on one GPU" of bench/RESULTS.md.

    python bench/ranks_gpu.py
    python bench/ranks_gpu.py --device cpu --tiny     whether it runs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from results import table, versions, write_section

GPUS, GIB = 8, 2**30
# name -> settings of the training run
KINDS: dict[str, dict[str, Any]] = {
    "one GPU": {},
    "one GPU, neither compiled nor recorded": {"compile": "off", "cuda_graph": False},
    "zero1": {"parallel": "zero1"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp, compiled": {"parallel": "fsdp", "compile": "block"},
    "fsdp × tp 2": {"parallel": "fsdp", "tp": 2},
}
MARKS = "memory within 5 % of the account; the step at most 3 % slower than one GPU's"


class Copied:
    """A collective that has happened; like NCCL's it keeps its input until somebody waits."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source: torch.Tensor | None = source

    def wait(self) -> None:
        """Let go of the input."""
        self.source = None


def gather_own(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: Any = False):  # type: ignore[no-untyped-def]
    parts = output_tensor.view(dist.get_world_size(group), -1)
    if parts.data_ptr() != input_tensor.data_ptr():  # FSDP's lies in its place already
        parts[0].copy_(input_tensor.view(-1))
    parts[1:].copy_(parts[:1])
    return Copied(input_tensor) if async_op else None


def scatter_own(output: Any, input: Any, op: Any = None, group: Any = None, async_op: Any = False):  # type: ignore[no-untyped-def]
    output.view(-1).copy_(input.view(dist.get_world_size(group), -1)[0])
    return Copied(input) if async_op else None


def first_of_many(device: str, tensor: int) -> Any:
    """Return rank 0 of GPUS; other modules must not have bound torch's collectives yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for names, own in (
        (("all_gather_single", "all_gather_into_tensor"), gather_own),
        (("reduce_scatter_single", "reduce_scatter_tensor"), scatter_own),
    ):
        for name in names:
            if name in vars(dist):
                setattr(dist, name, own)
    from scratchlm.parallel.ranks import Ranks

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    mesh = dist.init_device_mesh(
        device, (GPUS // tensor, tensor), mesh_dim_names=("data", "tensor")
    )
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return Ranks(0, GPUS, where, mesh, dist.group.WORLD, dist.HashStore(), 1.0, GPUS)


def shape_of(name: str, tiny: bool) -> Any:
    from scratchlm import ModelConfig
    from train_gpu import SHAPES

    shape = SHAPES[name]
    small = ModelConfig(512, 32, 64, 2, 4, 128)
    return replace(shape, config=small, batch=2, seq=32) if tiny else shape


def measure(name: str, kind: str, device: str, tiny: bool, repeats: int) -> dict[str, Any]:
    """Take training steps as one rank; return its peak and its median seconds."""
    given = KINDS[kind]
    ranks = first_of_many(device, given.get("tp", 1)) if "parallel" in given else None
    from scratchlm.accounting import Setup
    from scratchlm.accounting.fits import peak_bytes
    from scratchlm.accounting.verify import on_this_gpu
    from scratchlm.data import Batch
    from scratchlm.training import Learner, TrainConfig, build_model, take_step

    shape, on_gpu = shape_of(name, tiny), device == "cuda"
    rows = shape.batch * (1 if ranks is None else ranks.data_size)
    settings = TrainConfig(batch_size=rows, micro_batch_size=shape.batch, **given)
    learner = Learner(build_model(shape.config, 0, device), settings, ranks=ranks)
    ids = torch.randint(shape.config.vocab_size, (shape.batch, shape.seq + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batch = Batch(inputs.pin_memory(), targets.pin_memory()) if on_gpu else Batch(inputs, targets)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun, losses = [], []
    for step in range(1, repeats + 7):
        begun.append(time.perf_counter())  # a step waits for the device once
        losses.append(take_step(learner, batch, step, 1e-5).loss)
    times = [after - before for before, after in pairwise(begun[5:])]
    setup = Setup(phase="training", batch=shape.batch, context=shape.seq)
    if ranks is not None:
        setup = replace(setup, gpus=GPUS, parallel=settings.parallel, tp=settings.tp)
    return {
        "seconds": statistics.median(times),
        "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "predicted": peak_bytes(shape.config, on_this_gpu(shape.config, setup)),
        "losses": [losses[0], losses[-1]],
    }


def run(words: list[str]) -> str:
    """Run Python; return what it says, or why it failed on a line of its own."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    made = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    if made.returncode:
        print(made.stdout[-2000:], made.stderr[-4000:], file=sys.stderr, flush=True)
        raise RuntimeError((made.stderr.strip().splitlines() or ["?"])[-1][:120])
    return made.stdout


def two_ranks(
    device: str, tiny: bool, settings: list[str]
) -> tuple[float, list[float], list[float]]:
    """Train with two processes over gloo, and with one; return the largest difference."""
    from scratchlm.data import write_token_file

    with tempfile.TemporaryDirectory() as folder:
        ids = (np.arange(200_000) * 3 + np.random.default_rng(0).integers(0, 7, 200_000)) % 512
        write_token_file(Path(folder) / "train", ids, vocab_size=512, tokenizer="t")
        model = "model.d_model=256 model.num_layers=4 model.num_heads=4 model.context_length=256"
        common = [*model.split(), "train.steps=20", "train.batch_size=8", "train.eval_every=0"]
        common += ["model.d_model=32", "model.context_length=32"] if tiny else []
        common = ["train", f"{folder}/train.bin", "--device", device, *common]
        launch = ["--gpus", "2"]
        start = ["-m", "scratchlm"]
        if device == "cpu":
            start, launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", *start], []
        two = ["train.backend=gloo", *settings, *launch]
        one = [w for w in settings if "parallel" not in w] + ["train.micro_batch_size=4"]
        run([*start, *common, "--out", f"{folder}/two", *two])
        run(["-m", "scratchlm", *common, "--out", f"{folder}/one", *one])
        curves = []
        for name in ("one", "two"):
            lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
            curves.append([r["loss"] for r in map(json.loads, lines) if "loss" in r])
    largest = max(abs(a - b) for a, b in zip(*curves, strict=True))
    return largest, curves[0], curves[1]


def row_of(name: str, kind: str, found: dict[str, Any], alone: dict[str, Any] | None) -> list[str]:
    error = f"{found['predicted'] / found['peak'] - 1:+.1%}" if found["peak"] else ""
    beside = (
        f"{found['seconds'] / alone['seconds'] - 1:+.1%}" if alone and found is not alone else ""
    )
    sizes = [f"{found[key] / GIB:.2f}" for key in ("predicted", "peak", "reserved")]
    return [name, kind, *sizes, error, f"{found['seconds'] * 1e3:.1f}", beside]


def report(rows: list[list[str]], shared: list[list[str]], where: str) -> None:
    header = ["shape", "rank", "account, GiB", "peak, GiB", "reserved, GiB", "error"]
    one = table([*header, "step, ms", "beside one GPU"], rows)
    two = table(["two ranks over gloo", "first loss", "last loss", "largest difference"], shared)
    body = f"""One rank of {GPUS} on one GPU, at the batch one GPU has; its collectives are copies
within the GPU, so nothing here is a speed of several. Marks: {MARKS}. All settings are the defaults
where nothing is said. Peak: `torch.cuda.max_memory_allocated`; medians of steps.

{one}

Two processes share the GPU, 20 steps; one process takes the same rows in two micro-batches.

{two}
"""
    command = "python bench/ranks_gpu.py"
    print(one, two, sep="\n\n", flush=True)
    write_section("Several ranks on one GPU", command, where, versions("torch", "triton"), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model; nothing is written")
    parser.add_argument("--shapes", nargs="*", default=["medium", "llama3.2-1b"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--one", nargs=2, metavar=("SHAPE", "KIND"))
    options = parser.parse_args()
    given = (options.device, options.tiny, options.repeats)
    if options.one:
        print(json.dumps(measure(*options.one, *given)))
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    rows: list[list[str]] = []
    shared: list[list[str]] = []

    def note() -> None:
        if options.tiny:
            print(rows[-1:], shared[-1:], flush=True)
        else:
            report(rows, shared, where)

    more = ["--device", options.device, "--repeats", str(options.repeats)]
    more += ["--tiny"] if options.tiny else []
    for settings in (["train.precision=fp32"], [], ["train.precision=fp32", "train.parallel=fsdp"]):
        said = " ".join(settings) or "defaults"
        try:
            largest, one, two = two_ranks(*given[:2], settings)
            shared.append([said, f"{one[0]:.4f}", f"{two[-1]:.4f}", f"{largest:.1e}"])
        except RuntimeError as error:
            shared.append([said, "failed", str(error), ""])
        note()
    for name in options.shapes:
        alone: dict[str, Any] | None = None
        for kind in options.kinds:
            try:
                found = json.loads(run([__file__, *more, "--one", name, kind]).splitlines()[-1])
            except RuntimeError as error:
                rows.append([name, kind, "failed", str(error), "", "", "", ""])
            else:
                alone = alone or (found if kind == "one GPU" else None)
                rows.append(row_of(name, kind, found, alone))
            note()


if __name__ == "__main__":
    main()
