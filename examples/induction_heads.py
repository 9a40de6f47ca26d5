"""Train attention-only models on repeated sequences, find their induction heads, take them away.

python examples/induction_heads.py  # a number of steps may follow
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

from scratchlm import ModelConfig, TransformerLM
from scratchlm.inspect import head_scores, inspect
from scratchlm.training import AdamW

VOCAB, CONTEXT = 64, 64


class Nothing(nn.Module):
    """A feed-forward layer that adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(x)


def attention_only(num_layers: int, num_heads: int = 1) -> TransformerLM:
    """Build a model without feed-forward layers: a layer that is replaced is called as it is."""
    config = ModelConfig(VOCAB, CONTEXT, d_model=64, num_layers=num_layers, num_heads=num_heads)
    model = TransformerLM(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    for layer in model.layers:
        layer.ffn = Nothing()
    return model


def repeated(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw rows that repeat a block of 8 to 32 random tokens; return inputs, and targets there."""
    block = torch.randint(8, CONTEXT // 2 + 1, (rows, 1), generator=generator)
    place = torch.arange(CONTEXT + 1)
    tokens = torch.randint(VOCAB, (rows, CONTEXT), generator=generator).gather(1, place % block)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(place[1:] < block, -100)


def train(model: TransformerLM, steps: int = 600, peak: float = 3e-3) -> list[float]:
    """Train on the repetitions; return the losses."""
    optimizer, generator = AdamW(model.parameters(), lr=peak), torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / 50, 1 - 0.9 * step / steps)
        loss = model.loss(*repeated(32, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def loss_without(model: TransformerLM, layer: int | None = None, head: int = 0) -> float:
    """Return the loss on fresh repetitions, without a head if one is named."""
    inputs, targets = repeated(64, torch.Generator().manual_seed(2))
    if layer is None:
        return model.loss(inputs, targets).item()
    with inspect(model) as look:
        look.zero(f"layers.{layer}.attn.heads", heads=head)
        return model.loss(inputs, targets).item()


def main(steps: int = 600) -> None:
    """Train, look, and print."""
    print(f"chance {math.log(VOCAB):.2f}")
    for num_layers, num_heads in ((2, 1), (1, 1), (2, 4)):
        model = attention_only(num_layers, num_heads)
        train(model, steps)
        scores = head_scores(model, block=24)
        print(f"\n{num_layers} layers, {num_heads} heads each: loss {loss_without(model):.2f}")
        for layer, head, score in scores.top("induction", 4):
            without = loss_without(model, layer, head)
            previous = scores.previous_token[layer, head]
            kinds = f"induction {score:.2f}, previous token {previous:.2f}"
            print(f"  layer {layer} head {head}: {kinds}, loss without it {without:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
