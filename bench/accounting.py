"""Predicted memory against a GPU: training peaks, and the bytes of a KV cache.

Each configuration takes two training steps in a process of its own, so that one peak cannot lean
on another's leftovers. Writes the section "Accounting" of bench/RESULTS.md.

    python bench/accounting.py                 everything
    python bench/accounting.py --one NAME      one configuration, as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from scratchlm.accounting import Execution, Setup, memory
from scratchlm.accounting.memory import kv_cache_bytes, memory_bindings
from scratchlm.accounting.verify import measure_peak, on_this_gpu
from scratchlm.config import MLP, Attention, ModelConfig, MoE, preset
from scratchlm.model import KVCache

sys.path.insert(0, str(Path(__file__).parent))
from results import table, versions, write_section

GIB = 2**30
MEDIUM = ModelConfig(50_304, 1_024, 1_024, 24, 16, 2_752)
SMALL_MOE = MEDIUM.replace(num_layers=12, d_ff=704, ffn=MoE(16, 2))

CONFIGURATIONS: dict[str, tuple[ModelConfig, Setup]] = {
    "medium, batch 16": (MEDIUM, Setup(batch=16)),
    "medium, batch 1": (MEDIUM, Setup(batch=1)),
    "medium, batch 16, block": (
        MEDIUM,
        Setup(batch=16, execution=Execution(checkpointing="block")),
    ),
    "medium, batch 16, attention": (
        MEDIUM,
        Setup(batch=16, execution=Execution(checkpointing="attention")),
    ),
    "medium, batch 16, ffn": (
        MEDIUM,
        Setup(batch=16, execution=Execution(checkpointing="ffn")),
    ),
    "medium, batch 16, fp32": (MEDIUM, Setup(batch=16, precision="fp32")),
    "medium, batch 16, bf16": (MEDIUM, Setup(batch=16, precision="bf16")),
    "medium, batch 4, unfused attention": (
        MEDIUM,
        Setup(batch=4, execution=Execution(attention="unfused")),
    ),
    "medium, batch 16, unfused loss": (
        MEDIUM,
        Setup(batch=16, execution=Execution(loss="unfused")),
    ),
    "cs336-gpt2-xl, batch 8": (preset("cs336-gpt2-xl"), Setup(batch=8)),
    "cs336-gpt2-xl, batch 1": (preset("cs336-gpt2-xl"), Setup(batch=1)),
    "qwen3-0.6b, batch 8, 2,048 tokens": (preset("qwen3-0.6b"), Setup(batch=8, context=2_048)),
    "gpt2, batch 32": (preset("gpt2"), Setup(batch=32)),
    "llama3.2-1b, batch 2, 8,192 tokens, block": (
        preset("llama3.2-1b"),
        Setup(batch=2, context=8_192, execution=Execution(checkpointing="block")),
    ),
    "mixture of 16 experts, batch 8": (SMALL_MOE, Setup(batch=8)),
    "medium with a window of 256, batch 8": (
        MEDIUM.replace(attention=Attention(sliding_window=256)),
        Setup(batch=8),
    ),
    "medium with ReLU and biases, batch 8": (
        MEDIUM.replace(ffn=MLP("relu", bias=True), attention=Attention(bias="all")),
        Setup(batch=8),
    ),
}


def measure(name: str) -> dict[str, float]:
    config, setup = CONFIGURATIONS[name]
    setup = replace(setup, phase="training")
    predicted = memory(config, on_this_gpu(config, setup))
    return {
        "predicted": predicted.training.value,
        "measured": measure_peak(config, setup),
        "moment": predicted.training.name,
    }  # type: ignore[dict-item]


def measure_cache(config: ModelConfig, batch: int, capacity: int) -> tuple[int, int]:
    """Return predicted and allocated bytes of a bfloat16 cache."""
    setup = Setup(batch=batch, cache=capacity - 1)
    predicted = kv_cache_bytes().value(memory_bindings(config, setup))
    before = torch.cuda.memory_allocated()
    cache = KVCache(config, batch, capacity, device="cuda", dtype=torch.bfloat16)
    allocated = torch.cuda.memory_allocated() - before
    assert cache.keys.nbytes + cache.values.nbytes == allocated
    return int(predicted), allocated


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    rows, worst = [], 0.0
    for name in CONFIGURATIONS:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append([name, "", "failed", done.stderr.strip().splitlines()[-1][:80], ""])
            print(rows[-1], flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        error = found["predicted"] / found["measured"] - 1
        worst = max(worst, abs(error))
        sizes = [f"{found[key] / GIB:.2f} GiB" for key in ("predicted", "measured")]
        rows.append([name, *sizes, f"{error:+.2%}", found["moment"]])
        print(rows[-1], flush=True)
    caches = []
    for name, batch, capacity in (
        ("cs336-gpt2-xl", 4, 1_024),
        ("qwen3-0.6b", 16, 4_096),
        ("llama3-8b", 2, 8_192),
    ):
        predicted, allocated = measure_cache(preset(name), batch, capacity)
        verdict = "equal" if predicted == allocated else "DIFFERENT"
        caches.append([name, batch, f"{capacity:,}", f"{predicted:,}", f"{allocated:,}", verdict])
    peaks = table(["training step", "predicted", "measured", "error", "peak"], rows)
    kept = table(["KV cache", "batch", "tokens", "predicted bytes", "allocated", ""], caches)
    body = f"""Peak of two training steps (`torch.cuda.max_memory_allocated`), eager, fused AdamW,
bfloat16 autocast over float32 weights where nothing else is said; predicted by
`scratchlm.accounting` beforehand. Largest error {worst:.2%}.

{peaks}

{kept}
"""
    write_section(
        "Accounting",
        "python bench/accounting.py",
        torch.cuda.get_device_name(),
        versions("torch"),
        body,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main()
