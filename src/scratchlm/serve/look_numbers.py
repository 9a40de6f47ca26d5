"""Where a number comes from: its formula, the same with the values in, and its line of code.

    number(subject, ids, "logit", token=7)

One table for every number the page shows: what kind it is says which function explains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scratchlm.serve import explain_cost, explain_parts, explain_tokens
from scratchlm.serve.explanation import Explanation
from scratchlm.serve.refusals import bad_field
from scratchlm.serve.subject import Ids, Subject

NUMBERS: dict[str, Callable[..., Explanation]] = {
    "probability": explain_tokens.probability,
    "logit": explain_tokens.logit,
    "surprise": explain_tokens.surprise,
    "entropy": explain_tokens.entropy,
    "rank": explain_tokens.rank,
    "filtered": explain_tokens.filtered,
    "shift": explain_tokens.shift,
    "draw": explain_tokens.draw,
    "lens": explain_tokens.lens,
    "moved": explain_tokens.moved,
    "divergence": explain_tokens.divergence,
    "attention": explain_parts.attention_weight,
    "head": explain_parts.head_score,
    "expert": explain_parts.expert_weight,
    "load": explain_parts.expert_load,
    "share": explain_parts.share,
    "shares": explain_parts.shares,
    "rounding": explain_parts.rounding,
    "patched": explain_parts.patched,
    "cost": explain_cost.cost,
}


def number(subject: Subject, kind: str, ids: Ids, **given: Any) -> Explanation:
    """Explain a number; what is not given is left to its default."""
    if kind not in NUMBERS:
        raise bad_field("kind", f"must be one of {', '.join(NUMBERS)}; got {kind!r}")
    named = {name: value for name, value in given.items() if value is not None}
    try:
        return NUMBERS[kind](subject, ids, **named)
    except TypeError as error:
        raise bad_field("kind", str(error)) from None
