"""A training step on a GPU: ours beside the peers, as a share of the machine's own matmul rate.

    python bench/train_gpu.py                          every shape, with its peer
    python bench/train_gpu.py --only medium --no-peers

bf16 autocast over float32 weights, fused AdamW, random tokens, the same step for both: forward,
backward, update, gradients dropped. MFU = (6·N_matmul + 12·L·H·d_head·S) per token × tokens/s over
the rate of a bf16 product of 8192³ on the same machine, measured in the same run, at its start, on
a cool chip. It is measured again right after each contestant's steps: by then the chip is at its
power limit, and the same product is slower. One of ours at every shape is profiled: where its time
goes stands below the table, kernel by kernel in $OUT.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peers import hugging_face
from results import table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate import FUSIONS, accelerate
from scratchlm.accounting.flops import training_flops_per_token
from scratchlm.config import PRESETS
from scratchlm.data import Batch
from scratchlm.training.apply import NO_WORKSPACE, WORKSPACE
from scratchlm.training.learner import Learner
from scratchlm.training.settings import TrainConfig, parse_overrides
from scratchlm.training.step import backward

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """What is trained, on how much at a time, and beside whom."""

    config: ModelConfig
    batch: int
    seq: int
    peer: str
    checkpointing: str = "none"
    checkpointed_layers: int | None = None
    target: str = ""
    fp8_target: str = ""  # with it, fp8 products are measured too


_QWEN3 = replace(PRESETS["qwen3-0.6b"], context_length=2048)
SHAPES = {
    "medium": Shape(
        ModelConfig(50_304, 1024, 1024, 24, 16, 2752), 16, 1024, "llama compiled", target="0.65"
    ),
    "small": Shape(
        ModelConfig(32_000, 1024, 512, 8, 8, 1408), 32, 1024, "llama compiled", target="0.57"
    ),
    "gpt2-xl": Shape(
        PRESETS["cs336-gpt2-xl"], 8, 1024, "llama eager", target="0.62", fp8_target="0.80"
    ),
    "qwen3-0.6b": Shape(
        _QWEN3, 8, 2048, "qwen3 compiled", "selective", 25, target="0.65 in 18 GiB"
    ),
    "gpt2": Shape(PRESETS["cs336-gpt2"], 32, 1024, "gpt compiled", target="0.70"),
    "llama3.2-1b": Shape(
        replace(PRESETS["llama3.2-1b"], context_length=2048), 4, 2048, "llama compiled"
    ),
    "medium, 16k context": Shape(
        ModelConfig(50_304, 16_384, 1024, 24, 16, 2752), 1, 16_384, "", target="60 GiB"
    ),
}


@dataclass(frozen=True)
class Measured:
    """What one contestant did."""

    name: str
    tokens_per_s: float
    mfu: float
    peak_gib: float
    first_s: float
    ms: float
    rate_after: float  # FLOP/s of the large product, right after its steps
    profile: str = ""  # kinds of kernels by their time


def matmul_rate() -> float:
    """FLOP/s of a bf16 product of 8192³ on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_seconds(lambda: a @ b, 3, 15)


def median_seconds(work: Callable[[], object], warmup: int, repeats: int) -> float:
    for _ in range(warmup):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) / 1e3


def tokens_of(shape: Shape) -> tuple[Tensor, Tensor]:
    ids = torch.randint(shape.config.vocab_size, (shape.batch, shape.seq + 1), device="cuda")
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_step(shape: Shape, settings: dict[str, Any], without: Sequence[str] = ()) -> Step:
    model = accelerate(TransformerLM(shape.config, device="cuda"), without)
    given = {
        "batch_size": shape.batch,
        "checkpointing": shape.checkpointing,
        "checkpointed_layers": shape.checkpointed_layers,
        **settings,
    }
    learner = Learner(model, TrainConfig(**given))
    inputs, targets = tokens_of(shape)
    batch = Batch(inputs.cpu().pin_memory(), targets.cpu().pin_memory())  # as a loader hands it out

    def step() -> Tensor:
        loss = backward(learner, batch)
        for optimizer in learner.optimizers:
            optimizer.step()
        return loss

    return step


def peer_step(shape: Shape) -> Step:
    kind, how = shape.peer.split()
    with torch.device("cuda"):
        if kind == "gpt":
            from shakespeare import Peer

            config = shape.config  # its vocabulary is padded by hand, as its author does
            model: torch.nn.Module = Peer(
                50_304, config.context_length, config.d_model, config.num_layers, config.num_heads
            )
        else:
            model = hugging_face(shape.config, use_cache=False, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = tokens_of(shape)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        out = model(inputs)
        logits = getattr(out, "logits", out)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    run = torch.compile(loss_of) if how == "compiled" else loss_of

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def flops_per_token(shape: Shape, name: str) -> float:
    if not name.startswith("gpt "):
        return float(training_flops_per_token(shape.config, shape.seq))
    config = shape.config  # two matrices of 4·d instead of three
    d, layers = config.d_model, config.num_layers
    matrices = layers * 12 * d * d + 50_304 * d
    return 6 * matrices + 12 * layers * d * shape.seq


def measure(
    name: str, shape: Shape, make: Callable[[], Step], rate: float, repeats: int, profile: str = ""
) -> Measured:
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = make()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = float(step())
    first = time.perf_counter() - begin
    assert loss == loss, "the first loss is NaN"
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):  # the recording is among these, and its memory
        step()
    seconds = median_seconds(step, 2, repeats)
    peak = torch.cuda.max_memory_allocated() / 2**30
    after = matmul_rate()
    per_s = shape.batch * shape.seq / seconds
    mfu = per_s * flops_per_token(shape, name) / rate
    kinds = write_profile(step, profile) if profile else ""
    result = Measured(name, per_s, mfu, peak, first, seconds * 1e3, after, kinds)
    print(
        f"  {name}: {per_s:,.0f} tokens/s, MFU {mfu:.3f}, {peak:.1f} GiB, "
        f"{seconds * 1e3:.1f} ms, first step {first:.1f} s, loss {loss:.3f}, "
        f"8192³ right after {after / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return result


def write_profile(step: Step, path: str) -> str:
    """Write the step's kernels by the time they take; return the times of what they do."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / 2e3, e.count // 2, e.key) for e in seen.key_averages()]
    rows.sort(reverse=True)
    lines = [f"{ms:9.3f} ms {count:5d}× {name[:150]}" for ms, count, name in rows[:60]]
    Path(path).write_text("\n".join([f"{sum(r[0] for r in rows):9.3f} ms in all", *lines]) + "\n")
    groups: dict[str, float] = {}
    for ms, _, name in rows:
        groups[kind_of(name)] = groups.get(kind_of(name), 0.0) + ms
    parts = sorted(groups.items(), key=lambda part: -part[1])
    said = ", ".join(f"{kind} {ms:.1f}" for kind, ms in parts if ms >= 0.05)
    print(f"   {said} ms", flush=True)
    return f"{sum(groups.values()):.1f} ms of kernels: {said}"


# Kernels of torch and its libraries by parts of their names; ours are in the table of fusions.
KINDS = {
    "attention": ("fmha", "flash", "sdpa", "cudnn"),
    "matmuls": ("gemm", "nvjet", "cutlass", "cublas"),
    "AdamW": ("_adamw", "multi_tensor"),
    "norms": ("norm",),
}
OURS = {kernel: fusion.name for fusion in reversed(FUSIONS) for kernel in fusion.kernels}


def kind_of(kernel: str) -> str:
    """Return the fusion a kernel belongs to, or what kind of torch's it is."""
    if kernel in OURS:
        return OURS[kernel]
    name = kernel.lower()
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "the rest"


# how ours runs -> what that changes of the settings
RESIDUAL, FP8 = "ours, residual in bf16", "ours, fp8 products"
VARIANTS: dict[str, dict[str, str]] = {
    "ours": {"precision": "bf16-mixed"},
    RESIDUAL: {"precision": "bf16-residual"},
    "ours, residual and moment in bf16": {"precision": "bf16-residual", "moment": "bf16"},
    FP8: {"precision": "fp8"},
}


def contestants(shape: Shape, peers: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Return who runs at a shape: a name, and what makes its step."""
    found: dict[str, Callable[[], Step]] = {}
    if shape.peer and peers:
        found[shape.peer] = lambda: peer_step(shape)
    for name, change in VARIANTS.items():
        if (name != FP8 or shape.fp8_target) and (name == RESIDUAL or shape.peer):
            found[name] = lambda change=change: our_step(shape, {**change, **settings})  # type: ignore[misc]
    return found


def row_of(name: str, shape: Shape, result: Measured, first: Measured) -> list[str]:
    faster = f"{result.tokens_per_s / first.tokens_per_s:.2f}×" if result is not first else ""
    return [
        name,
        result.name,
        f"{result.tokens_per_s:,.0f}",
        f"{result.mfu:.3f}",
        f"{result.rate_after / 1e12:.0f}",
        f"{result.peak_gib:.1f}",
        f"{result.first_s:.0f}",
        faster,
        shape.fp8_target if result.name == FP8 else shape.target * result.name.startswith("ours"),
    ]


def long_context(found: dict[str, dict[str, Measured]]) -> str:
    """Say what a token costs at 16k beside 1k, and what its causal FLOPs say it should."""
    name = RESIDUAL
    short, long = found.get("medium", {}).get(name), found.get("medium, 16k context", {}).get(name)
    if short is None or long is None:
        return ""
    work = [
        float(training_flops_per_token(SHAPES[shape].config, SHAPES[shape].seq, "causal"))
        for shape in ("medium", "medium, 16k context")
    ]
    cost = short.tokens_per_s / long.tokens_per_s
    return (
        f"\n\nA token at 16,384 costs {cost:.2f} times one at 1,024; its causal FLOPs are "
        f"{work[1] / work[0]:.2f} times as many: {cost / (work[1] / work[0]) - 1:+.0%}."
    )


def profiles(found: dict[str, dict[str, Measured]]) -> str:
    """Say where the time goes, a line for each shape."""
    lines = [
        f"- {shape}, {who}: a step of {result.ms:.1f} ms, {result.profile}."
        for shape, results in found.items()
        for who, result in results.items()
        if result.profile
    ]
    return "\n\nWhere the time goes, in ms:\n\n" + "\n".join(lines) if lines else ""


def report(found: dict[str, dict[str, Measured]], rate: float, repeats: int) -> None:
    rows = [
        row_of(name, SHAPES[name], result, next(iter(results.values())))
        for name, results in found.items()
        for result in results.values()
    ]
    header = ["shape", "who", "tokens/s", "MFU", "8192³ right after"]
    header += ["peak GiB", "first step, s", "÷ peer", "aim"]
    body = table(header, rows) + long_context(found) + profiles(found)
    body += (
        f"\n\nA bf16 product of 8192³ at the start: {rate / 1e12:.0f} TFLOP/s, what MFU is a share "
        f"of; right after a contestant's steps, in the table. Medians of {repeats} steps. "
        "Ours: blocks compiled, forward and backward replayed as one CUDA graph; Qwen3 with "
        "selective checkpointing, whole in 25 of 28 layers. All without cuBLAS's workspace. What "
        "fp8 does is divided by the bf16 rate."
    )
    print(body)
    write_section(
        "Training on a GPU",
        "python bench/train_gpu.py",
        torch.cuda.get_device_name(),
        versions("torch", "triton", "transformers"),
        body,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--set", nargs="*", default=[], help="settings of ours, key=value")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a CUDA device")
    # For all contestants, as `scratchlm train` has it where steps are recorded.
    os.environ.setdefault(WORKSPACE, NO_WORKSPACE)
    out = os.environ.get("OUT")  # where kernels are written one by one, if anywhere
    settings = parse_overrides([f"train.{pair}" for pair in options.set]).get("train", {})
    rate = matmul_rate()
    print(f"matmul rate: {rate / 1e12:.0f} TFLOP/s", flush=True)
    found: dict[str, dict[str, Measured]] = {}
    for name in options.only:
        shape = SHAPES[name]
        for who, make in contestants(shape, not options.no_peers, settings).items():
            file = name.replace(", ", "-").replace(" ", "-")
            place = f"{out}/profile-{file}.txt" if out else os.devnull
            trace = place if who == RESIDUAL else ""
            try:
                result = measure(who, shape, make, rate, options.repeats, trace)
            except torch.OutOfMemoryError as error:
                print(f"{name}, {who}: {str(error)[:200]}", flush=True)
                continue
            found.setdefault(name, {})[who] = result
        report(found, rate, options.repeats)  # after every shape: what is measured is kept


if __name__ == "__main__":
    main()
