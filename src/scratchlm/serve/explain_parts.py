"""Numbers from inside: attention, scores of heads, experts, shares of a logit, patches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from scratchlm.inspect import PARTS, Cache, finding, inspect
from scratchlm.inspect.attribution import share_terms
from scratchlm.serve import look_inside
from scratchlm.serve.explanation import (
    REFERENCE,
    Explanation,
    largest,
    logit_terms,
    norm_part,
    quoted,
    source,
    sum_text,
)
from scratchlm.serve.subject import Ids, Subject, check_index

_ATTRIBUTION = "inspect/attribution.py"


@torch.no_grad()
def attention_weight(
    subject: Subject, ids: Ids, layer: int, head: int, query: int, key: int
) -> Explanation:
    """softmax over the keys of q · k / √d."""
    check_index("query", query, len(ids))
    check_index("key", key, len(ids))
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
        "source": source(REFERENCE, "self.softmax(scores"),
    }


_KEYS = {
    "first": "the first token",
    "self": "the token itself",
    "previous_token": "the previous token",
    "duplicate_token": "the same token, earlier",
    "induction": "the token after the same token, earlier",
}


@torch.no_grad()
def head_score(subject: Subject, ids: Ids, layer: int, head: int, what: str) -> Explanation:
    """The mean weight of a head on keys of a kind: in this text, or on repeated random tokens."""
    if what not in _KEYS:
        raise ValueError(f"what must be one of {', '.join(_KEYS)}; got {what!r}")
    here = what in ("first", "self")
    rows = subject.row(ids) if here else finding.repeated_tokens(subject.model)
    name = f"layers.{layer}.attn.weights"
    with inspect(subject.model) as look:
        look.keep(name, heads=head)
        subject.model.hidden(rows)
    weights = look.cache[name][:, 0].double()  # (rows, query, key)
    back = 0
    if here:
        terms = weights[:, :, 0] if what == "first" else weights.diagonal(0, -2, -1)
        first = 0
    else:
        back, first = finding.KEYS[what](rows.shape[1] // 2)
        terms = finding.looked_at(weights, what)
    flat, width = terms.flatten(), terms.shape[1]
    parts = []
    for i in largest(flat):
        query = first + i % width
        key = 0 if what == "first" else query - back
        asked = {"kind": "attention", "layer": layer, "head": head, "query": query, "key": key}
        at = f"a[{query}, {key}]" + ("" if here else f" of sequence {i // width}")
        parts.append([at, float(flat[i]), {**asked, "ids": rows[i // width].tolist()}])
    where = "in this text" if here else f"on {len(rows)} repeated random sequences"
    return {
        "name": f"mean attention weight of layer {layer}, head {head} on {_KEYS[what]}, {where}",
        "formula": f"the mean of {len(flat)} weights a[query, key]",
        "numbers": f"({sum_text(flat)}) / {len(flat)}",
        "value": float(flat.mean()),
        "parts": parts,
        "source": source(
            "serve/look_inside.py", "one[:, 0]" if what == "first" else "one.diagonal()"
        )
        if here
        else source("inspect/finding.py", "weights.diagonal("),
    }


# Experts


def _routing(subject: Subject, ids: Ids, layer: int) -> tuple[Any, Tensor]:
    """Return a layer's feed-forward and every expert's probability at every position."""
    model: Any = subject.model
    point = f"layers.{layer}.ffn.router"
    with inspect(model) as look:
        look.keep(point)
        model(subject.row(ids))
    return model.layers[layer].ffn, look.cache[point][0].double().softmax(dim=-1)


@torch.no_grad()
def expert_weight(
    subject: Subject, ids: Ids, layer: int, position: int, chosen: int
) -> Explanation:
    """softmax over the experts of the router's logits, renormalised over the chosen."""
    check_index("position", position, len(ids))
    ffn, p = _routing(subject, ids, layer)
    top, experts = p[position].topk(ffn.experts_per_token)
    check_index("chosen", chosen, len(top))
    own, total = float(top[chosen]), float(top.sum()) if ffn.renormalize else 1.0
    return {
        "name": f"weight of expert {int(experts[chosen])} in layer {layer} for token {position}",
        "formula": "w_e = p_e" + (" / Σ over the chosen of p" if ffn.renormalize else ""),
        "numbers": f"{own:.6g}" + (f" / {total:.6g}" if ffn.renormalize else ""),
        "value": own / total,
        "parts": [
            [f"p of expert {e}", float(q), None] for q, e in zip(top, experts.tolist(), strict=True)
        ],
        "source": source(
            REFERENCE, "weights / weights.sum" if ffn.renormalize else "probabilities.topk"
        ),
    }


@torch.no_grad()
def expert_load(subject: Subject, ids: Ids, layer: int, chosen: int) -> Explanation:
    """The share of a text's choices that fell on an expert."""
    ffn, p = _routing(subject, ids, layer)
    check_index("chosen", chosen, p.shape[-1])
    count = int((p.topk(ffn.experts_per_token).indices == chosen).sum())
    return {
        "name": f"load of expert {chosen} in layer {layer}",
        "formula": "choices that fell on it / (tokens · experts per token)",
        "numbers": f"{count} / ({len(ids)} · {ffn.experts_per_token})",
        "value": count / (len(ids) * ffn.experts_per_token),
        "parts": [["choices that fell on it", count, None]],
        "source": source(REFERENCE, "probabilities.topk"),
    }


# Shares of a logit, and patches


def _parts_kept(subject: Subject, ids: Ids) -> Cache:
    with inspect(subject.model) as look:
        look.keep(PARTS, positions=[len(ids) - 1])
        subject.model(subject.row(ids))
    return look.cache


@torch.no_grad()
def share(
    subject: Subject, ids: Ids, token: int, part: str, against: int | None = None
) -> Explanation:
    """W_t · (g ⊙ part / s): what one part of the stream adds to the logit."""
    kept, parts = _parts_kept(subject, ids), []
    w = "W[t, c]" if against is None else "(W[t, c] − W[a, c])"
    name = f"contribution of {part} to the logit of {quoted(subject, token)}"
    name += "" if against is None else f" minus that of {quoted(subject, against)}"
    if part == "lm_head.bias":
        formula = "b[t]" + ("" if against is None else " − b[a]")
        value = float(kept.attribute(token, against).share(part)[0])
        numbers = f"{value:.6g}"
    else:
        terms = share_terms(kept, part, token, against)[0]
        formula, numbers, value = (
            f"Σ_c {w} · g[c] · part[c] / s",
            sum_text(terms),
            float(terms.sum()),
        )
        parts = [[f"channel {c}", float(terms[c]), None] for c in largest(terms)]
        if part == "ln_final.bias":
            formula = f"Σ_c {w} · b[c]"
        else:
            last = f"layers.{len(subject.model.layers) - 1}.out"
            scale = norm_part(subject.model.ln_final, kept[last][0, 0])
            parts += [[f"s = {said}", size, None] for said, size, _ in scale]
    return {
        "name": name,
        "formula": formula,
        "numbers": numbers,
        "value": value,
        "parts": parts,
        "source": source(_ATTRIBUTION, "vectors.values()], 1) @ direction"),
    }


@torch.no_grad()
def shares(
    subject: Subject, ids: Ids, token: int, against: int | None = None, start: int = 0
) -> Explanation:
    """The sum of the shares, of all or of those after the `start` largest."""
    found = _parts_kept(subject, ids).attribute(token, against)
    terms = found.top()[start:]
    check_index("start", start, len(found.parts))
    asked = {"kind": "share", "token": token, "against": against}
    values = [value for _, value in terms]
    return {
        "name": f"sum of {len(terms)} contributions",
        "formula": "Σ over the components of their contributions",
        "numbers": sum_text(values),
        "value": math.fsum(values),
        "parts": [[part, value, {**asked, "part": part}] for part, value in terms[:6]],
        "source": source(_ATTRIBUTION, "vectors.values()], 1) @ direction"),
    }


@torch.no_grad()
def rounding(subject: Subject, ids: Ids, token: int, against: int | None = None) -> Explanation:
    """|Σ shares − x|: what the model's own dtype rounds off."""
    found = _parts_kept(subject, ids).attribute(token, against)
    asked = {"token": token, "against": against}
    total, own = float(found.shares[0].sum()), float(found.logit[0])
    return {
        "name": "rounding error of the attribution",
        "formula": "|Σ contributions − x|",
        "numbers": f"|{total!r} − {own!r}|",
        "value": found.error,
        "parts": [
            ["Σ contributions", total, {"kind": "shares", **asked}],
            ["x, the logit", own, {"kind": "logit", **asked}],
        ],
        "source": source(_ATTRIBUTION, "self.shares.sum(dim=-1) - self.logit"),
    }


@torch.no_grad()
def patched(
    subject: Subject,
    ids: Ids,
    other: Ids,
    token: int,
    layer: int,
    against: int | None = None,
    what: str = "stream",
    position: int | None = None,
    head: int | None = None,
) -> Explanation:
    """Explain the logit in `other` with one part as it was in `ids`."""
    point = look_inside.patched_points(ids, other, what).replace("*", str(layer))
    if (head if what == "heads" else position) is None:
        raise ValueError(f"patching {what} needs {'head' if what == 'heads' else 'position'}")
    where: Any = {"heads": [head]} if what == "heads" else {"positions": [position]}
    with inspect(subject.model) as clean:
        clean.keep(point)
        subject.model(subject.row(ids))
    found = logit_terms(
        subject, other, token, against, lambda look: look.patch(point, from_=clean.cache, **where)
    )
    asked = {"kind": "logit", "token": token, "against": against}
    part = f"head {head}" if what == "heads" else f"position {position}"
    for name, text in (("in this text", ids), ("in the other prompt, unpatched", other)):
        value = logit_terms(subject, text, token, against)["value"]
        found["parts"].append([f"x {name}", value, {**asked, "ids": list(text)}])
    found["formula"] += f",   h in the other prompt, with {point} at {part} as in this text"
    lead = "" if against is None else f" minus that of {quoted(subject, against)}"
    return {"name": f"logit of {quoted(subject, token)}{lead}, {point} patched at {part}", **found}
