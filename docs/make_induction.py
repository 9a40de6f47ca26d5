"""Draw the pictures of docs/induction.md, and print its numbers.

python docs/make_induction.py
"""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import torch

from scratchlm.inspect import head_scores, inspect

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "induction"
BLUE, RED, GREY = "#2563eb", "#dc2626", "#6b7280"


def load_example() -> Any:
    """Import the example, which is not part of the package."""
    path = ROOT / "examples" / "induction_heads.py"
    spec = importlib.util.spec_from_file_location("induction_heads", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figure(width: float, height: float) -> Any:
    """Make a figure without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def draw_losses(losses: dict[str, list[float]], chance: float) -> None:
    """Draw the loss on the repetitions, step by step."""
    drawn = figure(7.5, 3.6)
    axis = drawn.add_subplot()
    for (name, values), colour in zip(losses.items(), (BLUE, RED), strict=True):
        axis.plot(values, color=colour, lw=1.4, label=name)
    axis.axhline(chance, color=GREY, ls="--", lw=1)
    axis.text(len(values), chance + 0.08, "chance", ha="right", va="bottom", color=GREY)
    axis.set(xlabel="step", ylabel="loss on repetitions", ylim=(0, 1.12 * chance))
    axis.legend(frameon=False, loc="center right")
    axis.spines[["top", "right"]].set_visible(False)
    drawn.savefig(PICTURES / "loss.png")


@torch.no_grad()
def draw_patterns(model: Any, vocab: int, block: int = 16) -> None:
    """Draw where both heads look on a block of random tokens said twice."""
    tokens = torch.randint(vocab, (1, block), generator=torch.Generator().manual_seed(3))
    with inspect(model) as look:
        look.keep("layers.*.attn.weights")
        model(tokens.repeat(1, 2))
    drawn = figure(9, 4.4)
    titles = ("layer 0: the token before", "layer 1: what came after the same token")
    for i, title in enumerate(titles):
        axis = drawn.add_subplot(1, 2, i + 1)
        axis.imshow(look.cache[f"layers.{i}.attn.weights"][0, 0], cmap="Blues", vmin=0, vmax=1)
        for line in (axis.axhline, axis.axvline):
            line(block - 0.5, color=GREY, lw=0.8, ls=":")
        axis.set(title=title, xlabel="looks at position", ylabel="from position")
    drawn.savefig(PICTURES / "patterns.png")


def draw_ablations(losses: dict[str, float], chance: float) -> None:
    """Draw the loss without each head."""
    drawn = figure(7.5, 0.55 + 0.36 * len(losses))
    axis = drawn.add_subplot()
    axis.barh(range(len(losses)), list(losses.values()), color=BLUE, height=0.62)
    for row, loss in enumerate(losses.values()):
        axis.text(loss, row, f" {loss:.2f}", va="center")
    axis.axvline(chance, color=GREY, ls="--", lw=1, label="chance")
    axis.set_yticks(range(len(losses)), list(losses))
    axis.set(xlabel="loss on repetitions", xlim=(0, 1.12 * max(*losses.values(), chance)))
    axis.legend(frameon=False, loc="center right")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    drawn.savefig(PICTURES / "ablations.png")


def main() -> None:
    """Train the three models of the page."""
    example = load_example()
    chance = math.log(example.VOCAB)
    PICTURES.mkdir(exist_ok=True)
    losses: dict[Any, list[float]] = {}
    for size in ((2, 1), (1, 1), (2, 4)):
        model = example.attention_only(*size)
        start = time.process_time()
        losses[size] = example.train(model)
        print(size, f"{time.process_time() - start:.0f} s of processor time")
        scores = head_scores(model, block=24)
        print("  loss", round(example.loss_without(model), 2), "chance", round(chance, 2))
        for kind in ("previous_token", "induction"):
            print(" ", kind, [[round(s, 2) for s in row] for row in getattr(scores, kind).tolist()])
        without = {
            f"without {layer}.{head}": example.loss_without(model, layer, head)
            for layer in range(size[0])
            for head in range(size[1])
        }
        print("  ", {name: round(loss, 2) for name, loss in without.items()})
        if size == (2, 1):
            draw_patterns(model, example.VOCAB)
        if size == (2, 4):
            with torch.no_grad(), inspect(model) as look:
                look.zero("layers.1.attn.heads")
                together = example.loss_without(model)
            print("   without all of layer 1", round(together, 2))
            whole = {"whole": example.loss_without(model)}
            draw_ablations({**whole, **without, "without 1.0 to 1.3": together}, chance)
    draw_losses({"two layers": losses[2, 1], "one layer": losses[1, 1]}, chance)


if __name__ == "__main__":
    main()
