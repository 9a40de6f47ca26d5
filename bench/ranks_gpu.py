"""One rank of eight on one GPU: its memory beside the account's, its step beside one GPU's.

A fake process group stands for the other seven. Collectives are copies within the GPU: gradients
are this rank's own, and the weights it gathers are random numbers. So memory and arithmetic are
real, and what a rank would wait for the others is not there. One process: one GPU's learner stays,
each rank is made beside it, and blocks of their steps take turns. A row is printed and written to
bench/RESULTS.md ("Several ranks on one GPU") as soon as it is known.

    python bench/ranks_gpu.py
    python bench/ranks_gpu.py --gloo                  two real ranks that share the GPU, beside one
    python bench/ranks_gpu.py --device cpu --tiny     whether it runs; nothing is written
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from results import table, versions, write_section

GPUS, GIB = 8, 2**30
WARMUP, BLOCK = 6, 4  # steps before timing, which compile and record; steps timed at a time
# name -> settings of the training run
KINDS: dict[str, dict[str, Any]] = {
    "one GPU, neither compiled nor recorded": {"compile": "off", "cuda_graph": False},
    "zero1": {"parallel": "zero1"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp × tp 2": {"parallel": "fsdp", "tp": 2},
    "fsdp, compiled": {"parallel": "fsdp", "compile": "block"},  # last: it compiles for long
}
HEADER = [
    "shape",
    "rank",
    "account, GiB",
    "peak, GiB",
    "error",
    "step, ms",
    "one GPU's, ms",
    "ratio",
]
BODY = """One rank of {gpus} at the batch one GPU has ({shapes}); its collectives are copies
within the GPU, so nothing here is a speed of several. Marks: memory within 5 % of the account; the
step of zero1, the default, at most 3 % slower than one GPU's. fsdp is launched layer by layer and
waits for the host where layers are small; a rank of tp 2 does half of its products. All settings
are the defaults where nothing is said. Peak: by torch's allocator, less what was there before the
rank; medians of {blocks} blocks of {block} steps, taken in turns.

{rows}
"""


class Copied:
    """A collective that has happened; like NCCL's it keeps its input until somebody waits."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source: torch.Tensor | None = source

    def wait(self) -> None:
        """Let go of the input."""
        self.source = None


SPARE: dict[torch.dtype, torch.Tensor] = {}  # random numbers, to be gathered


def draw_spare(device: torch.device, size: int) -> None:
    """Have them before any rank is measured."""
    for dtype in (torch.bfloat16, torch.float32):
        SPARE[dtype] = torch.randn(size, dtype=dtype, device=device) * 0.02


def gather_random(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
) -> Copied | None:
    parts = output_tensor.view(dist.get_world_size(group), -1)
    if parts.data_ptr() != input_tensor.data_ptr():  # FSDP's lies in its place already
        parts[0].copy_(input_tensor.view(-1))
    spare = SPARE[parts.dtype]  # a rank's padding is anything, so not its own part once more
    for piece in parts[1:].reshape(-1).split(len(spare)):
        piece.copy_(spare[: len(piece)])
    return Copied(input_tensor) if async_op else None


def scatter_own(
    output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False
) -> Copied | None:
    output.view(-1).copy_(input.view(dist.get_world_size(group), -1)[0])
    return Copied(input) if async_op else None


def copy_instead_of_sending() -> None:
    """Replace torch's collectives; call it before a module of ours binds them."""
    for names, own in (
        (("all_gather_single", "all_gather_into_tensor"), gather_random),
        (("reduce_scatter_single", "reduce_scatter_tensor"), scatter_own),
    ):
        for name in names:
            if name in vars(dist):
                setattr(dist, name, own)


@contextmanager
def first_of_many(device: torch.device, tensor: int) -> Iterator[Any]:
    """Be rank 0 of GPUS."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from scratchlm.parallel.ranks import Ranks

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    try:
        grid = (GPUS // tensor, tensor)
        mesh = init_device_mesh(device.type, grid, mesh_dim_names=("data", "tensor"))
        yield Ranks(0, GPUS, device, mesh, dist.group.WORLD, dist.HashStore(), 1.0, GPUS)
    finally:
        dist.destroy_process_group()


class Stepper:
    """A learner that takes steps on one batch, and the most memory its first ones took."""

    def __init__(self, shape: Any, given: dict[str, Any], device: torch.device, ranks: Any) -> None:
        from scratchlm import TransformerLM
        from scratchlm.data import Batch
        from scratchlm.training import Learner, TrainConfig

        self.device, self.on_gpu, self.step = device, device.type == "cuda", 0
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        rows = shape.batch * (1 if ranks is None else ranks.data_size)
        settings = TrainConfig(batch_size=rows, micro_batch_size=shape.batch, **given)
        model = TransformerLM(shape.config, device=device if ranks is None else "meta")
        self.learner = Learner(model, settings, ranks=ranks)
        if ranks is not None:
            draw_weights(self.learner)
        ids = torch.randint(shape.config.vocab_size, (shape.batch, shape.seq + 1))
        parts = [ids[:, :-1].contiguous(), ids[:, 1:].contiguous()]
        self.batch = Batch(*(part.pin_memory() if self.on_gpu else part for part in parts))
        self.wait()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.take(WARMUP)
        self.peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0

    def wait(self) -> None:
        """Let the device finish."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def take(self, count: int) -> float:
        """Take steps; return the seconds of one."""
        from scratchlm.training import take_step

        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            self.step += 1
            take_step(self.learner, self.batch, self.step, 1e-5)
        self.wait()
        return (time.perf_counter() - begun) / count


@torch.no_grad()
def draw_weights(learner: Any) -> None:
    """Give a rank's part of a model values, on its device: reading none, it starts in no time."""
    from scratchlm.parallel.rows import local

    for p in learner.layout.updated.values():
        part = local(p.data)
        part.fill_(1.0) if part.ndim == 1 else part.normal_(0.0, 0.02)
    learner.layout.share_weights()


def take_turns(alone: Stepper, rank: Stepper, blocks: int) -> tuple[float, float]:
    """Return the median seconds of a step of each."""
    times = [(alone.take(BLOCK), rank.take(BLOCK)) for _ in range(blocks)]
    first, second = zip(*times, strict=True)
    return statistics.median(first), statistics.median(second)


def predicted(shape: Any, given: dict[str, Any]) -> int:
    """Return the peak that the account predicts."""
    from scratchlm.accounting import Setup
    from scratchlm.accounting.fits import peak_bytes
    from scratchlm.accounting.verify import on_this_gpu

    setup = Setup(phase="training", batch=shape.batch, context=shape.seq)
    if "parallel" in given:
        setup = replace(setup, gpus=GPUS, parallel=given["parallel"], tp=given.get("tp", 1))
    return peak_bytes(shape.config, on_this_gpu(shape.config, setup))


def sizes(shape: Any, given: dict[str, Any], peak: int) -> list[str]:
    account = predicted(shape, given)
    error = f"{account / peak - 1:+.1%}" if peak else ""
    return [f"{account / GIB:.2f}", f"{peak / GIB:.2f}", error]


def measure(
    shape: Any, kinds: list[str], device: torch.device, blocks: int, note: Callable[..., None]
) -> None:
    """Note a row for one GPU and for each kind of rank."""
    alone = Stepper(shape, {}, device, None)
    note("one GPU", *sizes(shape, {}, alone.peak), f"{alone.take(BLOCK) * 1e3:.1f}", "", "")
    for kind in kinds:
        given = KINDS[kind]
        try:
            if "parallel" in given:
                with first_of_many(device, given.get("tp", 1)) as ranks:
                    note(kind, *compare(alone, shape, given, device, ranks, blocks))
            else:
                note(kind, *compare(alone, shape, given, device, None, blocks))
        except Exception as error:  # the other rows are wanted all the same
            traceback.print_exc()
            note(kind, "failed", " ".join(str(error).split())[:120], *[""] * 4)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def compare(
    alone: Stepper, shape: Any, given: dict[str, Any], device: torch.device, ranks: Any, blocks: int
) -> list[str]:
    rank = Stepper(shape, given, device, ranks)
    one, ours = take_turns(alone, rank, blocks)
    times = [f"{ours * 1e3:.1f}", f"{one * 1e3:.1f}", f"{ours / one:.3f}"]
    return [*sizes(shape, given, rank.peak), *times]


# Two ranks over gloo

SHARED = (["train.precision=fp32"], [], ["train.precision=fp32", "train.parallel=fsdp"])
GLOO = """Two processes share the GPU over gloo, 20 steps; one process takes the same rows in two
micro-batches.

{rows}
"""


def run(words: list[str]) -> None:
    """Run Python; where it fails, show all that it and its ranks said."""
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    environment["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    made = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    if made.returncode:
        print(made.stdout[-6000:], made.stderr[-12000:], sep="\n", flush=True)
        raise RuntimeError(f"status {made.returncode}")


def two_ranks(device: str, tiny: bool, settings: list[str]) -> list[str]:
    """Train with two processes over gloo, and with one; return the losses and how they differ."""
    from scratchlm.data import write_token_file

    with tempfile.TemporaryDirectory() as folder:
        ids = (np.arange(200_000) * 3 + np.random.default_rng(0).integers(0, 7, 200_000)) % 512
        write_token_file(Path(folder) / "train", ids, vocab_size=512, tokenizer="t")
        model = "model.d_model=256 model.num_layers=4 model.num_heads=4 model.context_length=256"
        common = [*model.split(), "train.steps=20", "train.batch_size=8", "train.eval_every=0"]
        common += ["model.d_model=32", "model.context_length=32"] if tiny else []
        common = ["train", f"{folder}/train.bin", "--device", device, *common]
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        two = [*common, "--out", f"{folder}/two", "train.backend=gloo", *settings]
        run([*start, "-m", "scratchlm", *two])
        one = [word for word in settings if "parallel" not in word]
        one += ["train.micro_batch_size=4", "--out", f"{folder}/one"]
        run(["-m", "scratchlm", *common, *one])
        curves = []
        for name in ("one", "two"):
            lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
            curves.append([r["loss"] for r in map(json.loads, lines) if "loss" in r])
    largest = max(abs(a - b) for a, b in zip(*curves, strict=True))
    return [f"{curves[0][0]:.4f}", f"{curves[1][-1]:.4f}", f"{largest:.1e}"]


def share_a_gpu(device: str, tiny: bool) -> None:
    """Note a row for each of SHARED."""
    rows: list[list[str]] = []
    for settings in SHARED:
        said = " ".join(settings) or "defaults"
        try:
            rows.append([said, *two_ranks(device, tiny, settings)])
        except RuntimeError as error:
            rows.append([said, "failed", str(error), ""])
        print(" | ".join(rows[-1]), flush=True)
    header = ["two ranks over gloo", "first loss", "last loss", "largest difference"]
    if not tiny:
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        body, command = GLOO.format(rows=table(header, rows)), "python bench/ranks_gpu.py --gloo"
        write_section("Two ranks on one GPU", command, where, versions("torch", "triton"), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model; nothing is written")
    parser.add_argument("--shape", nargs="+", default=["medium", "llama3.2-1b"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--gloo", action="store_true", help="two ranks, no fake group")
    options = parser.parse_args()
    if options.gloo:
        share_a_gpu(options.device, options.tiny)
        return
    copy_instead_of_sending()
    from scratchlm import ModelConfig
    from train_gpu import SHAPES

    device = torch.device(options.device, *([0] if options.device == "cuda" else []))
    draw_spare(device, 1 << (27 if device.type == "cuda" else 16))
    rows: list[list[str]] = []
    began = time.perf_counter()

    def note(*row: str) -> None:
        rows.append(list(row))
        print(f"{time.perf_counter() - began:5.0f} s", " | ".join(row), flush=True)
        if options.tiny:
            return
        sizes = [f"{name}: {SHAPES[name].batch} × {SHAPES[name].seq:,}" for name in options.shape]
        body = BODY.format(
            gpus=GPUS,
            shapes=f"{', '.join(sizes)} tokens",
            blocks=options.blocks,
            block=BLOCK,
            rows=table(HEADER, rows),
        )
        where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        command = "python bench/ranks_gpu.py"
        write_section("Several ranks on one GPU", command, where, versions("torch", "triton"), body)

    for name in options.shape:
        shape = SHAPES[name]
        if options.tiny:
            shape = replace(shape, config=ModelConfig(512, 32, 64, 2, 4, 128), batch=2, seq=32)
        measure(shape, options.kinds, device, options.blocks, partial(note, name))


if __name__ == "__main__":
    main()
