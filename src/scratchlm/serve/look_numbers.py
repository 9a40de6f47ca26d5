"""Where a number comes from: its formula, the same with the values in, and its line of code.

Every number is computed here once more in float64 from what the model kept, and comes with the
function of `ops/reference.py` that defines it and the line that does it.
"""

from __future__ import annotations

import inspect as python_inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inference.device_sampling import shifted
from scratchlm.inference.sampling import Sampling
from scratchlm.inspect import inspect
from scratchlm.model import LayerNorm, RMSNorm
from scratchlm.ops import reference
from scratchlm.serve.look_tokens import apply_filters, settings_of
from scratchlm.serve.subject import Ids, Subject

_TERMS = 6  # of a long sum that are written out


def source(op: str, line: str) -> dict[str, Any]:
    """Return the code of a reference op, and where the line that holds `line` stands."""
    lines, first = python_inspect.getsourcelines(getattr(reference.ReferenceOps, op))
    at = next(i for i, text in enumerate(lines) if line in text)
    return {
        "file": f"ops/{Path(reference.__file__).name}",
        "line": first + at,
        "first": first,
        "code": [text.rstrip("\n")[4:] for text in lines],
    }


def _softmax(x: Float[Tensor, " vocab"], token: int, letter: str) -> dict[str, Any]:
    """Explain a probability by the logits it comes from; −∞ is a token that was removed."""
    top, own = float(x.max()), float(x[token])
    total = float((x - top).exp().sum())
    return {
        "formula": f"p = exp({letter}_t − max {letter}) / Σ_i exp({letter}_i − max {letter})",
        "numbers": f"exp({own:.6g} − {top:.6g}) / {total:.6g}",
        "value": math.exp(own - top) / total,
        "parts": [
            [f"{letter}_t", own, None],
            [f"max {letter}", top, None],
            [f"Σ over {int(x.isfinite().sum())} tokens", total, None],
        ],
        "source": source("softmax", "weights / total"),
    }


@torch.no_grad()
def probability(subject: Subject, ids: Ids, token: int) -> dict[str, Any]:
    """p = exp(x_t − max x) / Σ exp(x − max x)."""
    x = subject.last_logits(ids).double()
    _check_token(token, len(x))
    found = _softmax(x, token, "x")
    found["parts"][0] = ["x_t, the logit", float(x[token]), {"kind": "logit", "token": token}]
    return {"name": f"probability of {_quoted(subject, token)} after {len(ids)} tokens", **found}


@torch.no_grad()
def filtered(
    subject: Subject, ids: Ids, token: int, sampling: Sampling | None = None, num_prompt: int = 0
) -> dict[str, Any]:
    """Explain a probability after bias, penalties, temperature and filters."""
    x, sampling = subject.last_logits(ids)[None], sampling or Sampling()
    _check_token(token, x.shape[-1])
    settings = settings_of(subject, ids, min(num_prompt, len(ids)), sampling, 0)
    moved = shifted(x, settings)
    after, removed = apply_filters(moved, settings, sampling)
    if token in removed:
        raise ValueError(f"{_quoted(subject, token)} was removed by {removed[token]}")
    found = _softmax(after[0].double(), token, "y")
    found["formula"] += ",   y = (x + bias and penalties) / temperature of the tokens left"
    found["parts"][1:1] = [
        ["x_t, the logit", float(x[0, token]), {"kind": "logit", "token": token}],
        ["bias and penalties", float(moved[0, token] - x[0, token]), None],
        ["temperature (0: the likeliest alone is left)", sampling.temperature, None],
    ]
    name = f"probability of {_quoted(subject, token)} after {len(ids)} tokens and the filters"
    return {"name": name, **found}


@torch.no_grad()
def lens(
    subject: Subject, ids: Ids, token: int, position: int, layer: int | None = None
) -> dict[str, Any]:
    """Explain what the final norm and the head say after a layer, or after the embedding."""
    if not 0 <= position < len(ids):
        raise ValueError(f"position must lie in [0, {len(ids)}); got {position}")
    point = "embed" if layer is None else f"layers.{layer}.out"
    with inspect(subject.model) as look:
        look.keep(["embed", "layers.*.out"], positions=[position])
        subject.model(subject.row(ids))
    logits = dict(look.cache.lens_by_layer())[point]
    _check_token(token, logits.shape[-1])
    where = "the embedding" if layer is None else f"layer {layer}"
    found = _softmax(logits[0, 0].double(), token, "x")
    found["formula"] += f",   x = W · norm(stream after {where})"
    stream = look.cache[point][0, 0]
    found["parts"] += _norm_part(subject.model.ln_final, stream)
    return {"name": f"{_quoted(subject, token)} after token {position}, by {where}", **found}


@torch.no_grad()
def surprise(subject: Subject, ids: Ids, token: int) -> dict[str, Any]:
    """−log2 p, from the cross-entropy."""
    x = subject.last_logits(ids).double()
    _check_token(token, len(x))
    normaliser, own = float(x.logsumexp(dim=-1)), float(x[token])
    return {
        "name": f"surprise at {_quoted(subject, token)} after {len(ids)} tokens, in bits",
        "formula": "−log₂ p = (log Σ_i exp(x_i) − x_t) / log 2",
        "numbers": f"({normaliser:.6g} − {own:.6g}) / {math.log(2):.6g}",
        "value": (normaliser - own) / math.log(2),
        "parts": [
            ["log Σ exp(x)", normaliser, None],
            ["x_t, the logit", own, {"kind": "logit", "token": token}],
        ],
        "source": source("cross_entropy", "normaliser - chosen"),
    }


@torch.no_grad()
def entropy(subject: Subject, ids: Ids) -> dict[str, Any]:
    """−Σ p log2 p of the next token's distribution."""
    p = subject.last_logits(ids).double().softmax(dim=-1)
    terms = -(p * p.log2()).masked_fill(p == 0, 0.0)
    return {
        "name": f"entropy of the next token after {len(ids)} tokens, in bits",
        "formula": "H = −Σ_i p_i log₂ p_i",
        "numbers": _sum_text(terms, "{:.4g}"),
        "value": float(terms.sum()),
        "parts": [
            [subject.text(t), float(terms[t]), {"kind": "probability", "token": t}]
            for t in terms.topk(min(_TERMS, len(p))).indices.tolist()
        ],
        "source": source("softmax", "weights / total"),
    }


@torch.no_grad()
def logit(subject: Subject, ids: Ids, token: int) -> dict[str, Any]:
    """x_t = W_t · h (+ b_t), h the final vector."""
    model: Any = subject.model
    last = len(ids) - 1
    with inspect(model) as look:
        look.keep(["final", f"layers.{len(model.layers) - 1}.out"], positions=[last])
        model(subject.row(ids))
    head = model.lm_head
    _check_token(token, len(head.weight))
    h, w = look.cache["final"][0, 0].double(), head.weight[token].double()
    terms = h * w
    bias = getattr(head, "bias", None)
    added = 0.0 if bias is None else float(bias[token])
    order = terms.abs().topk(min(_TERMS, len(terms))).indices.tolist()
    norm = _norm_part(model.ln_final, look.cache[f"layers.{len(model.layers) - 1}.out"][0, 0])
    return {
        "name": f"logit of {_quoted(subject, token)} after {len(ids)} tokens",
        "formula": "x_t = Σ_c W[t, c] · h[c]" + ("" if bias is None else " + b[t]"),
        "numbers": _sum_text(terms, "{:.4g}") + ("" if bias is None else f" + {added:.4g}"),
        "value": float(terms.sum()) + added,
        "parts": [
            [f"W[{token}, {c}] · h[{c}] = {w[c]:.4g} · {h[c]:.4g}", float(terms[c]), None]
            for c in order
        ]
        + norm,
        "source": source("linear", "einsum"),
    }


def _norm_part(norm: Any, stream: Tensor) -> list[list[Any]]:
    """Name the scale by which the final norm divides."""
    x = stream.double()
    if isinstance(norm, RMSNorm):
        return [
            ["√(mean(x²) + ε) of the final norm", float((x.pow(2).mean() + norm.eps).sqrt()), None]
        ]
    if isinstance(norm, LayerNorm):
        deviation = ((x - x.mean()).pow(2).mean() + norm.eps).sqrt()
        return [["√(var + ε) of the final norm", float(deviation), None]]
    return []


@torch.no_grad()
def attention_weight(
    subject: Subject, ids: Ids, layer: int, head: int, query: int, key: int
) -> dict[str, Any]:
    """softmax over the keys of q · k / √d."""
    for name, value in (("query", query), ("key", key)):
        if not 0 <= value < len(ids):
            raise ValueError(f"{name} must lie in [0, {len(ids)}); got {value}")
    model: Any = subject.model
    at = f"layers.{layer}.attn"
    with inspect(model) as look:
        look.keep([f"{at}.q", f"{at}.scores"], positions=[query], heads=head)
        look.keep([f"{at}.k"])
        model(subject.row(ids))
    q = look.cache[f"{at}.q"][0, 0, 0].double()
    keys = look.cache[f"{at}.k"][0]
    group = model.config.num_heads // len(keys)
    k = keys[head // group, key].double()
    scores = look.cache[f"{at}.scores"][0, 0, 0].double()
    seen = scores[torch.isfinite(scores)]
    if not math.isfinite(float(scores[key])):
        raise ValueError(f"token {query} does not see token {key}: its weight is 0")
    score = float((q @ k) / math.sqrt(len(q)))
    top = float(seen.max())
    total = float((seen - top).exp().sum())
    return {
        "name": f"weight of layer {layer}, head {head}: token {query} on token {key}",
        "formula": "a = exp(s_j − max s) / Σ_i exp(s_i − max s),   s_j = q · k_j / √d_head",
        "numbers": f"exp({score:.6g} − {top:.6g}) / {total:.6g}",
        "value": math.exp(score - top) / total,
        "parts": [
            ["q · k", float(q @ k), None],
            ["√d_head", math.sqrt(len(q)), None],
            ["s_j = q · k_j / √d_head", score, None],
            [f"Σ over {len(seen)} keys", total, None],
        ],
        "source": source("scaled_dot_product_attention", "self.softmax(scores"),
    }


@torch.no_grad()
def expert_weight(
    subject: Subject, ids: Ids, layer: int, position: int, chosen: int
) -> dict[str, Any]:
    """softmax over the experts of the router's logits, renormalised over the chosen."""
    model: Any = subject.model
    point = f"layers.{layer}.ffn.router"
    with inspect(model) as look:
        look.keep(point, positions=[position])
        model(subject.row(ids))
    ffn = model.layers[layer].ffn
    p = look.cache[point][0, 0].double().softmax(dim=-1)
    top, experts = p.topk(ffn.experts_per_token)
    if not 0 <= chosen < len(top):
        raise ValueError(f"chosen must lie in [0, {len(top)}); got {chosen}")
    own, total = float(top[chosen]), float(top.sum()) if ffn.renormalize else 1.0
    return {
        "name": f"weight of expert {int(experts[chosen])} in layer {layer} for token {position}",
        "formula": "w_e = p_e" + (" / Σ over the chosen of p" if ffn.renormalize else ""),
        "numbers": f"{own:.6g}" + (f" / {total:.6g}" if ffn.renormalize else ""),
        "value": own / total,
        "parts": [
            [f"p of expert {e}", float(q), None] for q, e in zip(top, experts.tolist(), strict=True)
        ],
        "source": source("route", "weights.sum" if ffn.renormalize else "topk"),
    }


NUMBERS: dict[str, Callable[..., dict[str, Any]]] = {
    "probability": probability,
    "filtered": filtered,
    "lens": lens,
    "surprise": surprise,
    "entropy": entropy,
    "logit": logit,
    "attention": attention_weight,
    "expert": expert_weight,
}


def _quoted(subject: Subject, token: int) -> str:
    return json.dumps(subject.text(token), ensure_ascii=False)


def _check_token(token: int, vocab: int) -> None:
    if not 0 <= token < vocab:
        raise ValueError(f"token must lie in [0, {vocab}); got {token}")


def _sum_text(terms: Tensor, form: str) -> str:
    """Write the largest terms of a sum, and the rest as one."""
    order = terms.abs().topk(min(_TERMS, len(terms))).indices
    shown = [form.format(float(terms[i])) for i in order]
    rest = float(terms.sum() - terms[order].sum())
    if len(terms) > len(order):
        shown.append(f"{form.format(rest)} (the other {len(terms) - len(order)})")
    return " + ".join(shown).replace("+ -", "− ")
