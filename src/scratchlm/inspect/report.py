"""One prompt seen from inside: what `scratchlm inspect` prints and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inspect.attribution import PARTS, Attribution
from scratchlm.inspect.look import Look, inspect
from scratchlm.model import TransformerLM

WEIGHTS_UP_TO = 4_000_000  # cells of patterns that are kept and drawn at once


@dataclass(frozen=True)
class Guess:
    """A token, and how likely it is."""

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True)
class Change:
    """A token's probability without the ablation, and with it."""

    token_id: int
    text: str
    before: float
    after: float


@dataclass(frozen=True)
class Report:
    """What was seen of one prompt."""

    tokens: list[str]
    next: list[Guess]
    lens: dict[str, list[list[Guess]]]  # point -> position -> best tokens
    weights: dict[int, Float[Tensor, "heads query key"]]  # by layer
    attribution: Attribution | None
    attributed: tuple[str, str | None]  # the tokens compared
    ablated: list[str]
    changes: list[Change]  # of the likeliest tokens on either side


Ablation = tuple[str, Sequence[int] | None]  # a point, and heads of it


@torch.no_grad()
def report(
    model: TransformerLM,
    ids: Sequence[int],
    text_of: Callable[[int], str],
    *,
    token: int | None = None,
    against: int | None = None,
    ablate: Sequence[Ablation] = (),
    layers: Sequence[int] | None = None,
    best: int = 5,
) -> Report:
    """Run a prompt and look; `token` None attributes the likeliest one, where that is possible.

    `layers` are those whose attention weights are kept; None: all, if they are not too large.
    """
    model.check_length(len(ids))
    row = torch.tensor([[*ids]], device=model.token_embeddings.weight.device)
    cells = model.config.num_layers * model.config.num_heads * len(ids) ** 2
    if layers is None:
        layers = range(len(model.layers)) if cells <= WEIGHTS_UP_TO else ()
    with inspect(model) as look:
        before = model(row)[0, -1].double().softmax(-1) if ablate else None
        for point, heads in ablate:
            look.zero(point, heads=heads)
        look.keep(PARTS)
        names = [f"layers.{i}.attn.weights" for i in layers]
        if names:
            look.keep(names)
        after = model(row)[0, -1].double().softmax(-1)
    chosen = int(after.argmax()) if token is None else token
    attribution = None
    if token is not None or model.config.norm_placement == "pre":
        attribution = look.cache.attribute(chosen, against)
    return Report(
        tokens=[text_of(i) for i in ids],
        next=_best(after, best, text_of),
        lens=_lens(look, best, text_of),
        weights={i: look.cache[name][0] for i, name in zip(layers, names, strict=True)},
        attribution=attribution,
        attributed=(text_of(chosen), None if against is None else text_of(against)),
        ablated=[_name(point, heads) for point, heads in ablate],
        changes=[] if before is None else _changes(before, after, best, text_of),
    )


def _name(point: str, heads: Sequence[int] | None) -> str:
    return point if heads is None else f"{point}:{','.join(map(str, heads))}"


def _best(probabilities: Tensor, best: int, text_of: Callable[[int], str]) -> list[Guess]:
    top = probabilities.topk(min(best, len(probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [Guess(i, text_of(i), p) for i, p in pairs]


def _lens(look: Look, best: int, text_of: Callable[[int], str]) -> dict[str, list[list[Guess]]]:
    return {
        name: [_best(row, best, text_of) for row in logits[0].double().softmax(-1)]
        for name, logits in look.cache.lens_by_layer()
    }


def _changes(
    before: Tensor, after: Tensor, best: int, text_of: Callable[[int], str]
) -> list[Change]:
    top: list[Any] = [*before.topk(min(best, len(before))).indices.tolist()]
    top += [i for i in after.topk(min(best, len(after))).indices.tolist() if i not in top]
    return [Change(i, text_of(i), float(before[i]), float(after[i])) for i in top]
