"""Quality on real text: nanoGPT's two settings on tinyshakespeare, characters.

    python bench/shakespeare.py cpu tinyshakespeare.txt      L4 h4 d128, context 64, batch 12
    python bench/shakespeare.py gpu tinyshakespeare.txt      L6 h6 d384, context 256, batch 64

First 90 % of the characters train, the last 10 % validate, all of them, in windows of the context
length. The bars are nanoGPT's published losses: 1.88 (2,000 steps on a CPU) and 1.4697 (5,000 steps
with dropout 0.2 on a GPU; here in at most 2,500).

On the CPU a model of nanoGPT's shape, in plain torch modules, trains beside ours in the same run,
a few steps each in turn, so that the times can be compared. Where there are several recipes,
`--recipe all` tries each and says which is best.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from results import machine, table, versions, write_section
from scratchlm.config import MLP, LayerNorm, Learned, ModelConfig
from scratchlm.data.batches import Batch, Batches, ValidationBatches
from scratchlm.data.token_file import TokenFile, write_token_file
from scratchlm.training.evaluation import evaluate
from scratchlm.training.learner import Learner, build_model
from scratchlm.training.schedules import make_schedule, schedule_of
from scratchlm.training.settings import TrainConfig
from scratchlm.training.step import take_step


@dataclass(frozen=True)
class Recipe:
    """A model's parts and how it is trained; `noise` replaces that share of the input characters.

    A character replaced at random, where the target stays what it was, keeps a small text from
    being learnt by heart, as dropout does inside the model.
    """

    train: TrainConfig
    model: dict[str, Any] = field(default_factory=dict)
    noise: float = 0.0


CPU_SIZES = {"context_length": 64, "d_model": 128, "num_layers": 4, "num_heads": 4, "d_ff": 512}
GPU_SIZES = {"context_length": 256, "d_model": 384, "num_layers": 6, "num_heads": 6, "d_ff": 1024}
# nanoGPT's shape, two matrices of 4·d included; of our parts, those that a CPU runs fastest.
_CPU_PARTS = {"positions": Learned(), "norm": LayerNorm(bias=False), "ffn": MLP("relu")}
_CPU = TrainConfig(
    steps=2_000,
    batch_size=12,
    lr=4e-3,
    min_lr=4e-5,
    warmup_steps=100,
    betas=(0.9, 0.99),
    weight_decay=0.1,
    eval_every=500,
)
_GPU = TrainConfig(
    steps=2_500,
    batch_size=64,
    lr=1e-3,
    min_lr=1e-5,
    warmup_steps=100,
    betas=(0.9, 0.99),
    weight_decay=0.1,
    eval_every=100,
    ema=0.995,
    compile="block",
)
RECIPES: dict[str, dict[str, Recipe]] = {
    "cpu": {"adamw": Recipe(_CPU, _CPU_PARTS)},
    "gpu": {
        "noise 0.1, decay 1": Recipe(replace(_GPU, weight_decay=1.0), noise=0.1),
        "noise 0.1": Recipe(_GPU, noise=0.1),
        "noise 0.2": Recipe(_GPU, noise=0.2),
        "noise 0.1, muon": Recipe(replace(_GPU, optimizer="muon", lr=2e-3), noise=0.1),
        "noise 0.2, decay 1, tied": Recipe(
            replace(_GPU, weight_decay=1.0), {"tie_embeddings": True}, 0.2
        ),
        "decay 1, 1000 steps": Recipe(replace(_GPU, steps=1_000, weight_decay=1.0)),
        "muon, 1000 steps": Recipe(replace(_GPU, steps=1_000, optimizer="muon", lr=2e-3)),
    },
}
BARS = {"cpu": (1.88, 2_000), "gpu": (1.4697, 5_000)}


def write_characters(text: str, folder: Path) -> int:
    """Write train and val token files of a text's characters; return how many kinds there are."""
    kinds = sorted(set(text))
    number = {character: i for i, character in enumerate(kinds)}
    ids = np.fromiter((number[character] for character in text), dtype=np.uint16)
    cut = int(0.9 * len(ids))
    for name, part in (("train", ids[:cut]), ("val", ids[cut:])):
        write_token_file(folder / name, part, vocab_size=len(kinds), tokenizer="characters")
    return len(kinds)


def with_noise(batch: Batch, share: float, vocab_size: int, seed: int) -> Batch:
    """Replace some input ids by random ones, the same for the same seed."""
    if not share:
        return batch
    generator = torch.Generator().manual_seed(seed)
    hit = torch.rand(batch.inputs.shape, generator=generator) < share
    other = torch.randint(0, vocab_size, batch.inputs.shape, generator=generator)
    return Batch(torch.where(hit, other, batch.inputs), batch.targets)


@dataclass
class Result:
    """How one recipe did."""

    best: float
    best_step: int
    last: float
    steps: int
    ms: float  # a step, the median
    losses: list[tuple[int, float]]


class Ours:
    """Our model under a recipe, stepped from outside."""

    def __init__(
        self, recipe: Recipe, config: ModelConfig, train: TokenFile, val: TokenFile, device: str
    ) -> None:
        self.recipe, self.config = recipe, config
        self.learner = Learner(build_model(config, recipe.train.seed, device), recipe.train)
        settings = self.settings = self.learner.settings
        context = config.context_length
        self.batches = Batches(train, context, settings.batch_size, settings.seed).iterate(0)
        self.validation = ValidationBatches(val, context, 64)
        self.lr_at = schedule_of(settings)

    def step(self, step: int) -> None:
        """Make one update."""
        batch = next(self.batches)
        batch = with_noise(batch, self.recipe.noise, self.config.vocab_size, step)
        take_step(self.learner, batch, step, self.lr_at(step))

    def held_out(self) -> float:
        """Return the loss on the whole validation text."""
        with self.learner.best_weights() as model:
            found = evaluate(model, self.validation, autocast=self.learner.autocast())
        assert found is not None
        return found.loss


class Peer(nn.Module):
    """A GPT-2 block stack as nanoGPT's hyper-parameters describe it, from torch's own modules."""

    def __init__(self, vocab: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width, bias=False),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "norm2": nn.LayerNorm(width, bias=False),
                    "up": nn.Linear(width, 4 * width, bias=False),
                    "down": nn.Linear(4 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if deep else 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits; the head is the token table."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm1"](x)).chunk(3, dim=-1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](mixed.transpose(1, 2).flatten(-2))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        return F.linear(self.norm(x), self.tokens.weight)


class PeerTraining:
    """The peer under nanoGPT's published settings for a CPU: random crops, AdamW, cosine."""

    def __init__(self, config: ModelConfig, train: TokenFile, val: TokenFile, steps: int) -> None:
        torch.manual_seed(0)
        self.context, self.steps = config.context_length, steps
        self.model = Peer(
            config.vocab_size, self.context, config.d_model, config.num_layers, config.num_heads
        )
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=1e-3,
            betas=(0.9, 0.99),
        )
        self.ids = torch.from_numpy(train.read(0, len(train)).astype(np.int64))
        self.validation = ValidationBatches(val, self.context, 64)

    def step(self, step: int) -> None:
        """Make one update."""
        starts = torch.randint(len(self.ids) - self.context, (12,))
        rows = torch.stack([self.ids[i : i + self.context + 1] for i in starts.tolist()])
        lr = make_schedule(
            "cosine", max_lr=1e-3, min_lr=1e-4, warmup_steps=100, total_steps=self.steps,
            decay_steps=0,
        )(step)  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()

    @torch.no_grad()
    def held_out(self) -> float:
        """Return the loss on the whole validation text."""
        total = count = 0.0
        for batch in self.validation:
            logits = self.model(batch.inputs).flatten(0, 1)
            total += F.cross_entropy(logits, batch.targets.flatten(), reduction="sum").item()
            count += batch.num_targets()
        return total / count


def train_in_turn(runners: list[Any], steps: int, every: int, turn: int = 20) -> list[Result]:
    """Train several models a few steps each in turn; the same load falls on all of them."""
    times: list[list[float]] = [[] for _ in runners]
    losses: list[list[tuple[int, float]]] = [[] for _ in runners]
    for first in range(1, steps + 1, turn):
        last = min(first + turn - 1, steps)
        for runner, seconds in zip(runners, times, strict=True):
            for step in range(first, last + 1):
                began = time.perf_counter()
                runner.step(step)
                seconds.append(time.perf_counter() - began)
        if last % every == 0 or last == steps:
            for runner, found in zip(runners, losses, strict=True):
                found.append((last, runner.held_out()))
            print(f"  step {last}: " + "  ".join(f"{found[-1][1]:.4f}" for found in losses))
    results = []
    for found, seconds in zip(losses, times, strict=True):
        best = min(found, key=lambda pair: pair[1])
        ms = 1e3 * median(seconds)
        results.append(Result(best[1], best[0], found[-1][1], steps, ms, found))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="tinyshakespeare at nanoGPT's settings")
    parser.add_argument("setting", choices=("cpu", "gpu"))
    parser.add_argument("text", type=Path, help="tinyshakespeare.txt")
    parser.add_argument("--recipe", help="one of the recipes, or all; the first is the default")
    parser.add_argument("--steps", type=int, help="fewer steps, for a trial: nothing is written")
    parser.add_argument("--device", help="cpu or cuda")
    given = parser.parse_args()
    device = given.device or ("cuda" if given.setting == "gpu" else "cpu")
    recipes = RECIPES[given.setting]
    names = list(recipes) if given.recipe == "all" else [given.recipe or next(iter(recipes))]
    bar, bar_steps = BARS[given.setting]
    rows: list[list[object]] = [["nanoGPT, published", f"{bar:.4f}", "", bar_steps, "", ""]]
    with tempfile.TemporaryDirectory() as folder:
        vocab = write_characters(given.text.read_text(encoding="utf-8"), Path(folder))
        with TokenFile(Path(folder) / "train") as train, TokenFile(Path(folder) / "val") as val:
            for name in names:
                recipe = recipes[name]
                if given.steps:
                    recipe = replace(recipe, train=replace(recipe.train, steps=given.steps))
                sizes = CPU_SIZES if given.setting == "cpu" else GPU_SIZES
                config = ModelConfig(vocab_size=vocab, **sizes, **recipe.model)
                print(f"{name}: {recipe.train.steps} steps")
                steps, every = recipe.train.steps, recipe.train.eval_every or 500
                runners: list[Any] = [Ours(recipe, config, train, val, device)]
                if given.setting == "cpu":
                    runners.append(PeerTraining(config, train, val, steps))
                results = train_in_turn(runners, steps, every)
                for who, result in zip(
                    (f"ours: {name}", "peer, same shape"), results, strict=False
                ):
                    ratio = f"{result.ms / results[-1].ms:.2f}" if len(results) > 1 else ""
                    rows.append(
                        [
                            who,
                            f"{result.best:.4f}",
                            f"at {result.best_step}, last {result.last:.4f}",
                            result.steps,
                            f"{result.ms:.1f}",
                            ratio,
                        ]
                    )
    header = ["", "held-out loss, best", "", "steps", "ms per step, median", "of the peer's"]
    body = table(header, rows)
    print(body)
    if given.steps is None:
        where = machine() if device == "cpu" else torch.cuda.get_device_name()
        write_section(
            f"tinyshakespeare, nanoGPT's {given.setting.upper()} setting",
            f"python bench/shakespeare.py {given.setting} tinyshakespeare.txt"
            + (f" --recipe {given.recipe}" if given.recipe else ""),
            where,
            versions("torch"),
            body,
        )


if __name__ == "__main__":
    main()
