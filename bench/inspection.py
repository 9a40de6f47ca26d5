"""Keep and patch the points of one model, with scratchlm and with transformer-lens.

The same random GPT-2 from one directory, in one process, in turns. Needs `transformer-lens`, which
nothing else does: `pip install transformer-lens`.

    python bench/inspection.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from results import machine, table, versions, write_section
from scratchlm.inference import load_model
from scratchlm.inspect import inspect, points

ROUNDS, SWEEP_ROUNDS, PAIRS = 15, 3, 40
LAYERS, HEADS = 6, 6
SIZES = {"vocab_size": 8192, "n_embd": 384, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 256}
# ours -> theirs
NAMES = {
    "in": "hook_in",
    "attn.q": "attn.hook_q",
    "attn.k": "attn.hook_k",
    "attn.v": "attn.hook_v",
    "attn.weights": "attn.hook_pattern",
    "attn.heads": "attn.hook_z",
    "attn.out": "hook_attn_out",
    "mid": "hook_resid_mid",
    "ffn.hidden": "mlp.hook_post",
    "ffn.out": "hook_mlp_out",
    "out": "hook_out",
}


def seconds(run: Callable[[], Any]) -> float:
    """Return the processor time of one run: others on the machine do not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Time every run once per round; the first round wakes everything up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            took = seconds(run)
            if number:
                times[name].append(took)
    return times


def held(tensors: list[Tensor]) -> int:
    """Return the bytes of the memory that tensors hold, each once."""
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def milliseconds(times: list[float]) -> str:
    return f"{1e3 * statistics.median(times):.1f} ms"


def ratio(some: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def caches(model: Any, bridge: Any, tokens: Tensor) -> list[tuple[object, ...]]:
    """Compare a forward, one kept point and many."""
    ours = [f"layers.{i}.{kind}" for i in range(LAYERS) for kind in NAMES]
    theirs = [f"blocks.{i}.{hook}" for i in range(LAYERS) for hook in NAMES.values()]
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str, names: list[str]) -> Callable[[], None]:
        def run() -> None:
            with inspect(model) as look:
                look.keep(names)
                model(tokens)
            kept[name] = [look.cache[point] for point in look.cache]

        return run

    def cache(name: str, names: list[str]) -> Callable[[], None]:
        def run() -> None:
            _, found = bridge.run_with_cache(tokens, names_filter=names)
            kept[name] = [found[hook] for hook in names]

        return run

    cases = {
        "nothing kept": ([], []),
        "one: out of layer 3": (["layers.3.out"], ["blocks.3.hook_out"]),
        "one: weights of layer 3": (["layers.3.attn.weights"], ["blocks.3.attn.hook_pattern"]),
        f"{len(ours)}: {len(NAMES)} of every layer": (ours, theirs),
    }
    runs: dict[str, Callable[[], Any]] = {}
    for name, (mine, hooks) in cases.items():
        runs[f"ours {name}"] = keep(f"ours {name}", mine) if mine else lambda: model(tokens)
        runs[f"theirs {name}"] = cache(f"theirs {name}", hooks) if hooks else lambda: bridge(tokens)
    times = in_turns(runs)
    rows = []
    for name in cases:
        mine, hooks = times[f"ours {name}"], times[f"theirs {name}"]
        sizes = [
            f"{held(kept.get(f'{who} {name}', [])) / 1e6:.2f} MB" for who in ("ours", "theirs")
        ]
        pair = (milliseconds(mine), milliseconds(hooks), f"**{ratio(hooks, mine):.2f}×**")
        rows.append((name, *pair, *sizes))
        print(*rows[-1], sep="  ")
    return rows


def overheads(model: Any, tokens: Tensor) -> list[tuple[object, ...]]:
    """Measure what one kept point adds to a forward, for every kind of point."""
    names = [name for name, point in points(model).items() if point.layer in (None, LAYERS // 2)]
    rows = []
    for name in names:

        def keep(name: str = name) -> Any:
            with inspect(model) as look:
                look.keep(name)
                model(tokens)
            return look.cache

        keep(), model(tokens)
        plain, kept = [], []
        for number in range(PAIRS):  # side by side, and each first in turn
            for who in (0, 1) if number % 2 else (1, 0):
                (kept if who else plain).append(seconds(keep if who else lambda: model(tokens)))
        share = quartile(kept) / quartile(plain) - 1
        rows.append((f"`{name}`", f"{100 * share:+.1f} %", f"{keep().nbytes / 1e6:.2f} MB"))
        print(*rows[-1], sep="  ", flush=True)
    return rows


def quartile(times: list[float]) -> float:
    """Return the time of a turn that was little disturbed."""
    return statistics.quantiles(times, n=4)[0]


def sweeps(model: Any, bridge: Any, clean: Tensor, corrupted: Tensor) -> list[tuple[object, ...]]:
    """Compare patching every head, and the stream before every layer at every position."""
    from transformer_lens import patching

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 5] - logits[:, -1, 6]

    def theirs_metric(logits: Tensor) -> Tensor:
        return metric(logits)[0]

    with inspect(model) as look:
        look.keep(["layers.*.attn.heads", "layers.*.in"])
        model(clean)
    a = look.cache
    _, clean_cache = bridge.run_with_cache(clean)
    rows = []
    for title, pattern, each, theirs in (
        ("every head", "layers.*.attn.heads", "head", "get_act_patch_attn_head_out_all_pos"),
        ("every position before every layer", "layers.*.in", "position", "get_act_patch_resid_pre"),
    ):
        found: dict[str, Tensor] = {}

        def sweep(batch: int, pattern: str = pattern, each: str = each, found: Any = found) -> None:
            with inspect(model) as look:
                options: Any = {"from_": a, "each": each, "batch": batch}
                swept = look.sweep(pattern, metric, tokens=corrupted, **options)
            found["ours"] = swept

        def patch(theirs: str = theirs, found: Any = found) -> None:
            function = getattr(patching, theirs)
            found["theirs"] = function(bridge, corrupted, clean_cache, theirs_metric)

        runs = {"batched": lambda: sweep(32), "one by one": lambda: sweep(1), "theirs": patch}
        times = in_turns(runs, SWEEP_ROUNDS)
        torch.testing.assert_close(found["ours"], found["theirs"], rtol=1e-3, atol=1e-4)
        mine = times["batched"]
        rows.append(
            (
                f"{title}: {found['ours'].numel()} patches",
                *(milliseconds(some) for some in times.values()),
                f"{ratio(times['one by one'], mine):.2f}×",
                f"**{ratio(times['theirs'], mine):.2f}×**",
            )
        )
        print(*rows[-1], sep="  ")
    return rows


@torch.no_grad()
def main() -> None:
    from transformer_lens import TransformerBridge

    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    config = transformers.GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        transformers.GPT2LMHeadModel(config).save_pretrained(path)
        model = load_model(path).model
        bridge = TransformerBridge.boot_transformers(str(path), device="cpu")
        tokens = torch.randint(SIZES["vocab_size"], (4, 128))
        clean, corrupted = torch.randint(SIZES["vocab_size"], (2, 1, 32))
        torch.testing.assert_close(model(tokens), bridge(tokens), rtol=1e-3, atol=1e-4)
        kept = caches(model, bridge, tokens)
        single = overheads(model, tokens[:1])
        swept = sweeps(model, bridge, clean, corrupted)
    write_section(
        "Inspection, CPU",
        "python bench/inspection.py",
        machine(),
        versions("torch", "transformers", "transformer-lens"),
        f"A random GPT-2 of {LAYERS} layers, d_model {SIZES['n_embd']}, {HEADS} heads, float32, "
        f"without gradients. Processor time of one thread, medians of {ROUNDS} turns (sweeps: "
        f"{SWEEP_ROUNDS}) in one process; ratios are medians of the turns. Kept, of 4 × 128 "
        "tokens; memory is what the kept tensors hold:\n\n"
        + table(
            (
                "kept",
                "scratchlm",
                "transformer-lens",
                "theirs : ours",
                "ours holds",
                "theirs holds",
            ),
            kept,
        )
        + "\n\nWhat keeping one point adds to a forward of scratchlm over 1 × 128 tokens, opening "
        f"the context included; the lower quartiles of {PAIRS} turns each, side by side:\n\n"
        + table(("point", "time", "bytes"), single)
        + "\n\nSweeps over 32 tokens, patch by patch from another run; transformer-lens by its own "
        "`patching` functions:\n\n"
        + table(
            (
                *("sweep", "ours, 32 at a time", "ours, one by one", "transformer-lens"),
                *("one by one : batched", "theirs : ours"),
            ),
            swept,
        ),
    )


if __name__ == "__main__":
    main()
