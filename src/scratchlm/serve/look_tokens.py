"""Tokens and the choices behind them: how likely each was, and what every filter did.

`read` gives each token's probability, rank and surprise, and the entropy of what was expected;
`choices` takes one place and follows the candidates through bias, penalties, temperature and the
filters, in the order of `inference/sampling.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inference import filters
from scratchlm.inference.device_sampling import Settings, choose, shifted
from scratchlm.inference.drawing import NOTHING
from scratchlm.inference.rows import Row
from scratchlm.inference.sampling import Sampling, uniform
from scratchlm.serve.subject import Ids, Subject

_ROWS = 64  # positions whose distributions are widened at once
MASKS = ("top_k", "top_p", "min_p", "typical")


def entropy_bits(log_p: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows"]:
    """−Σ p log2 p."""
    terms = log_p.exp() * log_p
    return -terms.masked_fill(log_p == -math.inf, 0.0).sum(dim=-1) / math.log(2)


def ranks(log_p: Float[Tensor, "rows vocab"], tokens: Tensor) -> Tensor:
    """Return each token's place, 1 for the likeliest; on ties the lower id comes first."""
    own = log_p.gather(1, tokens[:, None])
    index = torch.arange(log_p.shape[-1], device=log_p.device)
    ahead = (log_p > own) | ((log_p == own) & (index < tokens[:, None]))
    return ahead.sum(dim=-1) + 1


@torch.no_grad()
def read(subject: Subject, ids: Ids) -> dict[str, Any]:
    """Return every token with its probability after those before it; the first has none."""
    logits = subject.logits(ids)
    tokens = torch.tensor(list(ids), device=logits.device)
    found: list[dict[str, Any]] = [{"id": ids[0], "text": subject.text(ids[0])}]
    for start in range(0, len(ids) - 1, _ROWS):
        table = logits[start : min(start + _ROWS, len(ids) - 1)].double().log_softmax(dim=-1)
        chosen = tokens[start + 1 : start + 1 + len(table)]
        own = table.gather(1, chosen[:, None])[:, 0]
        columns = (chosen, own, own.exp(), ranks(table, chosen), entropy_bits(table))
        for token, log_p, p, rank, entropy in zip(*(c.tolist() for c in columns), strict=True):
            found.append(
                {
                    "id": token,
                    "text": subject.text(token),
                    "probability": p,
                    "surprise": -log_p / math.log(2),
                    "rank": rank,
                    "entropy": entropy,
                }
            )
    return {"tokens": found}


@dataclass
class _Chooser:
    row: Row
    num_logprobs: int | None = None


@torch.no_grad()
def choices(
    subject: Subject,
    ids: Ids,
    at: int,
    *,
    sampling: Sampling,
    num_prompt: int,
    seed: int | None = None,
    best: int = 12,
) -> dict[str, Any]:
    """Return the likeliest tokens at place `at`, before and after the filters.

    `num_prompt` tokens were given, the rest was written: penalties and the draw depend on it.
    """
    if not 1 <= at <= len(ids):
        raise ValueError(f"at must lie in [1, {len(ids)}]: the first token is given; got {at}")
    logits = subject.last_logits(ids[:at])[None]
    settings = settings_of(subject, ids[:at], min(num_prompt, at), sampling, seed or 0)
    before = logits.double().log_softmax(dim=-1)[0]
    moved = shifted(logits, settings)
    after, removed = apply_filters(moved, settings, sampling)
    probability = after.softmax(dim=-1)[0]
    shown = _shown(before, probability, None if at == len(ids) else ids[at], best)
    token_ranks = [ranks(p[None].expand(len(shown), -1), shown) for p in (before, after[0])]
    rows = []
    for i, token in enumerate(shown.tolist()):
        gone = removed.get(token)
        rows.append(
            {
                "id": token,
                "text": subject.text(token),
                "logit": float(logits[0, token]),
                "probability": float(before[token].exp()),
                "rank": int(token_ranks[0][i]),
                "shift": _finite(float(moved[0, token] - logits[0, token])),
                "removed_by": gone,
                "after": float(probability[token]),
                "rank_after": None if gone else int(token_ranks[1][i]),
            }
        )
    found: dict[str, Any] = {
        "at": at,
        "rows": rows,
        "left": int((probability > 0).sum()),
        "vocabulary": len(probability),
        "removed": _counts(removed),
        "entropy": float(entropy_bits(before)),
        "entropy_after": float(entropy_bits(probability.log())),
        "chosen": None if at == len(ids) else ids[at],
    }
    if seed is not None and at >= num_prompt:
        found["draw"] = _draw(subject, logits, settings, seed, at - num_prompt)
    return found


def settings_of(
    subject: Subject, ids: Ids, num_prompt: int, sampling: Sampling, seed: int
) -> Settings:
    """Return what the sampler is told for the token after these ids, of which some were given."""
    row = Row(
        0,
        ids[:num_prompt],
        limit=len(ids) + 1,
        seed=seed,
        sampling=sampling,
        tokenizer=None,
        stop=(),
        eos_ids=(),
    )
    row.ids += ids[num_prompt:]
    return Settings.of([_Chooser(row)], subject.model.config.vocab_size, subject.device)


def apply_filters(
    x: Float[Tensor, "1 vocab"], settings: Settings, sampling: Sampling
) -> tuple[Float[Tensor, "1 vocab"], dict[int, str]]:
    """Apply temperature and masks one by one; return the logits, and who removed which token."""
    removed = dict.fromkeys(_gone(x), "logit_bias")
    if sampling.temperature == 0:
        best = x.argmax(dim=-1, keepdim=True)
        only = torch.full_like(x, -math.inf).scatter(1, best, x.gather(1, best))
        return only, removed | {t: "temperature 0" for t in _gone(only) if t not in removed}
    x = filters.temperature(x, settings.divisor)
    for name in MASKS:
        if name in settings.uses:
            x = settings.uses[name].apply(x, getattr(filters, name))
            removed |= {token: name for token in _gone(x) if token not in removed}
    return x, removed


def _gone(x: Tensor) -> list[int]:
    found: list[int] = (x[0] == -math.inf).nonzero()[:, 0].tolist()
    return found


def _shown(before: Tensor, after: Tensor, chosen: int | None, best: int) -> Tensor:
    """Return the likeliest tokens before and after, and the one that was chosen."""
    best = min(best, len(before))
    left = [t for t in after.topk(best).indices.tolist() if after[t] > 0]
    unique = list(dict.fromkeys([*before.topk(best).indices.tolist(), *left]))
    if chosen is not None and chosen not in unique:
        unique.append(chosen)
    return torch.tensor(unique, device=before.device)


def _counts(removed: dict[int, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in removed.values():
        found[name] = found.get(name, 0) + 1
    return found


def _draw(
    subject: Subject, logits: Tensor, settings: Settings, seed: int, step: int
) -> dict[str, Any] | None:
    """Return the number that seed and step give, and the token it falls on."""
    if not settings.draws:
        return None
    number = uniform(seed, step)
    numbers = torch.tensor([number], dtype=torch.float64, device=logits.device)
    token = int(choose(logits, settings, numbers))
    if token == NOTHING:
        return None
    return {"number": number, "step": step, "id": token, "text": subject.text(token)}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
