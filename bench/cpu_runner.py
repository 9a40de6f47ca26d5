"""Steps of many requests on the CPU: our runner beside transformers' `generate`, and the model.

    python bench/cpu_runner.py [--rounds 3] [--threads 2] [--shape "100 M"]

Greedy, float32, the same weights, no end token. The runner is driven directly: requests of mixed
lengths read their prompts in chunks, decode together, and leave when they are done. transformers
pads the prompts and goes on until the longest answer is whole; only tokens asked for are counted.
Rounds alternate and the best of each is taken: a busy machine can only add time.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable

import torch
import transformers

from generate import CONTEXT, SHAPES, make
from results import machine, table, versions, write_section
from scratchlm import TransformerLM
from scratchlm.accelerate.cpu_runner import CPURunner
from scratchlm.paged import LAST, PagedCache, Step

PAGE_SIZE, CHUNK = 16, 256
Request = tuple[list[int], int]  # the prompt, and how many tokens to add


class Greedy:
    """A runner with room for some requests, each in its own slot."""

    def __init__(self, model: TransformerLM, slots: int) -> None:
        pages = -(-CONTEXT // PAGE_SIZE)
        self.runner = CPURunner(model, PagedCache(model.config, slots * pages, PAGE_SIZE))
        self.tables = torch.arange(slots * pages, dtype=torch.int32).view(slots, pages)
        self.last = torch.zeros(slots, dtype=torch.int64)

    def run(self, requests: list[Request]) -> list[list[int]]:
        """Answer the requests, all at once."""
        done = [0] * len(requests)
        answers: list[list[int]] = [[] for _ in requests]
        while going := [i for i, (_, new) in enumerate(requests) if len(answers[i]) < new]:
            tokens, counts, chooses = [], [], []
            for i in going:
                prompt = requests[i][0]
                new = prompt[done[i] : done[i] + CHUNK] or [LAST]
                tokens += new
                counts.append(len(new))
                chooses.append(done[i] + len(new) >= len(prompt))
            assert self.runner.unchanged
            step = Step(tokens, counts, [done[i] for i in going], going, chooses)
            best = self.runner.run(step, self.tables, self.last).argmax(-1)
            choosing = [i for i, chose in zip(going, chooses, strict=True) if chose]
            self.last[choosing] = best
            for i, count in zip(going, counts, strict=True):
                done[i] += count
            for i, token in zip(choosing, best.tolist(), strict=True):
                answers[i].append(token)
        return answers


def theirs(model: transformers.PreTrainedModel, requests: list[Request]) -> list[list[int]]:
    """Answer the requests by one padded batch."""
    longest = max(len(prompt) for prompt, _ in requests)
    pads = [longest - len(prompt) for prompt, _ in requests]
    ids = torch.tensor([[0] * n + p for n, (p, _) in zip(pads, requests, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])
    most = max(new for _, new in requests)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0
    )
    answers = out[:, longest:].tolist()
    return [answer[:new] for answer, (_, new) in zip(answers, requests, strict=True)]


def best_of(work: list[Callable[[], object]], rounds: int) -> list[float]:
    """Alternate the contestants; return each one's best time."""
    best = [float("inf")] * len(work)
    for _ in range(rounds):
        for i, run in enumerate(work):
            begin = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


def requests_of(count: int, vocab: int) -> list[Request]:
    draw = random.Random(0)
    lengths = [(draw.randint(16, 128), draw.randint(16, 64)) for _ in range(count)]
    return [(draw.choices(range(vocab), k=prompt), new) for prompt, new in lengths]


def compare(name: str, rounds: int) -> list[list[object]]:
    """Return rows of the table for one model."""
    peer, model = make(SHAPES[name])
    vocab, rows = model.config.vocab_size, []
    draw = random.Random(1)
    prompt = draw.choices(range(vocab), k=512)
    work: dict[str, list[Request]] = {
        "1 request, 32 + 48 tokens": [(draw.choices(range(vocab), k=32), 48)],
        "16 requests, 16–128 + 16–64": requests_of(16, vocab),
        "a prompt of 512, one token": [(prompt, 1)],
    }
    for what, requests in work.items():
        ours = Greedy(model, len(requests))
        same = ours.run(requests) == theirs(peer, requests)
        runs: list[Callable[[], object]] = [
            lambda ours=ours, requests=requests: ours.run(requests),  # type: ignore[misc]
            lambda requests=requests: theirs(peer, requests),  # type: ignore[misc]
        ]
        our_time, their_time = best_of(runs, rounds)
        count = sum(new for _, new in requests) if len(requests[0][0]) < 512 else 512
        rates = [f"{count / t:.1f}" for t in (their_time, our_time)]
        ratio = f"{their_time / our_time:.2f}×"
        rows.append([name, what, *rates, ratio, "yes" if same else "no"])
        print(" | ".join(map(str, rows[-1])), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, help="only this one; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = [options.shape] if options.shape else list(SHAPES)
    with torch.inference_mode():
        rows = [row for name in names for row in compare(name, options.rounds)]
    if options.shape:
        return
    header = ["model", "work", "transformers tokens/s", "runner tokens/s", "ratio", "same tokens"]
    body = table(header, rows) + f"\n\nThreads: {options.threads}, {options.rounds} alternating "
    body += f"rounds, the best of each. Load average at the end: {os.getloadavg()[0]:.1f}."
    write_section(
        "Many requests on the CPU",
        f"python bench/cpu_runner.py --rounds {options.rounds} --threads {options.threads}",
        machine(),
        versions("torch", "transformers"),
        body,
    )


if __name__ == "__main__":
    main()
