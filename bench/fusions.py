"""What each fusion gains: a training step with all of them, and with one left out.

    python bench/fusions.py                         every preset, every fusion that runs on it
    python bench/fusions.py --only gpt2 --repeats 20
    python bench/fusions.py --only gpt2 --fusions rms_norm --settings compile=off

The gain is the share of the step that comes back when the fusion is left out:
(without − with) / without. Steps as in `bench/train_gpu.py`: float32 residual stream, blocks
compiled, forward and backward replayed as one CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from dataclasses import replace
from unittest.mock import patch

import torch

from results import table, versions, write_section
from scratchlm import TransformerLM, acceleration
from scratchlm.accelerate import accelerate, explain
from scratchlm.config import PRESETS
from scratchlm.training.apply import NO_WORKSPACE, WORKSPACE
from train_gpu import Shape, median_seconds, our_step

SETTINGS: dict[str, object] = {"precision": "bf16-mixed"}
SHAPES = {
    "gpt2": Shape(PRESETS["cs336-gpt2"], 32, 1024, ""),
    "llama3.2-1b": Shape(replace(PRESETS["llama3.2-1b"], context_length=2048), 4, 2048, ""),
    "qwen3-0.6b": Shape(replace(PRESETS["qwen3-0.6b"], context_length=2048), 4, 2048, ""),
    "qwen3-1.7b": Shape(replace(PRESETS["qwen3-1.7b"], context_length=2048), 4, 2048, ""),
    "gpt2-xl": Shape(PRESETS["cs336-gpt2-xl"], 8, 1024, ""),
}
SHADOW = "bf16 shadow weights"
# Left out together: the next best implementation of the same thing is none of ours.
GROUPS = {
    "qkv_rope_attention": ["qkv_rope_attention"],
    "qkv_norm_rope": ["qkv_rope_attention", "qkv_norm_rope"],
    "swiglu_gemm": ["swiglu_gemm"],
    "swiglu_gate": ["swiglu_gemm", "swiglu_gate"],
    "add_rms_norm": ["add_rms_norm"],
    "rms_norm": ["rms_norm"],
    SHADOW: [],  # the Learner keeps none
    "chunked_lm_head_loss": ["chunked_lm_head_loss"],
}


def step_ms(shape: Shape, without: list[str], repeats: int, shadow: bool = True) -> float:
    """Return the median of a step's time, or infinity where memory does not suffice."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    try:
        none = patch.object(acceleration, "shadow_weights", lambda *_, **__: None)
        with contextlib.nullcontext() if shadow else none:
            step = our_step(shape, SETTINGS, without)
        for _ in range(5):
            step()
        return 1e3 * median_seconds(step, 2, repeats)
    except torch.OutOfMemoryError:
        return float("inf")


def running(shape: Shape) -> set[str]:
    """Return the fusions that run on a preset, or would if a better one were left out."""
    model = accelerate(TransformerLM(shape.config.replace(num_layers=1), device="cuda"))
    rows = explain(model, batch=shape.batch, seq=shape.seq)
    runs = {r.fusion for r in rows if r.reason is None or "runs instead" in r.reason}
    return (runs | {SHADOW}) & GROUPS.keys()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--fusions", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--settings", nargs="*", default=[], help="of training, as KEY=VALUE")
    options = parser.parse_args()
    for word in options.settings:
        key, _, value = word.partition("=")
        SETTINGS[key] = {"true": True, "false": False}.get(value, value)
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a CUDA device")
    os.environ.setdefault(WORKSPACE, NO_WORKSPACE)
    gains: dict[str, dict[str, str]] = {name: {} for name in options.fusions}
    steps: dict[str, str] = {}
    for name in options.only:
        shape = SHAPES[name]
        able = running(shape)
        whole = step_ms(shape, [], options.repeats)
        steps[name] = f"{whole:.1f}"
        print(f"{name}: {whole:.2f} ms with all", flush=True)
        for fusion in options.fusions:
            if fusion not in able:
                gains[fusion][name] = "—"
                continue
            slower = step_ms(shape, GROUPS[fusion], options.repeats, shadow=fusion != SHADOW)
            gain = 1 - whole / slower
            gains[fusion][name] = f"{gain:+.1%}"
            print(f"  without {fusion}: {slower:.2f} ms, gain {gain:+.1%}", flush=True)
        rows = [[f, *(gains[f].get(n, "") for n in steps)] for f in options.fusions]
        rows.append(["a step with all, ms", *steps.values()])
        body = table(["fusion", *steps], rows) + "\n\nMedians of "
        body += f"{options.repeats} steps. A dash: it does not run there."
        for fusion, group in GROUPS.items():
            if len(group) > 1:
                body += f" {fusion}: left out together with {', '.join(group[:-1])}."
        said = " ".join(options.settings)
        write_section(
            f"Fusions, {said}" if said else "Fusions",
            "python bench/fusions.py" + (f" --settings {said}" if said else ""),
            torch.cuda.get_device_name(),
            versions("torch", "triton"),
            body,
        )
    print(body)


if __name__ == "__main__":
    main()
