"""Generation on the CPU: ours beside transformers' `generate`; a token's cost as the text grows.

    python bench/generate.py [--rounds 5] [--threads 2]

Greedy, float32, the same weights in both, no end token. Tokens are compared one by one first. Then
rounds of the two alternate, every step is timed, and what is compared is the sum over the steps of
each step's best round: a busy machine can only add time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers

from results import machine, table, versions, write_section
from scratchlm import TransformerLM
from scratchlm.inference import GREEDY, decode_one_token, load_model, prefill, stream

# name: layers, d_model, heads, key-value heads, d_ff, vocabulary
SHAPES = {
    "tiny (1.8 M)": (4, 128, 4, 4, 344, 4096),
    "100 M": (12, 768, 12, 12, 2048, 16384),
}
CONTEXT = 1024
# (prompt lengths, new tokens) by shape
WORK = {
    "tiny (1.8 M)": [([32], 96), ([512], 96), ([96, 64, 33, 8], 64)],
    "100 M": [([32], 24), ([512], 24), ([96, 64, 33, 8], 16)],
}


def make(shape: tuple[int, ...]) -> tuple[transformers.PreTrainedModel, TransformerLM]:
    """Build a random Llama with transformers and load what it saves."""
    layers, d_model, heads, kv_heads, d_ff, vocab = shape
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=d_model,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=d_ff,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return theirs, load_model(directory).model


def prompts_of(lengths: list[int], vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


class Clock(transformers.StoppingCriteria):
    """Note the time of every step; stop nothing."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: object, **rest: object) -> torch.Tensor:
        """Note the time."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def steps(self) -> list[float]:
        """Return the seconds of every step."""
        return [after - before for before, after in itertools.pairwise(self.times)]


Run = tuple[list[list[int]], list[float]]  # the tokens, and the seconds of every step


def run_theirs(model: transformers.PreTrainedModel, prompts: list[list[int]], new: int) -> Run:
    longest = max(map(len, prompts))
    clock = Clock()
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    return out[:, longest:].tolist(), clock.steps()


def run_ours(model: TransformerLM, prompts: list[list[int]], new: int) -> Run:
    times = [time.perf_counter()]
    tokens: list[list[int]] = [[] for _ in prompts]
    for piece in stream(model, prompts, max_new_tokens=new, sampling=GREEDY):
        tokens[piece.row].append(piece.token_id)
        if piece.row == len(prompts) - 1:
            times.append(time.perf_counter())
    return tokens, [after - before for before, after in itertools.pairwise(times)]


def best_rounds(work: list[Callable[[], Run]], rounds: int) -> list[float]:
    """Alternate the contestants; return for each the sum of its steps' best rounds."""
    best = [run()[1] for run in work]
    for _ in range(rounds - 1):
        for i, run in enumerate(work):
            best[i] = [min(pair) for pair in zip(best[i], run()[1], strict=True)]
    return [sum(steps) for steps in best]


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(rounds: int) -> str:
    rows = []
    for name, shape in SHAPES.items():
        theirs, ours = make(shape)
        for lengths, new in WORK[name]:
            prompts = prompts_of(lengths, shape[-1])
            runs = [
                partial(run_theirs, theirs, prompts, new),
                partial(run_ours, ours, prompts, new),
            ]
            same = runs[0]()[0] == runs[1]()[0]
            their_time, our_time = best_rounds(runs, rounds)
            count = new * len(prompts)
            rows.append(
                [
                    name,
                    "+".join(map(str, lengths)),
                    new,
                    f"{count / their_time:.1f}",
                    f"{count / our_time:.1f}",
                    f"{their_time / our_time:.2f}×",
                    "yes" if same else "no",
                ]
            )
            print(" | ".join(map(str, rows[-1])), flush=True)
    header = ["model", "prompt tokens", "new tokens", "transformers tokens/s", "ours tokens/s"]
    return table([*header, "ratio", "same tokens"], rows)


def growth(rounds: int) -> str:
    """Time one decode step with more and more tokens already in the cache."""
    name = "tiny (1.8 M)"
    _, model = make(SHAPES[name])
    config = model.config
    lengths = [16, 128, 256, 512, 1000]
    best = dict.fromkeys(lengths, float("inf"))
    uncached = dict(best)
    for _ in range(rounds):
        for length in lengths:
            [prompt] = prompts_of([length], config.vocab_size)
            cache = model.new_cache(1, CONTEXT)
            prefill(model, [prompt], cache)
            for _ in range(16):
                step = timed(partial(decode_one_token, model, [5], cache))
                best[length] = min(best[length], step)
            whole = timed(partial(prefill, model, [[*prompt, 5]]))
            uncached[length] = min(uncached[length], whole)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.d_head * 4
    rows = [
        [n, f"{best[n] * 1e3:.2f}", f"{n * per_token / 1e6:.2f}", f"{uncached[n] * 1e3:.2f}"]
        for n in lengths
    ]
    header = ["tokens before", "ms for the next", "cache read, MB", "ms without a cache"]
    return f"One more token, {name}:\n\n" + table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    body = compare(options.rounds) + "\n\n" + growth(options.rounds)
    body += "\n\nGreedy, float32, batch = the number of prompts (left-padded for transformers), "
    body += f"threads: {options.threads}, prefill included, {options.rounds} alternating rounds. "
    body += f"Load average at the end: {os.getloadavg()[0]:.1f} (rerun where it exceeds the cores)."
    print(body)
    write_section(
        "Generation on the CPU",
        f"python bench/generate.py --rounds {options.rounds} --threads {options.threads}",
        machine(),
        versions("torch", "transformers"),
        body,
    )


if __name__ == "__main__":
    main()
