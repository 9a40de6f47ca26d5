"""Numbers of the next token: probability, logit, rank, surprise, entropy, filters, the draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inference.device_sampling import Settings, shifted
from scratchlm.inference.sampling import Sampling, uniform
from scratchlm.inspect import inspect
from scratchlm.serve.explanation import (
    REFERENCE,
    Explanation,
    check_token,
    largest,
    logit_terms,
    norm_part,
    quoted,
    softmax,
    source,
    sum_text,
)
from scratchlm.serve.look_inside import Scaling, apply_edits, edited_logits
from scratchlm.serve.look_tokens import apply_filters, settings_of
from scratchlm.serve.subject import Ids, Subject, check_index

Edits = Sequence[Scaling]


@torch.no_grad()
def probability(subject: Subject, ids: Ids, token: int, edits: Edits = ()) -> Explanation:
    """p = exp(x_t − max x) / Σ exp(x − max x)."""
    x = edited_logits(subject, ids, edits).double()
    check_token(token, len(x))
    found = softmax(x, token, "x")
    found["parts"][0] = ["x_t, the logit", float(x[token]), {"kind": "logit", "token": token}]
    changed = _changed(edits)
    return {"name": f"probability of {quoted(subject, token)} {_after(ids)}{changed}", **found}


def _after(ids: Ids) -> str:
    return f"after {len(ids)} tokens"


def _changed(edits: Edits) -> str:
    return ", with the edits" if any(edit.factor != 1 for edit in edits) else ""


@torch.no_grad()
def logit(
    subject: Subject, ids: Ids, token: int, against: int | None = None, edits: Edits = ()
) -> Explanation:
    """x_t = W_t · h (+ b_t), h the final vector; with `against`, its lead over another's."""
    if any(edit.point == "logits" and edit.factor != 1 for edit in edits):
        raise ValueError("the logits themselves were scaled: they are no product any more")
    found = logit_terms(subject, ids, token, against, partial(apply_edits, edits=edits))
    lead = "" if against is None else f" minus that of {quoted(subject, against)}"
    name = f"logit of {quoted(subject, token)}{lead} {_after(ids)}{_changed(edits)}"
    return {"name": name, **found}


@torch.no_grad()
def moved(subject: Subject, ids: Ids, token: int, edits: Edits = ()) -> Explanation:
    """100 (q_t − p_t): how far edits move a probability, in percentage points."""
    x, y = (edited_logits(subject, ids, e).double().softmax(-1) for e in ((), edits))
    check_token(token, len(x))
    before, after = float(x[token]), float(y[token])
    return {
        "name": f"change of the probability of {quoted(subject, token)}, in percentage points",
        "formula": "100 · (q_t − p_t)",
        "numbers": f"100 · ({after:.6g} − {before:.6g})",
        "value": 100 * (after - before),
        "parts": [
            ["q_t, after", after, {"kind": "probability", "token": token}],
            ["p_t, before", before, {"kind": "probability", "token": token, "edits": []}],
        ],
        "source": source(REFERENCE, "weights / total"),
    }


@torch.no_grad()
def divergence(subject: Subject, ids: Ids, edits: Edits = ()) -> Explanation:
    """KL = Σ p log(p / q), q with the edits."""
    log_p, log_q = (edited_logits(subject, ids, e).double().log_softmax(-1) for e in ((), edits))
    p = log_p.exp()
    terms = (p * (log_p - log_q)).masked_fill(p == 0, 0.0)
    return {
        "name": f"KL divergence of the next token's distribution {_after(ids)}, in nats",
        "formula": "KL = Σ_i p_i · (log p_i − log q_i),   p before, q after the edits",
        "numbers": sum_text(terms),
        "value": float(terms.sum()),
        "parts": [
            [f"p log(p / q) of {quoted(subject, t)}", float(terms[t]), _of(t, "probability")]
            for t in largest(terms)
        ],
        "source": source("serve/look_inside.py", "log_was - log_now"),
    }


def _of(token: int, kind: str) -> dict[str, Any]:
    return {"kind": kind, "token": token}


@torch.no_grad()
def surprise(subject: Subject, ids: Ids, token: int) -> Explanation:
    """−log2 p, from the cross-entropy."""
    x = subject.last_logits(ids).double()
    check_token(token, len(x))
    normaliser, own = float(x.logsumexp(dim=-1)), float(x[token])
    return {
        "name": f"surprise at {quoted(subject, token)} {_after(ids)}, in bits",
        "formula": "−log₂ p = (log Σ_i exp(x_i) − x_t) / log 2",
        "numbers": f"({normaliser:.6g} − {own:.6g}) / {math.log(2):.6g}",
        "value": (normaliser - own) / math.log(2),
        "parts": [
            ["log Σ exp(x)", normaliser, None],
            ["x_t, the logit", own, {"kind": "logit", "token": token}],
        ],
        "source": source(REFERENCE, "normaliser - chosen"),
    }


@torch.no_grad()
def lens(
    subject: Subject, ids: Ids, token: int, position: int, layer: int | None = None
) -> Explanation:
    """Explain what the final norm and the head say after a layer, or after the embedding."""
    check_index("position", position, len(ids))
    point = "embed" if layer is None else f"layers.{layer}.out"
    with inspect(subject.model) as look:
        look.keep(["embed", "layers.*.out"], positions=[position])
        subject.model(subject.row(ids))
    logits = dict(look.cache.lens_by_layer())[point]
    check_token(token, logits.shape[-1])
    where = "the embedding" if layer is None else f"layer {layer}"
    found = softmax(logits[0, 0].double(), token, "x")
    found["formula"] += f",   x = W · norm(stream after {where})"
    found["parts"] += norm_part(subject.model.ln_final, look.cache[point][0, 0])
    return {"name": f"{quoted(subject, token)} after token {position}, by {where}", **found}


# Before and after the filters


class _Filtered:
    """Logits on their way through penalties and filters; without a sampling, as they are."""

    def __init__(
        self, subject: Subject, ids: Ids, sampling: Sampling | None, num_prompt: int
    ) -> None:
        self.sampling = sampling or Sampling()
        self.raw = subject.last_logits(ids)[None]
        self.settings: Settings = settings_of(
            subject, ids, min(num_prompt, len(ids)), self.sampling, 0
        )
        self.moved = shifted(self.raw, self.settings)
        self.left: Tensor = self.raw.double()
        self.removed: dict[int, str] = {}
        if sampling is not None:
            self.left, self.removed = apply_filters(self.moved, self.settings, self.sampling)
        self.log_p: Float[Tensor, " vocab"] = self.left[0].log_softmax(dim=-1)
        self.said = "" if sampling is None else " and the filters"

    def check(self, subject: Subject, token: int) -> None:
        check_token(token, len(self.log_p))
        if token in self.removed:
            raise ValueError(f"{quoted(subject, token)} was removed by {self.removed[token]}")


@torch.no_grad()
def filtered(
    subject: Subject, ids: Ids, token: int, sampling: Sampling | None = None, num_prompt: int = 0
) -> Explanation:
    """Explain a probability after bias, penalties, temperature and filters."""
    x = _Filtered(subject, ids, sampling or Sampling(), num_prompt)
    x.check(subject, token)
    found = softmax(x.left[0].double(), token, "y")
    found["formula"] += ",   y = (x + bias and penalties) / temperature, of the tokens that remain"
    shift = float(x.moved[0, token] - x.raw[0, token])
    found["parts"][1:1] = [
        ["x_t, the logit", float(x.raw[0, token]), {"kind": "logit", "token": token}],
        ["bias and penalties", shift, _of(token, "shift") | _settings_of(x, num_prompt)],
        ["temperature (0: greedy)", x.sampling.temperature, None],
    ]
    return {
        "name": f"probability of {quoted(subject, token)} {_after(ids)} and the filters"
    } | found


def _settings_of(x: _Filtered, num_prompt: int) -> dict[str, Any]:
    fields = {name: value for name, value in vars(x.sampling).items() if name != "logit_bias"}
    return {"sampling": fields, "num_prompt": num_prompt}


@torch.no_grad()
def shift(
    subject: Subject, ids: Ids, token: int, sampling: Sampling | None = None, num_prompt: int = 0
) -> Explanation:
    """Explain what penalties add to a logit."""
    x = _Filtered(subject, ids, sampling or Sampling(), num_prompt)
    check_token(token, len(x.log_p))
    own, by = float(x.raw[0, token]), x.sampling
    written = list(ids[num_prompt:]).count(token)
    theta = by.repetition_penalty if token in ids else 1.0
    repeated = own * theta if own < 0 else own / theta
    presence, frequency = by.presence_penalty * (written > 0), by.frequency_penalty * written
    return {
        "name": f"penalties on the logit of {quoted(subject, token)} {_after(ids)}",
        "formula": "(x_t · θ below 0, x_t / θ above) − α_p · [c_t > 0] − α_f · c_t − x_t",
        "numbers": f"{repeated:.6g} − {presence:.6g} − {frequency:.6g} − {own:.6g}",
        "value": repeated - presence - frequency - own,
        "parts": [
            ["x_t, the logit", own, {"kind": "logit", "token": token}],
            ["θ, the repetition penalty, if the token occurs", theta, None],
            ["α_p, the presence penalty", by.presence_penalty, None],
            ["α_f, the frequency penalty", by.frequency_penalty, None],
            ["c_t, how often it occurs in the output", written, None],
        ],
        "source": source("inference/filters.py", "logits * penalty, logits / penalty"),
    }


@torch.no_grad()
def rank(
    subject: Subject, ids: Ids, token: int, sampling: Sampling | None = None, num_prompt: int = 0
) -> Explanation:
    """1 + how many tokens come before it; on ties the lower id comes first."""
    x = _Filtered(subject, ids, sampling, num_prompt)
    x.check(subject, token)
    more = int((x.log_p > x.log_p[token]).sum())
    ties = int((x.log_p[:token] == x.log_p[token]).sum())
    asked = _of(token, "probability")
    if sampling is not None:
        asked = _of(token, "filtered") | _settings_of(x, num_prompt)
    return {
        "name": f"rank of {quoted(subject, token)} {_after(ids)}{x.said}",
        "formula": "1 + |{i : p_i > p_t}| + |{i < t : p_i = p_t}|",
        "numbers": f"1 + {more} + {ties}",
        "value": 1 + more + ties,
        "parts": [["p_t", float(x.log_p[token].exp()), asked]],
        "source": source("serve/look_tokens.py", "ahead = "),
    }


@torch.no_grad()
def entropy(
    subject: Subject, ids: Ids, sampling: Sampling | None = None, num_prompt: int = 0
) -> Explanation:
    """−Σ p log2 p of the next token's distribution, or of what the filters leave of it."""
    x = _Filtered(subject, ids, sampling, num_prompt)
    p = x.log_p.exp()
    terms = -(p * x.log_p / math.log(2)).masked_fill(p == 0, 0.0)
    asked: dict[str, Any] = {"kind": "probability"}
    if sampling is not None:
        asked = {"kind": "filtered", **_settings_of(x, num_prompt)}
    return {
        "name": f"entropy of the next token {_after(ids)}{x.said}, in bits",
        "formula": "H = −Σ_i p_i log₂ p_i",
        "numbers": sum_text(terms),
        "value": float(terms.sum()),
        "parts": [
            [f"−p log₂ p of {quoted(subject, t)}", float(terms[t]), {**asked, "token": t}]
            for t in largest(terms)
            if t not in x.removed
        ],
        "source": source("serve/look_tokens.py", "terms = log_p.exp() * log_p"),
    }


@torch.no_grad()
def draw(
    subject: Subject, ids: Ids, seed: int, sampling: Sampling | None = None, num_prompt: int = 0
) -> Explanation:
    """The number of a seed and a step, and where it falls among the probabilities."""
    x = _Filtered(subject, ids, sampling or Sampling(), num_prompt)
    step = len(ids) - num_prompt
    check_index("num_prompt", num_prompt, len(ids) + 1)
    number = uniform(seed, step)
    cdf = x.log_p.exp().cumsum(dim=-1)
    token = min(int((cdf <= number * cdf[-1]).sum()), len(cdf) - 1)
    asked = _of(token, "filtered") | _settings_of(x, num_prompt)
    below = float(cdf[token] - x.log_p[token].exp())
    return {
        "name": f"the draw of seed {seed}, step {step}",
        "formula": "u = ⌊first 64 bits of BLAKE2b(“seed,step”) / 2¹¹⌋ · 2⁻⁵³",
        "numbers": f"⌊first 64 bits of BLAKE2b(“{seed},{step}”) / 2¹¹⌋ · 2⁻⁵³",
        "value": number,
        "parts": [
            [f"Σ p of the tokens before {quoted(subject, token)}", below, None],
            [f"p of {quoted(subject, token)}", float(x.log_p[token].exp()), asked],
        ],
        "source": source("inference/sampling.py", "digest = "),
    }
