"""What happens inside: attention, lens, attribution, edits, patches, experts, as plain data.

Every function runs the model inside `inspect(model)` and gives numbers that JSON can hold; a table
of weights that is drawn as pixels goes as bytes, and every number that is shown as one goes as one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inspect import PARTS, Look, head_scores, inspect
from scratchlm.inspect.finding import CELLS
from scratchlm.serve.subject import Ids, Subject, check_index

THUMBNAIL = 40  # pixels of a head's picture, at most
HEAD_KINDS = ("previous_token", "duplicate_token", "induction")


def pixels(weights: Float[Tensor, "rows columns"]) -> str:
    """Write numbers in [0, 1] as bytes, row by row, in base64."""
    table = (weights * 255).round().to(torch.uint8).cpu().numpy()
    return base64.b64encode(table.tobytes()).decode()


@torch.no_grad()
def heads(subject: Subject, ids: Ids) -> dict[str, Any]:
    """Return every head as a small picture of its weights, with what it does.

    The scores for previous token, duplicate token and induction are those of `head_scores`, on
    random tokens said twice; `first` and `self` are mean weights in this text.
    """
    model, row = subject.model, subject.row(ids)
    size = min(THUMBNAIL, len(ids))
    scores = _scores(subject)
    found: list[dict[str, Any]] = []
    per_layer = model.config.num_heads * len(ids) ** 2
    group = max(1, CELLS // per_layer)
    names = [f"layers.{i}.attn.weights" for i in range(len(model.layers))]
    for start in range(0, len(names), group):
        with inspect(model) as look:
            look.keep(names[start : start + group])
            model(row)
        for layer, name in enumerate(names[start : start + group], start):
            weights = look.cache[name][0].float()  # (heads, query, key)
            small = torch.nn.functional.adaptive_max_pool2d(weights[None], size)[0]
            for head, one in enumerate(weights):
                found.append(
                    {
                        "layer": layer,
                        "head": head,
                        "pixels": pixels(small[head]),
                        "first": float(one[:, 0].mean()),
                        "self": float(one.diagonal().mean()),
                        **{kind: table[layer][head] for kind, table in scores.items()},
                    }
                )
    return {"size": size, "kinds": list(scores), "heads": found}


def _scores(subject: Subject) -> dict[str, list[list[float]]]:
    """Score every head once for each model; a context of under four tokens has no such score."""
    if subject.head_scores is None:
        subject.head_scores = {}
        if subject.model.config.context_length >= 4:
            found = head_scores(subject.model)
            subject.head_scores = {kind: getattr(found, kind).tolist() for kind in HEAD_KINDS}
    return subject.head_scores


@torch.no_grad()
def attention(subject: Subject, ids: Ids, layer: int, head: int, query: int) -> dict[str, Any]:
    """Return one head's weights: all of them as pixels, those of one token as numbers."""
    check_index("query", query, len(ids))
    name = f"layers.{layer}.attn.weights"
    with inspect(subject.model) as look:
        look.keep(name, heads=head)
        subject.model(subject.row(ids))
    weights = look.cache[name][0, 0]
    return {"size": len(ids), "pixels": pixels(weights.float()), "row": weights[query].tolist()}


@torch.no_grad()
def lens(
    subject: Subject, ids: Ids, start: int = 0, stop: int | None = None, best: int = 3
) -> dict[str, Any]:
    """Return the likeliest tokens after the embedding and after each layer, by position."""
    stop = len(ids) if stop is None else min(stop, len(ids))
    check_index("start", start, stop)
    with inspect(subject.model) as look:
        look.keep(["embed", "layers.*.out"], positions=range(start, stop))
        subject.model(subject.row(ids))
    layers = []
    for point, logits in look.cache.lens_by_layer():
        p, tokens = logits[0].double().softmax(dim=-1).topk(min(best, logits.shape[-1]))
        cells = [
            [[t, subject.text(t), q] for t, q in zip(*pair, strict=True)]
            for pair in zip(tokens.tolist(), p.tolist(), strict=True)
        ]
        layers.append({"point": point, "cells": cells})
    return {"start": start, "stop": stop, "layers": layers}


@torch.no_grad()
def attribution(
    subject: Subject, ids: Ids, token: int, against: int | None = None
) -> dict[str, Any]:
    """Return each part's share of the logit of `token` after these ids; they add up to it."""
    last = len(ids) - 1
    with inspect(subject.model) as look:
        look.keep(PARTS, positions=[last])
        subject.model(subject.row(ids))
    found = look.cache.attribute(token, against, last)
    return {
        "parts": found.top(),
        "logit": float(found.logit[0]),
        "sum": float(found.shares[0].sum()),
        "error": found.error,
        "token": [token, subject.text(token)],
        "against": None if against is None else [against, subject.text(against)],
    }


@dataclass(frozen=True)
class Scaling:
    """A part of a point, multiplied by a factor while the model runs; 0 takes it out."""

    point: str
    factor: float
    heads: Sequence[int] | None = None
    units: Sequence[int] | None = None


def apply_edits(look: Look, edits: Sequence[Scaling]) -> None:
    """Put edits into a model; a factor of 1 is none."""
    for edit in edits:
        if edit.factor == 0:
            look.zero(edit.point, heads=edit.heads, units=edit.units)
        elif edit.factor != 1:
            look.scale(edit.point, edit.factor, heads=edit.heads, units=edit.units)


@torch.no_grad()
def edited_logits(subject: Subject, ids: Ids, edits: Sequence[Scaling]) -> Float[Tensor, " vocab"]:
    """Return the logits after the last token, with edits in the model."""
    with inspect(subject.model) as look:
        apply_edits(look, edits)
        return subject.last_logits(ids)


@torch.no_grad()
def ablate(subject: Subject, ids: Ids, edits: Sequence[Scaling], best: int = 10) -> dict[str, Any]:
    """Return the next-token table without and with these edits, and whether a bit changed."""
    before, after = subject.last_logits(ids), edited_logits(subject, ids, edits)
    if not after.isfinite().all():
        raise ValueError("with these edits the logits are not finite: a factor is too large")
    was, now = (x.double().softmax(dim=-1) for x in (before, after))
    log_was, log_now = (x.double().log_softmax(dim=-1) for x in (before, after))
    top = [*was.topk(min(best, len(was))).indices.tolist()]
    top += [t for t in now.topk(min(best, len(now))).indices.tolist() if t not in top]
    moved = was * (log_was - log_now)
    return {
        "rows": [
            {"id": t, "text": subject.text(t), "before": float(was[t]), "after": float(now[t])}
            for t in top
        ],
        "divergence": float(moved.masked_fill(was == 0, 0.0).sum()),
        "same_bits": torch.equal(before, after),
        "bits": [_digest(before), _digest(after)],
    }


def _digest(logits: Tensor) -> str:
    """Name the bits of logits: equal names, equal bits."""
    data = logits.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:12]


PATCHES = {
    "stream": "layers.*.out",
    "attention": "layers.*.attn.out",
    "feed-forward": "layers.*.ffn.out",
    "heads": "layers.*.attn.heads",
}


def patched_points(ids: Ids, other: Ids, what: str) -> str:
    """Return the points that are patched from one prompt into another, which must be as long."""
    if len(ids) != len(other):
        raise ValueError(
            f"the two prompts must have as many tokens; got {len(ids)} and {len(other)}"
        )
    if what not in PATCHES:
        raise ValueError(f"what must be one of {', '.join(PATCHES)}; got {what!r}")
    return PATCHES[what]


@torch.no_grad()
def patch(
    subject: Subject,
    ids: Ids,
    other: Ids,
    token: int,
    against: int | None = None,
    what: str = "stream",
) -> dict[str, Any]:
    """Run `other` with one part at a time as it was in `ids`; return the logit of `token` in each.

    With `against` it is the lead over that token's logit. "heads" patches whole heads; the others
    one position of one layer at a time.
    """
    points = patched_points(ids, other, what)
    vocab = subject.model.config.vocab_size
    for one in (token, *([] if against is None else [against])):
        check_index("token", one, vocab)

    def metric(logits: Float[Tensor, "batch seq vocab"]) -> Float[Tensor, " batch"]:
        last = logits[:, -1].double()
        return last[:, token] if against is None else last[:, token] - last[:, against]

    by_head = what == "heads"
    model, row, corrupted = subject.model, subject.row(ids), subject.row(other)
    with inspect(model) as look:
        look.keep(points)
        clean = metric(model(row))
    with inspect(model) as again:
        table = again.sweep(
            points,
            metric,
            tokens=corrupted,
            from_=look.cache,
            each="head" if by_head else "position",
        )
    return {
        "rows": [f"layers.{i}" for i in range(len(model.layers))],
        "columns": list(range(table.shape[1])),
        "by": "head" if by_head else "position",
        "values": table.tolist(),
        "clean": float(clean),
        "other": float(metric(model(corrupted))),
    }


@torch.no_grad()
def experts(subject: Subject, ids: Ids) -> dict[str, Any]:
    """Return which experts every token went to, layer by layer, and each expert's load."""
    model = subject.model
    mixtures = [i for i, block in enumerate(model.layers) if hasattr(block.ffn, "router")]
    layers = []
    if mixtures:
        with inspect(model) as look:
            look.keep([f"layers.{i}.ffn.router" for i in mixtures])
            model(subject.row(ids))
        for i in mixtures:
            ffn: Any = model.layers[i].ffn
            logits = look.cache[f"layers.{i}.ffn.router"][0]
            p, weights, chosen = ffn.ops.route(logits, ffn.experts_per_token, ffn.renormalize)
            load = chosen.flatten().bincount(minlength=p.shape[-1]) / chosen.numel()
            layers.append(
                {
                    "layer": i,
                    "experts": chosen.tolist(),
                    "weights": weights.tolist(),
                    "load": load.tolist(),
                }
            )
    return {"layers": layers}
