"""Decoding on a GPU: ours beside the peers, as a share of what the memory's speed allows.

    python bench/decode.py                         all tables (about four minutes)
    python bench/decode.py --only one --no-peers   one of: one, batches, prefill
    python bench/decode.py --shape medium          one of: gpt2-xl, medium, qwen3-0.6b
    python bench/decode.py --tune --shape medium   measure tiles inside whole steps, print the best

bf16, random weights, a prompt of 64 tokens, then greedy steps; tokens stay on the device. The bound
is the tokens/s of a step that does nothing but read the matrices and the keys and values once, at
the rate of a device-to-device copy measured in the same run. Prefill: MFU over the rate of a bf16
product of 8192³.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from peers import hugging_face
from results import table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate.gpu_runner import GPURunner
from scratchlm.accounting.parameters import count_parameters
from scratchlm.config import PRESETS
from scratchlm.paged import LAST, PagedCache, Step

PROMPT, STEPS, PEER_STEPS, LIMIT_S = 64, 256, 16, 30
COMPILED_LAYERS = 28  # the most that transformers is compiled with: more takes minutes
SHAPES = {
    "gpt2-xl": (PRESETS["cs336-gpt2-xl"].replace(context_length=1024), 0.75),
    "medium": (ModelConfig(50_304, 1024, 1024, 24, 16, 2752), 0.55),
    "qwen3-0.6b": (PRESETS["qwen3-0.6b"].replace(context_length=2048), 0.50),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TITLES = {
    "one": "one row",
    "batches": "batches",
    "prefill": "prefill",
}


def build(config: ModelConfig) -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(config, device="meta", dtype=torch.bfloat16).to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(1.0)
    return model


def seconds_of(work: Callable[[], object], warmup: int, repeats: int) -> float:
    """Median device time of `work`."""
    for _ in range(warmup):
        work()
    events = []
    for _ in range(repeats):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        work()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def copy_rate() -> float:
    """Bytes per second of a large copy, read and written."""
    a = torch.randint(1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / seconds_of(lambda: b.copy_(a), 3, 10)


def matmul_rate() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: a @ b, 3, 15)


def matrices(config: ModelConfig) -> int:
    return count_parameters(config).matmul


def bytes_of_step(config: ModelConfig, batch: int, length: float) -> float:
    kept = 2 * config.num_layers * config.num_kv_heads * config.d_head * length * batch
    return 2 * (matrices(config) + kept)


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Give up on what takes too long to compile."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def attempt(name: str, work: Callable[[], float], seconds: int = LIMIT_S) -> float | None:
    begin = time.perf_counter()
    try:
        with limited(seconds):
            result = work()
    except Exception as error:
        print(f"  {name}: none ({type(error).__name__}: {str(error).splitlines()[0][:150]})")
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    print(f"  {name}: {result:.1f} tokens/s ({time.perf_counter() - begin:.0f} s)", flush=True)
    return result


# Ours


class Bare:
    """The runner alone, over rows of one length."""

    def __init__(self, model: TransformerLM, rows: int, **options: object) -> None:
        pages = -(-(PROMPT + STEPS) // 64)
        cache = PagedCache(model.config, rows * pages, 64, device="cuda", dtype=torch.bfloat16)
        self.runner = GPURunner(model, cache, max_rows=rows, **options)  # type: ignore[arg-type]
        self.tables = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
        self.last = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.slots, self.length = list(range(rows)), 0

    def read(self, tokens: list[list[int]]) -> Tensor:
        """Read as many tokens of every row; return the logits after them."""
        count, rows = len(tokens[0]), len(self.slots)
        step = Step(
            [token for row in tokens for token in row],
            [count] * rows,
            [self.length] * rows,
            self.slots,
            [True] * rows,
        )
        logits = self.runner.run(step, self.tables, self.last)
        self.length += count
        return logits

    def step(self) -> None:
        """Read the token chosen last, and choose the next."""
        logits = self.read([[LAST]] * len(self.slots))
        torch.argmax(logits, dim=-1, out=self.last)


def started(model: TransformerLM, rows: int, **options: object) -> Bare:
    """Return rows whose prompt is read."""
    bare = Bare(model, rows, **options)
    bare.read(torch.randint(model.config.vocab_size, (rows, PROMPT)).tolist())
    bare.step()
    return bare


@torch.inference_mode()
def our_rate(model: TransformerLM, rows: int, read: bool = False, **options: object) -> float:
    """Tokens per second of greedy steps; `read`: the host reads every token before the next."""
    bare = started(model, rows, **options)
    times = []
    for _ in range(3):
        bare.length = PROMPT + 1  # the same steps again
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS - 1):
            bare.step()
            if read:
                bare.last.tolist()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return rows * (STEPS - 1) / min(times)


@torch.inference_mode()
def error_beside_model(model: TransformerLM, rows: int = 1) -> float:
    """Relative difference of the logits of a recorded step and of the model's own."""
    ids = torch.randint(model.config.vocab_size, (rows, PROMPT + 1))
    bare = Bare(model, rows)
    bare.read(ids[:, :PROMPT].tolist())
    bare.last.copy_(ids[:, PROMPT])
    got = bare.read([[LAST]] * rows).float()
    own = model(ids.cuda())[:, -1].float()
    return ((got - own).norm() / own.norm()).item()


def compiled_rate(model: TransformerLM) -> float:
    """Our plain model under torch.compile with CUDA graphs: what a compiler makes of it."""
    run = torch.compile(_step_without_cache_growth(model), mode="reduce-overhead", dynamic=False)
    with torch.inference_mode():
        ids = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        for _ in range(4):
            run(ids)
        seconds = seconds_of(lambda: run(ids), 4, 32)
    return 1 / seconds


def _step_without_cache_growth(model: TransformerLM) -> Callable[[Tensor], Tensor]:
    """A step on a cache of one fixed length: kinder to the compiler than real decoding is."""
    cache = model.new_cache(1, PROMPT + STEPS)
    with torch.inference_mode():
        prompt = torch.randint(model.config.vocab_size, (1, PROMPT + STEPS // 2), device="cuda")
        model.hidden(prompt, cache=cache)

    def step(ids: Tensor) -> Tensor:
        logits = model(ids, cache=cache)
        cache.length -= 1
        return logits[:, -1].argmax(dim=-1)

    return step


# transformers


def their_model(config: ModelConfig) -> torch.nn.Module:
    return hugging_face(config, bos_token_id=None, eos_token_id=None).to(torch.bfloat16).eval()


@torch.inference_mode()
def their_rate(model: torch.nn.Module, batch: int, **options: object) -> float:
    """Tokens per second of greedy `generate`, its prefill subtracted."""
    prompt = torch.randint(1000, (batch, PROMPT), device="cuda")
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, **options}

    def run(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **given)  # type: ignore[operator]
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    few, many = 4, 4 + PEER_STEPS
    run(many)
    gain = min(run(many) for _ in range(2)) - min(run(few) for _ in range(2))
    return batch * PEER_STEPS / gain


# Tables


def one_row(names: list[str], rate: float, peers: bool) -> str:
    rows = []
    for name in names:
        config, target = SHAPES[name]
        bound = rate / bytes_of_step(config, 1, PROMPT + STEPS / 2)
        model = build(config)
        print(
            f"{name}: bound {bound:.0f} tokens/s; logits differ by {error_beside_model(model):.1e}"
        )
        found = {
            "ours": attempt("ours", lambda: our_rate(model, 1)),  # noqa: B023
            "ours, every token read by the host": attempt(
                "ours, read",
                lambda: our_rate(model, 1, read=True),  # noqa: B023
            ),
            "ours, no programmatic dependent launch": attempt(
                "ours, no programmatic dependent launch",
                lambda: our_rate(model, 1, pdl=False),  # noqa: B023
            ),
        }
        if peers and name == "medium":
            found["our plain model, torch.compile with CUDA graphs"] = attempt(
                "compiled",
                lambda: compiled_rate(model),  # noqa: B023
            )
            torch._dynamo.reset()
        del model
        if peers:
            found |= their_rates(config)
        ours = found["ours"] or float("nan")
        for who, per_s in found.items():
            if per_s is not None:
                goal = f"{target}" if who == "ours" else ""
                rows.append(
                    [name, who, f"{per_s:.0f}", f"{per_s / bound:.3f}", goal, f"{ours / per_s:.1f}"]
                )
    header = ["shape", "who", "tokens/s", "of the bound", "target", "ours over it"]
    return table(header, rows)


def their_rates(config: ModelConfig) -> dict[str, float | None]:
    try:
        peer = their_model(config)
    except Exception as error:
        print(f"  transformers: none ({type(error).__name__}: {error})")
        return {}
    static = {"cache_implementation": "static"}
    found = {
        "transformers, default cache": attempt("transformers", lambda: their_rate(peer, 1)),
        "transformers, static cache": attempt(
            "transformers, static", lambda: their_rate(peer, 1, disable_compile=True, **static)
        ),
    }
    if config.num_layers <= COMPILED_LAYERS:
        found["transformers, static cache, compiled"] = attempt(
            "transformers, static, compiled", lambda: their_rate(peer, 1, **static)
        )
    return found


def batches(rate: float, peers: bool) -> str:
    config, _ = SHAPES["medium"]
    model, ours, theirs = build(config), {}, {}
    print(f"medium, batch 8: logits differ by {error_beside_model(model, 8):.1e}")
    for batch in BATCHES:
        ours[batch] = attempt(f"ours, batch {batch}", lambda: our_rate(model, batch))  # noqa: B023
    del model
    if peers:
        peer = their_model(config)
        for batch in BATCHES:
            theirs[batch] = attempt(
                f"transformers, batch {batch}",
                lambda: their_rate(peer, batch),  # noqa: B023
            )
    rows = []
    for batch in BATCHES:
        bound = batch * rate / bytes_of_step(config, batch, PROMPT + STEPS / 2)
        mine, peer_rate = ours[batch], theirs.get(batch)
        rows.append(
            [
                batch,
                "" if peer_rate is None else f"{peer_rate:.0f}",
                "" if mine is None else f"{mine:.0f}",
                "" if mine is None else f"{mine / bound:.2f}",
                "" if mine is None or peer_rate is None else f"{mine / peer_rate:.1f}",
            ]
        )
    return table(["batch", "transformers", "ours", "of the bound", "ratio"], rows)


@torch.inference_mode()
def prefill() -> str:
    seq = 8192
    config = SHAPES["medium"][0].replace(context_length=seq)
    model, rate = build(config), matmul_rate()
    ids = torch.randint(config.vocab_size, (1, seq), device="cuda")
    head = config.vocab_size * config.d_model
    work = 2 * (matrices(config) - head) + 4 * config.num_layers * config.d_model * seq
    causal = work - 2 * config.num_layers * config.d_model * seq
    cache = model.new_cache(1, seq)

    def with_cache() -> Tensor:
        cache.reset()
        return model.lm_head(model.hidden(ids, cache=cache)[:, -1])

    def without() -> Tensor:
        return model.lm_head(model.hidden(ids)[:, -1])

    from torch.nn.attention import SDPBackend, sdpa_kernel

    cudnn = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    rows = []
    for name, run in (("eager, cache filled", with_cache), ("blocks compiled", without)):
        if run is without:
            for layer in model.layers:
                layer.compile()
        for backend in ("default attention", "cuDNN attention"):
            begin = time.perf_counter()
            chosen = sdpa_kernel(cudnn, set_priority=True) if "cuDNN" in backend else None
            try:
                with chosen or contextlib.nullcontext(), limited(LIMIT_S):
                    seconds = seconds_of(run, 3, 8)
            except Exception as error:
                print(f"  {name}, {backend}: none ({type(error).__name__}: {str(error)[:150]})")
                continue
            mfu, half = (seq * flops / seconds / rate for flops in (work, causal))
            print(f"  {name}, {backend}: MFU {mfu:.3f} ({time.perf_counter() - begin:.0f} s)")
            rows.append([f"{name}, {backend}", f"{1e3 * seconds:.1f}", f"{mfu:.3f}", f"{half:.3f}"])
    return table(["8192 tokens, medium", "ms", "MFU (target 0.55)", "counting seen pairs"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("one", "batches", "prefill"))
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=int, default=150, help="how long --tune may take")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a CUDA device")
    names, peers, rate = args.shape or list(SHAPES), not args.no_peers, copy_rate()
    where = f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s"
    print(where, flush=True)
    if args.tune:
        from decode_tiles import tune

        return tune({name: SHAPES[name][0] for name in names}, args.seconds)
    parts: dict[str, Callable[[], str]] = {
        "one": lambda: one_row(names, rate, peers),
        "batches": lambda: batches(rate, peers),
        "prefill": prefill,
    }
    for part, work in parts.items():
        if args.only not in (None, part):
            continue
        text = work()
        print(f"\n{text}", flush=True)
        write_section(
            f"Decoding on a GPU: {TITLES[part]}",
            f"python bench/decode.py --only {part}",
            where,
            versions("torch", "triton", "transformers"),
            text,
        )


if __name__ == "__main__":
    main()
