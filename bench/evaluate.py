"""Likelihoods for evaluation: our engine beside lm-evaluation-harness's `hf` model.

    python bench/evaluate.py [--rounds 3] [--threads 2] [--shape "100 M"]
    python bench/evaluate.py --device cuda --preset qwen3-0.6b --dtype bfloat16 \
        --cases 64 --batch-size 64 [--exact]

The same random weights and token ids for both. Where lm-eval is installed, the peer is its own
`HFLM._loglikelihood_tokens`; else the same computation by transformers alone, which the table then
says: longest first, padded batches, one forward each, log-softmax over all logits. What cases begin
with alike we compute once.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.config import Rotary, preset
from scratchlm.evaluation import running
from scratchlm.inference import Engine, likelihoods, load_model
from scratchlm.interop import write_hf
from scratchlm.tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]
SHAPES = {
    "10 M": ModelConfig(8192, 1024, 256, 8, 8, positions=Rotary(layout="half")),
    "100 M": ModelConfig(32000, 1024, 768, 12, 12, positions=Rotary(layout="half")),
}
CASES = {"10 M": 16, "100 M": 4}  # as many as two cores do in seconds


def workloads(vocab: int, cases: int) -> dict[str, list[Pair]]:
    """Return pairs of a context and a continuation, as tasks of these kinds have them."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return draw.choices(range(vocab), k=count)

    shots = ids(400)
    few = [(shots + ids(60), [ids(8) for _ in range(4)]) for _ in range(cases)]
    zero = [(ids(draw.randint(60, 180)), [ids(8) for _ in range(4)]) for _ in range(cases)]
    return {
        "choice, 5 shots (400 + 60 tokens, 4 × 8)": [(c, rest) for c, four in few for rest in four],
        "choice (60–180 tokens, 4 × 8)": [(c, rest) for c, four in zero for rest in four],
        "texts (512 tokens each)": [(ids(1), ids(511)) for _ in range(max(4, cases // 4))],
    }


class PlainPeer:
    """transformers' model with padded batches, as the harness has it."""

    def __init__(self, model: Any, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size

    @torch.inference_mode()
    def __call__(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Score pairs."""
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        found: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            rows = [(pairs[i][0] + pairs[i][1])[:-1] for i in batch]
            longest = max(map(len, rows))
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            logits = self.model(ids.to(self.model.device)).logits.float().log_softmax(-1)
            for i, row, lines in zip(batch, rows, logits, strict=True):
                rest = torch.tensor(pairs[i][1], device=lines.device)
                lines = lines[len(row) - len(rest) : len(row)]
                total = lines.gather(1, rest[:, None]).sum()
                found[i] = float(total), bool((lines.argmax(-1) == rest).all())
        return [found[i] for i in range(len(pairs))]


class HarnessPeer:
    """The harness's own `hf` model."""

    def __init__(self, model: Any, batch_size: int, folder: Path) -> None:
        from lm_eval.models.huggingface import HFLM

        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
        )
        self.lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)

    def __call__(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Score pairs."""
        requests = [((str(c), str(r)), c, r) for c, r in pairs]
        found: list[tuple[float, bool]] = self.lm._loglikelihood_tokens(requests, disable_tqdm=True)
        return found


def timed(run: Callable[[], list[tuple[float, bool]]]) -> tuple[list[tuple[float, bool]], float]:
    """Return what a contestant found, and its seconds."""
    begin = time.perf_counter()
    found = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


def make(config: ModelConfig, options: argparse.Namespace) -> tuple[Any, Any, Engine, str]:
    """Return transformers' model, the peer, our engine, the peer's name; with the same weights."""
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])
        file = tokenizer.save(Path(name) / "tokenizer")
        torch.manual_seed(0)
        model = TransformerLM(config)
        if not config.tie_embeddings:
            with torch.no_grad():
                model.lm_head.weight.mul_(3)  # opinions, so that argmax has no ties
        write_hf(folder, config, model.state_dict(), file, dtype)
        loaded = load_model(folder, device=options.device)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        theirs = theirs.to(options.device).eval()
        peer: Any = PlainPeer(theirs, options.batch_size)
        name = "transformers as lm-eval's hf calls it"
        if find_spec("lm_eval") is not None and not options.plain_peer:
            peer, name = HarnessPeer(theirs, options.batch_size, folder), "lm-eval's hf"
    engine = running.make_engine(loaded)
    if options.exact:
        pool = {"num_pages": engine.pool.num_pages, "page_size": engine.scheduler.page_size}
        engine = Engine(loaded.model, max_rows=engine.max_rows, exact=True, **pool)
    return theirs, peer, engine, name


def compare(name: str, config: ModelConfig, options: argparse.Namespace) -> list[list[object]]:
    """Return rows of the table for one model."""
    theirs, peer, engine, peer_name = make(config, options)
    rows = []
    answers: list[tuple[Sequence[Pair], list[tuple[float, bool]], list[tuple[float, bool]]]] = []
    for what, pairs in workloads(config.vocab_size, options.cases or CASES.get(name, 16)).items():

        def ours(pairs: list[Pair] = pairs) -> list[tuple[float, bool]]:
            engine.forget_prefixes()
            return [(one.total, one.is_greedy) for one in likelihoods(engine, pairs)]

        our_time = their_time = float("inf")
        for _ in range(options.rounds):  # the first also warms up; the best counts
            found, seconds = timed(ours)
            our_time = min(our_time, seconds)
            expected, seconds = timed(partial(peer, pairs))
            their_time = min(their_time, seconds)
        answers.append((pairs, found, expected))
        same = sum(a == b for (_, a), (_, b) in zip(found, expected, strict=True))
        rows.append(
            [
                *(name, what, peer_name),
                *(f"{len(pairs) / t:.1f}" for t in (their_time, our_time)),
                f"{their_time / our_time:.2f}×",
                *(f"{apart(found, expected):.1e}", f"{same} of {len(pairs)}"),
            ]
        )
        print(" | ".join(map(str, rows[-1])), flush=True)
    if options.dtype != "float32":  # whose rounding is it?
        wide = PlainPeer(theirs.float(), options.batch_size)
        for row, (pairs, found, expected) in zip(rows, answers, strict=True):
            truth = wide(pairs)
            row += [f"{apart(found, truth):.1e}", f"{apart(expected, truth):.1e}"]
            print(" | ".join(map(str, row)), flush=True)
    return rows


def apart(found: Sequence[tuple[float, bool]], others: Sequence[tuple[float, bool]]) -> float:
    """Return the largest difference of two likelihoods."""
    return max(abs(a - b) for (a, _), (b, _) in zip(found, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", type=int, help="of each kind; by default by the model")
    parser.add_argument("--batch-size", type=int, default=16, help="the peer's")
    parser.add_argument("--shape", choices=SHAPES, help="only this one; writes nothing")
    parser.add_argument("--preset", help="a model by name instead")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--plain-peer", action="store_true", help="without lm-eval")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models = {n: c for n, c in SHAPES.items() if options.shape in (None, n)}
    if options.preset:
        config = preset(options.preset)
        models = {options.preset: config.replace(context_length=min(2048, config.context_length))}
    rows = [row for name, config in models.items() for row in compare(name, config, options)]
    if options.shape:
        return
    header = [
        *("model", "work", "peer", "peer pairs/s", "ours pairs/s", "ratio"),
        *("largest difference (nats)", "same greedy flags"),
    ]
    if options.dtype != "float32":
        header += ["ours from float32", "peer from float32"]
    where = machine()
    if options.device != "cpu":
        where = torch.cuda.get_device_name()
    body = table(header, rows) + (
        f"\n\n{options.dtype}, {options.rounds} alternating rounds, the best of each; "
        f"{options.threads} threads, load average at the end {os.getloadavg()[0]:.1f}."
    )
    words = [f"--rounds {options.rounds}"]
    words += [f"--cases {options.cases}"] if options.cases else []
    words += [f"--batch-size {options.batch_size}"] if options.batch_size != 16 else []
    words += [f"--preset {options.preset}"] if options.preset else []
    if options.device != "cpu":
        words.append(f"--device {options.device} --dtype {options.dtype}")
    words += ["--exact"] if options.exact else []
    write_section(
        "Likelihoods for evaluation" + (" on a GPU" if options.device != "cpu" else ""),
        f"python bench/evaluate.py {' '.join(words)}",
        where,
        versions("torch", "transformers", "lm-eval"),
        body,
    )


if __name__ == "__main__":
    main()
