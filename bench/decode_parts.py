"""Parts of bench/decode.py: each kernel of a step alone, and the measuring of tile sizes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from results import table
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.graph_decoder import GraphDecoder
from scratchlm.accelerate.kernels.triton.decode_tiles import (
    KVSplits,
    Tile,
    choose_tile,
    power_of_two,
)

# Enough layers that the caches of the chip do not hold their weights.
TUNED_LAYERS = {"gpt2-xl": 6, "medium": 14, "qwen3-0.6b": 12}
TUNED_CAPACITY = 320
REPLAYS = 20


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


# Is it right, before it is timed


@torch.inference_mode()
def check(shapes: dict[str, ModelConfig]) -> None:
    """Compare steps of two layers with the model, in float32 and bfloat16, in every way to run."""
    from decode import build

    ways = ({}, {"pdl": False}, {"graph": False}, {"graph": False, "pdl": False})
    ways += ({"kv_splits": KVSplits(32, 4, 3)},)
    for name, config in shapes.items():
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
            model = build(config.replace(num_layers=2)).to(dtype)
            for batch in (1, 3, 8):
                handed_on = (
                    ({"kv_splits": KVSplits(32, 4, 3, deferred_combine=True)},)
                    if batch <= 4
                    else ()
                )
                found = [_after_three_steps(model, batch, way) for way in (*ways, *handed_on)]
                errors = [((got - own).norm() / own.norm()).item() for got, own in found]
                same = all(torch.equal(got, found[0][0]) for got, _ in found[:4])
                # more rows go through the library's products, which may choose another order
                verdict = "ok" if max(errors) < limit and (same or batch > 4) else "WRONG"
                print(f"{name}, {dtype}, batch {batch}: {verdict}, {max(errors):.1e}, same: {same}")


def _after_three_steps(
    model: TransformerLM, batch: int, way: dict[str, object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a decoder and of the model, for rows of different lengths."""
    torch.manual_seed(batch)
    device = model.token_embeddings.weight.device
    ids = torch.randint(model.config.vocab_size, (batch, 100), device=device)
    mask = torch.ones(batch, 97, dtype=torch.bool, device=device)
    mask[1:2, :60] = False
    caches = [model.new_cache(batch, 101) for _ in range(2)]
    for cache in caches:
        model.hidden(ids[:, :97], cache=cache, attention_mask=mask)
    decoder = GraphDecoder(model, caches[0], **way)  # type: ignore[arg-type]
    for i in (97, 98, 99):
        got = decoder.step(ids[:, i])
        own = model(ids[:, i : i + 1], cache=caches[1])[:, 0]
    return got.clone(), own.float()


# Each kernel alone


@torch.inference_mode()
def kernels(shapes: dict[str, ModelConfig], rate: float) -> str:
    from decode import PROMPT, STEPS, build

    rows = []
    for name, config in shapes.items():
        model = build(config)
        step = GPUStep(model, model.new_cache(1, PROMPT + STEPS), pdl=True, greedy=True)
        length = PROMPT + STEPS // 2
        step.lengths.fill_(length)
        whole = 0.0
        for part, (work, count, read) in _parts(step, config, length).items():
            seconds = replay_seconds(recorded(work)) / count
            step.lengths.fill_(length)
            step.ids.zero_()
            whole += seconds * (config.num_layers if count > 1 else 1)
            rows.append(
                [
                    name,
                    part,
                    f"{1e6 * seconds:.2f}",
                    f"{1e6 * read / rate:.2f}",
                    f"{read / seconds / 1e12:.2f}",
                ]
            )
        # replays advance the lengths; the cache has room for them
        graph = recorded(step.run)
        step.lengths.fill_(PROMPT)
        seconds = replay_seconds(graph)
        rows.append([name, "sum of the parts", f"{1e6 * whole:.0f}", "", ""])
        rows.append([name, "the whole step", f"{1e6 * seconds:.0f}", "", ""])
        print(table(["shape", "kernel", "us", "floor", "TB/s"], rows[-8:]), flush=True)
        del model, step
    return (
        "Each kernel alone over all layers, with programmatic dependent launch; what fits in the "
        "L2 reads faster.\n\n" + table(["shape", "kernel", "µs", "floor, µs", "TB/s"], rows)
    )


Part = tuple[Callable[[], object], int, float]


def _parts(step: GPUStep, config: ModelConfig, length: int) -> dict[str, Part]:
    d, heads = config.d_model, config.num_heads * config.d_head
    kv = config.num_kv_heads * config.d_head
    x, y = step.x
    layers, many = step.layers, config.num_layers

    def each(work: Callable[[torch.nn.Module], object]) -> Callable[[], object]:
        return lambda: [work(layer) for layer in layers]

    def qkv(layer) -> None:  # type: ignore[no-untyped-def]
        attn = layer.attn
        matrices = [attn.q_proj, attn.k_proj, attn.v_proj]
        step._project_few("qkv", x, layer.ln1, matrices, [step.q, step.k, step.v])

    def qkv_and_attention(layer) -> None:  # type: ignore[no-untyped-def]
        attn = layer.attn
        step._project_attend(x, layer.ln1, [attn.q_proj, attn.k_proj, attn.v_proj], attn)

    def head() -> None:
        step._project_few("head", x, step.model.ln_final, [step._head()], [step.logits])

    weights, kept, shares = (
        2 * d * (heads + 2 * kv),
        4 * kv * length,
        step.kv_splits.deferred_splits,
    )
    attention: dict[str, Part] = {
        "norm, q k v": (each(qkv), many, weights),
        "attention": (
            each(lambda layer: step._attend(layer.attn, step.q, step.k, step.v)),
            many,
            kept,
        ),
    }
    if step._clusters_take(layers[0].attn, layers[0].ln1):
        attention = {"norm, q k v, attention": (each(qkv_and_attention), many, weights + kept)}
        shares = 1
    return attention | {
        "out, add": (
            each(
                lambda layer: step._project_add("out", x, step.a, layer.attn.output_proj, y, shares)
            ),
            many,
            2 * heads * d,
        ),
        "norm, gate": (
            each(lambda layer: step._norm_gate(y, layer.ln2, layer.ffn)),
            many,
            4 * d * config.d_ff,
        ),
        "down, add": (
            each(lambda layer: step._project_add("down", y, step.u, layer.ffn.w2, x)),
            many,
            2 * d * config.d_ff,
        ),
        "norm, head": (head, 1, 2 * d * config.vocab_size),
    }


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
    print("\n# for MEASURED in ops/kernels/tiles.py")
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
    cache = model.new_cache(1, TUNED_CAPACITY)

    def measured(tiles: dict[str, Tile], spread: KVSplits | None) -> float:
        try:
            decoder = GraphDecoder(model, cache, tiles=tiles, kv_splits=spread)
            cache.length = 192
            decoder.step([1])
            return replay_seconds(decoder._recorded[decoder.max_kv_len])
        except Exception as error:
            print(f"  {tiles} {spread}: {type(error).__name__}: {str(error)[:100]}")
            return float("inf")
        finally:
            cache.reset()

    def compile_ahead(tiles: dict[str, Tile], spread: KVSplits | None) -> None:
        if time.perf_counter() < deadline:
            cache = model.new_cache(1, TUNED_CAPACITY)
            GPUStep(model, cache, pdl=True, tiles=tiles, kv_splits=spread).run()

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
