"""Speculative decoding beside none: copying, ordinary text, a draft model; tokens/s of one request.

    python bench/speculation.py [--device cpu] [--size "100 M"] [--new 256] [--rounds 5]

The models compute all they would, and say what is wanted: blocks write zeros, and the head holds a
table of which word follows which. Copying goes round a text of 256 words that the prompt holds;
ordinary text is drawn from the pairs of words of the demo's stories; a draft knows a blurred table.
Answers are compared with those without speculation: on a CPU a lookup must change no token.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.data.stories.source import StorySource
from scratchlm.inference import GREEDY, Engine, Sampling

# name: layers, d_model, heads, d_ff, vocabulary, of the model and of its draft
SIZES = {
    "small": ((4, 256, 4, 688, 4096), (1, 192, 4, 512, 4096)),
    "100 M": ((12, 768, 12, 2048, 16384), (2, 256, 4, 688, 16384)),
    "1.6 B": ((24, 2048, 16, 8192, 32768), (2, 512, 8, 1536, 32768)),
}
CONTEXT, ROUND = 1024, 256
NEVER = -40.0  # the logit of words that are not of the language


def following(shape: tuple[int, ...], after: Tensor, where: dict[str, Any]) -> TransformerLM:
    """Build a model that says word j after word i with probability after[i, j]."""
    layers, d_model, heads, d_ff, vocab = shape
    config = ModelConfig(vocab, CONTEXT, d_model, layers, heads, d_ff=d_ff)
    torch.manual_seed(0)
    model = TransformerLM(config).eval()
    words = min(len(after), d_model)
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.output_proj.weight.zero_()
            layer.ffn.w2.weight.zero_()
        model.token_embeddings.weight.zero_()
        model.token_embeddings.weight[:words, :words] = torch.eye(words)
        model.lm_head.weight.fill_(NEVER / d_model**0.5)  # RMSNorm makes √d of a one
        logits = after.clamp(min=1e-12).log().clamp(min=NEVER)
        model.lm_head.weight[:words, :words] = logits[:words, :words].T / d_model**0.5
    return model.to(**where)


def circle(words: int) -> Tensor:
    return torch.eye(words).roll(1, dims=1)


def pairs(most: int) -> Tensor:
    """Return which word follows which in stories, of the `most` first words."""
    told = [word for story in StorySource().stories("bench", 4000) for word in story]
    names = {word: i for i, word in enumerate(dict.fromkeys(told))}
    counts = torch.zeros(len(names), len(names))
    for one, two in itertools.pairwise(told):
        counts[names[one], names[two]] += 1
    counts = counts[:most, :most] + 1e-9
    return counts / counts.sum(dim=1, keepdim=True)


@dataclass
class Work:
    """One line of the table."""

    name: str
    model: TransformerLM
    prompt: list[int]
    sampling: Sampling
    speculate: str
    draft: TransformerLM | None = None

    def run(self, new: int, speculate: str) -> tuple[list[int], float, int]:
        """Return the tokens, the seconds from the first to the last, and the steps."""
        engine = Engine(
            self.model,
            num_pages=2 * CONTEXT // 64,
            draft=self.draft if speculate != "off" else None,
        )
        handle = engine.submit(
            self.prompt,
            max_new_tokens=new,
            sampling=self.sampling,
            seed=1,
            speculate=speculate,  # type: ignore[arg-type]
        )
        while not handle._request.row.step:
            engine.step()
        begin, steps = time.perf_counter(), 0
        while not handle.done:
            steps += engine.step()
        return handle.result().token_ids, time.perf_counter() - begin, steps


def works(size: str, where: dict[str, Any]) -> list[Work]:
    shape, small = SIZES[size]
    story = pairs(small[1])
    blurred = 0.85 * story + 0.15 * story.mean(dim=0)
    copying = following(shape, circle(min(ROUND, shape[1])), where)
    speaking = following(shape, story, where)
    draft = following(small, blurred, where)
    text = list(range(min(ROUND, shape[1])))
    drawn = Sampling(temperature=1.0)
    return [
        Work("copying, lookup, greedy", copying, text + text[:3], GREEDY, "lookup"),
        Work("copying, lookup, drawn", copying, text + text[:3], drawn, "lookup"),
        Work("ordinary, lookup, drawn", speaking, [0, 1, 2], drawn, "lookup"),
        Work("ordinary, lookup, drawn at 0.7", speaking, [0, 1, 2], Sampling(0.7), "lookup"),
        Work("ordinary, draft, drawn", speaking, [0, 1, 2], drawn, "draft", draft),
        Work("ordinary, draft, top-k 40, top-p 0.95", speaking, [0, 1, 2], Sampling(1, 40, 0.95),
             "draft", draft),
    ]  # fmt: skip


def compare(work: Work, new: int, rounds: int) -> list[object]:
    best = {"off": float("inf"), work.speculate: float("inf")}
    found = {}
    for _ in range(rounds):
        for speculate in best:
            tokens, seconds, steps = work.run(new, speculate)
            best[speculate] = min(best[speculate], seconds)
            found[speculate] = tokens, steps
    (expected, _), (tokens, steps) = found["off"], found[work.speculate]
    must_be_same = work.speculate == "lookup" or work.sampling == GREEDY
    is_same = tokens == expected
    on_cpu = work.model.lm_head.weight.device.type == "cpu"
    assert is_same or not must_be_same or not on_cpu, work.name  # on a GPU, but for rounding
    plain, fast = ((new - 1) / seconds for seconds in best.values())
    return [
        work.name,
        f"{plain:.1f}",
        f"{fast:.1f}",
        f"{fast / plain:.2f}×",
        f"{(new - 1) / steps:.2f}",
        ("yes" if is_same else "no") if must_be_same else "same distribution",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="100 M")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    on_gpu = options.device != "cpu"
    where = {"device": options.device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    rows = []
    for work in works(options.size, where):
        rows.append(compare(work, options.new, options.rounds))
        print(" | ".join(map(str, rows[-1])), flush=True)
    header = [
        "text",
        "none, tokens/s",
        "speculation, tokens/s",
        "ratio",
        "tokens a step",
        "same tokens",
    ]
    body = table(header, rows)
    body += (
        f"\n\n{options.size}, one request, {options.new} tokens, the prompt not counted, best of "
    )
    body += f"{options.rounds} alternating rounds, threads: {options.threads}. Load average at the "
    body += f"end: {os.getloadavg()[0]:.1f} (rerun where it exceeds the cores)."
    name = torch.cuda.get_device_name() if on_gpu else machine()
    write_section(
        f"Speculation, {'GPU' if on_gpu else 'CPU'}, {options.size}",
        f'python bench/speculation.py --device {options.device} --size "{options.size}" '
        f"--new {options.new} --rounds {options.rounds} --threads {options.threads}",
        name,
        versions("torch"),
        body,
    )


if __name__ == "__main__":
    main()
