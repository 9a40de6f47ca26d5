"""The engine, through the public functions: beside the bare decoder, the bound and the peers.

    python bench/engine.py                             on a GPU: rows, workload, prompt; else: cpu
    python bench/engine.py --only rows --shape medium  one part, one shape
    python bench/engine.py --only cpu --threads 2      beside transformers' batched `generate`

rows: `generate`, 1 to 64 rows, greedy and sampled (temperature 0.8, top-k 50, top-p 0.95), as a
share of the bare decoder's rate in the same run: the runner driven directly, greedy, no token read
by the host. The bound reads matrices, keys and values once a step, at the rate of a copy. workload:
256 requests, prompt and answer of 100 to 1,024 tokens each (uniform, seeded), no end token: tokens
of answers per second. prompt: a prompt of 16k tokens arrives among 32 decoding rows; how long their
next token takes. On a GPU bf16, random weights.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM, acceleration
from scratchlm.accounting.parameters import count_parameters
from scratchlm.accounting.pool import bytes_per_page
from scratchlm.config import PRESETS
from scratchlm.inference import GREEDY, Engine, Handle, Sampling, stream
from scratchlm.paged import LAST, PagedCache, Step

SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95)
PROMPT, NEW = 64, 256
SHAPES = {
    "medium": ModelConfig(50_304, 1024, 1024, 24, 16, 2752),
    "gpt2-xl": PRESETS["gpt2-xl"].replace(context_length=1024),
    "qwen3-0.6b": PRESETS["qwen3-0.6b"].replace(context_length=2048),
    "odd 1": ModelConfig(33_000, 1024, 1152, 14, 9, 3200, num_kv_heads=3),
    "odd 2": ModelConfig(48_128, 1024, 1792, 18, 14, 4800),
    "tiny": ModelConfig(512, 1024, 64, 2, 4, 192),  # to try this file where there is no GPU
}
ROWS = (1, 8, 32, 64)
MARKS = {("greedy", 1): 0.95, ("sampled", 1): 0.90}  # of the bare decoder; 0.90 for more rows
PUBLISHED = [  # the same workload on an H200, by their authors
    ("Mini-SGLang", 20_711),
    ("Nano-vLLM", 19_638),
]


def build(config: ModelConfig, device: str) -> TransformerLM:
    """Make a model of random weights: bf16 on a GPU, float32 elsewhere."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = TransformerLM(config, device="meta", dtype=dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(1.0)
    acceleration.join_weights(acceleration.accelerate(model))  # as `load_model` does
    return model.eval().requires_grad_(False)


def random_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


# Rows beside the bare decoder


def generate_rate(model: TransformerLM, rows: int, sampling: Sampling, new: int) -> float:
    """Tokens per second of `stream`, from the first token of all rows to the last."""
    rng, best = random.Random(0), 0.0
    prompts = [random_ids(rng, PROMPT, model.config.vocab_size) for _ in range(rows)]
    for _ in range(3):  # the first makes what is kept
        count, begin, first = [0] * rows, 0.0, 0
        for piece in stream(
            model, prompts, max_new_tokens=new, sampling=sampling, eos_ids=(), seed=0
        ):
            count[piece.row] += 1
            if not begin and all(count):
                begin, first = time.perf_counter(), sum(count)
        best = max(best, (sum(count) - first) / (time.perf_counter() - begin))
    return best


@torch.inference_mode()
def bare_rate(model: TransformerLM, rows: int, new: int) -> float:
    """Tokens per second of the runner alone: greedy steps, the host reads none."""
    pages = -(-(PROMPT + new) // 64)
    weight = model.token_embeddings.weight
    cache = PagedCache(model.config, rows * pages, 64, device=weight.device, dtype=weight.dtype)
    runner = acceleration.make_runner(model, cache, max_rows=rows, exact=False)
    if runner is None:
        raise SystemExit("error: no runner takes this model here")
    tables = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
    last = torch.zeros(rows, dtype=torch.long, device=weight.device)
    every, ones, true = list(range(rows)), [1] * rows, [True] * rows
    prompt = random_ids(random.Random(0), PROMPT, model.config.vocab_size)
    for row in every:
        runner.run(Step(prompt, [PROMPT], [0], [row], [False]), tables, last)

    def steps() -> float:
        begin = time.perf_counter()
        for at in range(PROMPT, PROMPT + new - 1):
            logits = runner.run(Step([LAST] * rows, ones, [at] * rows, every, true), tables, last)
            last.copy_(logits.argmax(-1))
        if weight.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return rows * (new - 1) / min(steps() for _ in range(4))


def copy_rate() -> float:
    """Bytes per second of a large copy on the GPU, read and written."""
    a = torch.randint(1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * a.nbytes / min(times)


def bytes_of_step(config: ModelConfig, rows: int, length: float) -> float:
    """Return the bytes that a step must read in bf16: matrices, keys and values, once."""
    kept = 2 * config.num_layers * config.num_kv_heads * config.d_head * length * rows
    return 2 * (count_parameters(config).matmul + kept)


def rows_table(names: Sequence[str], rows: Sequence[int], device: str, new: int) -> str:
    lines = []
    memory_rate = copy_rate() if device == "cuda" else None
    for name in names:
        config = SHAPES[name]
        model = build(config, device)
        for count in rows:
            bare, bound, of_bound = bare_rate(model, count, new), None, ["", ""]
            if memory_rate is not None:
                bound = count * memory_rate / bytes_of_step(config, count, PROMPT + new / 2)
            for kind, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
                rate = generate_rate(model, count, sampling, new)
                mark = "" if kind == "greedy" and count > 1 else MARKS.get((kind, count), 0.90)
                if bound is not None:
                    of_bound = [f"{x / bound:.2f}" for x in (bare, rate)]
                share = f"{rate / bare:.2f}"
                figures = [f"{bare:.0f}", of_bound[0], f"{rate:.0f}", of_bound[1], share, mark]
                lines.append([name, count, kind, *figures])
                print(*lines[-1], sep=" | ", flush=True)
        del model
    header = ["shape", "rows", "choice", "bare decoder, tokens/s", "of the bound"]
    return table([*header, "generate, tokens/s", "of the bound", "share", "mark"], lines)


# The small engines' workload


def workload(model: TransformerLM, requests: int, lengths: tuple[int, int], exact: bool) -> float:
    """Tokens of answers per second, all requests submitted at once."""
    rng = random.Random(0)
    work = [
        (random_ids(rng, rng.randint(*lengths), model.config.vocab_size), rng.randint(*lengths))
        for _ in range(requests)
    ]
    longest = max(len(prompt) + new for prompt, new in work)
    size = model.token_embeddings.weight.element_size()
    page = bytes_per_page(model.config, 64, size)
    memory = min(requests * -(-longest // 64) * page, 64 << 30)
    engine = Engine(model, memory=memory, max_rows=requests, exact=exact)

    def run(work: list[tuple[list[int], int]]) -> float:
        begin = time.perf_counter()
        handles = [
            engine.submit(prompt, max_new_tokens=new, sampling=Sampling(0.6), eos_ids=(), seed=i)
            for i, (prompt, new) in enumerate(work)
        ]
        engine.run()
        took = time.perf_counter() - begin
        assert all(handle.done for handle in handles)
        engine.forget_prefixes()
        return took

    run([(prompt[:64], 8) for prompt, _ in work])  # makes what is kept
    return sum(new for _, new in work) / min(run(work) for _ in range(2))


def workload_table(name: str, requests: int, lengths: tuple[int, int], device: str) -> str:
    model = build(SHAPES[name].replace(context_length=2 * lengths[1] + 64), device)
    lines = []
    for exact in (False, True):
        rate = workload(model, requests, lengths, exact)
        lines.append(["ours, exact=True" if exact else "ours", f"{rate:.0f}", "this run"])
        print(*lines[-1], sep=" | ", flush=True)
    lines += [[who, f"{rate}", "published, H200"] for who, rate in PUBLISHED]
    note = f"{requests} requests, prompt and answer {lengths[0]} to {lengths[1]} tokens, {name}, "
    note += "temperature 0.6, no end token.\n\n"
    return note + table(["engine", "tokens/s of answers", "measured"], lines)


# A long prompt among decoding rows


def gaps(handles: Sequence[Handle], engine: Engine, done: Callable[[], bool]) -> list[float]:
    """Step until `done`; return the seconds between the tokens of the rows."""
    seen, times = [0] * len(handles), [0.0] * len(handles)
    found: list[float] = []
    while not done():
        engine.step()
        now = time.perf_counter()
        for i, handle in enumerate(handles):
            new = len(handle._pieces)
            if new > seen[i]:
                if seen[i]:
                    found.append(now - times[i])
                seen[i], times[i] = new, now
    return found


def prompt_table(name: str, rows: int, length: int, device: str) -> str:
    config = SHAPES[name].replace(context_length=length + 1024)
    model, rng = build(config, device), random.Random(0)
    engine = Engine(model, num_pages=-(-(length + 1024) // 64) + rows * 24, max_rows=rows + 1)
    for _ in range(3):  # the first two make what is kept
        handles = [
            engine.submit(
                random_ids(rng, PROMPT, config.vocab_size),
                max_new_tokens=1024,
                sampling=SAMPLED,
                eos_ids=(),
                seed=i,
            )
            for i in range(rows)
        ]
        usual = gaps(handles, engine, lambda: all(len(h._pieces) >= 64 for h in handles))  # noqa: B023
        late = engine.submit(
            random_ids(rng, length, config.vocab_size), max_new_tokens=2, eos_ids=(), seed=0
        )
        while_read = gaps(handles, engine, lambda: len(late._pieces) > 0)  # noqa: B023
        for handle in (*handles, late):
            handle.cancel()
    step, worst = statistics.median(usual), max(while_read)
    tokens = engine.scheduler.max_tokens
    note = f"A prompt of {length:,} tokens arrives among {rows} decoding rows, {name}, "
    note += f"max_tokens_per_step={tokens}.\n\n"
    header = ["usual step, ms", "longest wait for a token, ms", "in steps", "mark"]
    line = [f"{step * 1e3:.2f}", f"{worst * 1e3:.2f}", f"{worst / step:.2f}", "3"]
    return note + table(header, [line])


# CPU: beside transformers


def cpu_table(rounds: int) -> str:
    from generate import SHAPES as CPU_SHAPES
    from generate import best_rounds, make, prompts_of, run_ours, run_theirs

    name = "100 M"
    theirs, ours = make(CPU_SHAPES[name])
    lines = []
    mixed = [8 + 13 * i % 120 for i in range(16)]
    for lengths, new, mark in ((mixed, 16, "2.0"), ([32], 24, "1.5")):
        prompts = prompts_of(lengths, CPU_SHAPES[name][-1])
        runs = [partial(run_theirs, theirs, prompts, new), partial(run_all, ours, prompts, new)]
        if len(lengths) == 1:
            runs[1] = partial(run_ours, ours, prompts, new)
        same = runs[0]()[0] == runs[1]()[0]
        if len(lengths) == 1:
            their_time, our_time = best_rounds(runs, rounds)
        else:
            pairs = [[sum(run()[1]) for run in runs] for _ in range(rounds)]
            their_time, our_time = (min(side) for side in zip(*pairs, strict=True))
        count = new * len(prompts)
        lines.append(
            [
                f"{len(lengths)} requests of {min(lengths)} to {max(lengths)} tokens, {new} new",
                f"{count / their_time:.1f}",
                f"{count / our_time:.1f}",
                f"{their_time / our_time:.2f}×",
                f"{mark}×",
                "yes" if same else "no",
            ]
        )
        print(*lines[-1], sep=" | ", flush=True)
    header = ["work, 100 M parameters", "transformers tokens/s", "ours tokens/s", "ratio", "mark"]
    return table([*header, "same tokens"], lines)


def run_all(
    model: TransformerLM, prompts: list[list[int]], new: int
) -> tuple[list[list[int]], list[float]]:
    """Run requests through an engine that is made for them; return tokens and seconds."""
    begin = time.perf_counter()
    engine = Engine(model, num_pages=4 * len(prompts), max_rows=len(prompts))
    handles = [engine.submit(p, max_new_tokens=new, sampling=GREEDY, eos_ids=()) for p in prompts]
    engine.run()
    tokens = [[piece.token_id for piece in handle] for handle in handles]
    return tokens, [time.perf_counter() - begin]


TITLES = {
    "rows": "generate beside the bare decoder",
    "workload": "the small engines' workload",
    "prompt": "a long prompt among decoding rows",
    "cpu": "many requests on a CPU",
}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(TITLES))
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--new", type=int, default=NEW, help="rows: tokens of each answer")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=(100, 1024))
    parser.add_argument("--prompt-length", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    every = [name for name in SHAPES if name != "tiny"]
    shapes = [options.shape] if options.shape else every
    one = options.shape or "qwen3-0.6b"
    parts = {
        "rows": lambda: rows_table(shapes, options.rows, device, options.new),
        "workload": lambda: workload_table(one, options.requests, tuple(options.lengths), device),
        "prompt": lambda: prompt_table(one, 32, options.prompt_length, device),
        "cpu": lambda: cpu_table(options.rounds),
    }
    default = ["rows", "workload", "prompt"] if device == "cuda" else ["cpu"]
    for part in [options.only] if options.only else default:
        body = parts[part]()
        print(body)
        if options.no_write:
            continue
        where = torch.cuda.get_device_name() if device == "cuda" else machine()
        if part == "cpu":
            body += (
                f"\n\nFloat32, threads: {options.threads}, {options.rounds} alternating rounds. "
            )
            body += f"Load average at the end: {os.getloadavg()[0]:.1f}."
        write_section(
            f"The engine: {TITLES[part]}",
            " ".join(
                [
                    "python bench/engine.py --only",
                    part,
                    *(["--shape", one] if options.shape else []),
                ]
            ),
            where,
            versions("torch", "triton", "transformers"),
            body,
        )


if __name__ == "__main__":
    main()
