"""Measures tile sizes inside whole steps, for `bench/decode.py --tune`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.kernels.triton.decode_tiles import (
    KVSplits,
    Tile,
    choose_tile,
    power_of_two,
)
from scratchlm.paged import PagedCache

# Enough layers that the caches of the chip do not hold their weights.
TUNED_LAYERS = {"gpt2-xl": 6, "medium": 14, "qwen3-0.6b": 12}
TUNED_CAPACITY = 320
REPLAYS = 20  # three times: the lengths go from 192 to 252


def recorded(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int = REPLAYS) -> float:
    """Best of three means over `repeats` replays."""
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / repeats)
    return best


# Tile sizes


def candidates(kernel: str, rows: int, width: int) -> list[Tile]:
    """Tiles worth a try: 2 to 32 loads of 16 bytes per thread, enough programs for the chip."""
    found = []
    may_leave_a_fourth = kernel in ("out", "down") and 4 * width <= 3 * power_of_two(width)
    for warps in (1, 2, 4, 8):
        per_row = power_of_two(width) * 2 // (warps * 32 * 16) * (2 if kernel == "gate" else 1)
        for block in (1, 2, 4, 8, 16):
            for tiles in (1, 2, 4):
                loads, programs = per_row * block, -(-rows // (block * tiles))
                in_flight = loads * min(tiles, 2)
                if per_row and 4 <= loads <= 16 and in_flight <= 24 and programs >= 130:
                    found.append(Tile(block, warps, tiles))
                    if may_leave_a_fourth:
                        found.append(Tile(block, warps, tiles, quarters=3))
    return found


def spreads(config: ModelConfig) -> list[KVSplits]:
    """Programs that together hold all keys at once, and one that takes block after block."""
    widest = 8192 // power_of_two(config.d_head)
    return [
        KVSplits(keys, warps, splits, handed_on)
        for keys in (32, 64, 128, 256)
        for warps in (1, 2, 4, 8)
        for splits in sorted({1, -(-TUNED_CAPACITY // keys)})
        for handed_on in ((False, True) if splits > 1 else (False,))
        if keys <= 2 * widest and keys // warps in (16, 32)
    ]


@torch.inference_mode()
def tune(shapes: dict[str, ModelConfig], seconds: int) -> None:
    """Improve one kernel's tile after another by the time of whole steps; print what won."""
    from decode import build

    lines = []
    for name, config in shapes.items():
        deadline = time.perf_counter() + seconds / len(shapes)
        lines += _tune_one(name, config, build, deadline)
    print("\n# for MEASURED_TILES in accelerate/kernels/triton/decode_tiles.py")
    print("\n".join(lines))


def _tune_one(
    name: str, config: ModelConfig, build: Callable[[ModelConfig], TransformerLM], deadline: float
) -> list[str]:
    layers = min(TUNED_LAYERS[name], config.num_layers)
    model = build(config.replace(num_layers=layers))
    kv, q = config.num_kv_heads * config.d_head, config.num_heads * config.d_head
    sizes = {
        "gate": (config.d_ff, config.d_model),
        "qkv": (q + 2 * kv, config.d_model),
        "down": (config.d_model, config.d_ff),
        "out": (config.d_model, q),
        "head": (config.vocab_size, config.d_model),
    }
    best = {kernel: choose_tile(kernel, *size, 2) for kernel, size in sizes.items()}
    spread: KVSplits | None = None
    cache = PagedCache(model.config, TUNED_CAPACITY // 64, 64, device="cuda", dtype=torch.bfloat16)

    def step_of(tiles: dict[str, Tile], spread: KVSplits | None) -> GPUStep:
        return GPUStep(
            model,
            cache,
            rows=1,
            max_kv_len=TUNED_CAPACITY,
            pdl=True,
            tiles=tiles,
            kv_splits=spread,
        )

    def measured(tiles: dict[str, Tile], spread: KVSplits | None) -> float:
        try:
            step = step_of(tiles, spread)
            step.tables.copy_(torch.arange(cache.num_pages).view(1, -1))
            graph = recorded(step.run)
            step.lengths.fill_(192)  # replays advance it; there is room for them
            return replay_seconds(graph)
        except Exception as error:
            print(f"  {tiles} {spread}: {type(error).__name__}: {str(error)[:100]}")
            return float("inf")

    def compile_ahead(tiles: dict[str, Tile], spread: KVSplits | None) -> None:
        if time.perf_counter() < deadline:
            step_of(tiles, spread).run()

    time_now = first = measured(best, spread)
    print(f"{name}, {layers} layers: {1e6 * first:.0f} us by the rule", flush=True)
    trials: dict[str, list[object]] = {
        kernel: list(candidates(kernel, *size)) for kernel, size in sizes.items()
    }
    trials["attention"] = list(spreads(config))
    for kernel, tries in trials.items():
        settings = []
        for trial in tries:
            if isinstance(trial, KVSplits):
                settings.append((best, trial))
            else:
                settings.append(({**best, kernel: trial}, spread))
        with ThreadPoolExecutor(8) as pool, torch.inference_mode():
            list(pool.map(lambda setting: _quietly(compile_ahead, *setting), settings))
        torch.cuda.synchronize()
        found = []
        for tiles, spread_ in settings:
            if time.perf_counter() > deadline:
                break
            found.append((measured(tiles, spread_), tiles, spread_))
        found.sort(key=lambda item: item[0])
        shown = [f"{tuple(t[kernel]) if kernel in t else s} {1e6 * us:.0f}" for us, t, s in found]
        print(f"  {kernel}: {'; '.join(map(str, shown[:4]))}; worst {shown[-1:]}", flush=True)
        if found and found[0][0] < 0.997 * time_now:
            time_now, best, spread = found[0]
    print(f"{name}: {1e6 * first:.0f} -> {1e6 * time_now:.0f} us; spread {spread}", flush=True)
    return [
        f'    ("{kernel}", {rows}, {width}, 2): Tile{tuple(best[kernel])},'
        for kernel, (rows, width) in sizes.items()
    ] + [f"    # the spread for {name}, d_head {config.d_head}: {spread}"]


def _quietly(work: Callable[..., object], *args: object) -> None:
    try:
        with torch.inference_mode():
            work(*args)
    except Exception as error:
        print(f"  {args}: {type(error).__name__}: {str(error)[:100]}")
