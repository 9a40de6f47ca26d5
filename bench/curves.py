"""Speed must not bend the loss curve: the fast paths beside the reference, step for step.

    python bench/curves.py [TEXT] [--steps 200] [--device cuda]

One model, one seed, one order of the data (characters of TEXT, or of generated stories), trained
with the reference ops in float32, and with every fast path. What a second seed of the reference
does is the noise to compare with: a path is within noise when its mean distance from the reference
is smaller than the other seed's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from results import machine, table, versions, write_section
from scratchlm.config import ModelConfig
from scratchlm.data.batches import Batches
from scratchlm.data.stories.source import StorySource, to_text
from scratchlm.data.token_file import TokenFile
from scratchlm.training.learner import Learner, build_model
from scratchlm.training.schedules import schedule_of
from scratchlm.training.settings import TrainConfig
from scratchlm.training.step import take_step
from shakespeare import write_characters

# name -> ops, seed, settings
PATHS: dict[str, tuple[str, int, dict[str, str]]] = {
    "reference, float32": ("reference", 0, {"precision": "fp32"}),
    "reference, another seed": ("reference", 1, {"precision": "fp32"}),
    "fast, float32": ("fast", 0, {"precision": "fp32"}),
    "fast, bf16-mixed, compiled": ("fast", 0, {"precision": "bf16-mixed", "compile": "block"}),
    "fast, bf16-residual, compiled": (
        "fast",
        0,
        {"precision": "bf16-residual", "compile": "block"},
    ),
    "fast, bf16-residual, selective": (
        "fast",
        0,
        {"precision": "bf16-residual", "compile": "block", "checkpointing": "selective"},
    ),
    "fast, bf16-residual, moment in bf16": (
        "fast",
        0,
        {"precision": "bf16-residual", "compile": "block", "moment": "bf16"},
    ),
    "fast, fp8, compiled": ("fast", 0, {"precision": "fp8", "compile": "block"}),
}
BASE = TrainConfig(batch_size=32, lr=1e-3, warmup_steps=20, eval_every=0)
SIZES = {"context_length": 128, "d_model": 256, "num_layers": 4, "num_heads": 4, "d_ff": 640}


def curve(
    config: ModelConfig, tokens: TokenFile, ops: str, settings: TrainConfig, device: str
) -> tuple[list[float], float]:
    """Train; return the loss of every step and the seconds it took."""
    torch._dynamo.reset()
    learner = Learner(build_model(config, settings.seed, device, ops), settings)
    settings = learner.settings
    lr_at = schedule_of(settings)
    batches = Batches(tokens, config.context_length, settings.batch_size, 0).iterate(0)
    begin, losses = time.perf_counter(), []
    for step in range(1, settings.steps + 1):
        losses.append(take_step(learner, next(batches), step, lr_at(step)).loss)
    return losses, time.perf_counter() - begin


def distance(a: list[float], b: list[float]) -> float:
    """Mean absolute difference from the tenth step on."""
    return sum(abs(x - y) for x, y in zip(a[10:], b[10:], strict=True)) / len(a[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.text is None:
        text = "\n".join(to_text(words) for words in StorySource().stories(0, 20_000))
    else:
        text = options.text.read_text(encoding="utf-8")
    found: dict[str, list[float]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = write_characters(text, Path(folder))
        config = ModelConfig(kinds, **SIZES)
        tokens = TokenFile(Path(folder) / "train")
        for name, (ops, seed, means) in PATHS.items():
            settings = replace(BASE, steps=options.steps, seed=seed, **means)
            found[name], seconds = curve(config, tokens, ops, settings, options.device)
            truth = found["reference, float32"]
            marks = [f"{found[name][i - 1]:.4f}" for i in (50, 100, 150, 200) if i <= options.steps]
            rows.append([name, *marks, f"{distance(found[name], truth):.5f}", f"{seconds:.0f}"])
            print(" | ".join(rows[-1]), flush=True)
    noise = distance(found["reference, another seed"], found["reference, float32"])
    steps = [f"step {i}" for i in (50, 100, 150, 200) if i <= options.steps]
    body = table(["path", *steps, "mean distance", "seconds"], rows)
    body += (
        "\n\nThe distance is the mean of |loss − the reference's| from step 10 on; another seed "
        f"of the reference is {noise:.4f} away."
    )
    print(body)
    where = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    write_section("Loss curves", "python bench/curves.py", where, versions("torch", "triton"), body)


if __name__ == "__main__":
    main()
