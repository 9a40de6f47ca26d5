"""Known mistakes in scaled dot-product attention and in multi-head self-attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scratchlm.check.definitions import DEFINITIONS
from scratchlm.check.mistakes.norms import wrong_rope
from scratchlm.check.mistakes.table import Table
from scratchlm.ops import reference

ATTENTION = Table()
BLIND = "a fully masked row is NaN"
ONE, WITH_ROPE = "run_multihead_self_attention", "run_multihead_self_attention_with_rope"


def wrong_attention(**knobs: Any) -> Callable[..., Tensor]:
    """Make attention with something wrong in it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        dtype = q.dtype
        q, k, v = (x.float() if x.dtype.itemsize == 2 else x for x in (q, k, v))
        scores = q @ k.mT * knobs.get("scale", lambda d, keys: d**-0.5)(q.shape[-1], k.shape[-2])
        hidden = None if mask is None else ~mask
        if hidden is not None and knobs.get("inverted"):
            hidden = ~hidden
        if hidden is not None and "added" in knobs:
            scores = scores + hidden * knobs["added"]
        elif hidden is not None and not knobs.get("after"):
            scores = scores.masked_fill(hidden, knobs.get("fill", -math.inf))
        dim = knobs.get("dim", -1)
        if knobs.get("unshifted"):
            weights = scores.exp() / scores.exp().sum(dim, keepdim=True)
        elif knobs.get("blind"):
            weights = torch.softmax(scores, dim)
        else:
            weights = reference.softmax(scores, dim)
        if knobs.get("blind") == "zeroed" and mask is not None:
            weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        if hidden is not None and knobs.get("after") == "zeroed":
            weights = weights.masked_fill(hidden, 0.0)
        return (weights @ v).to(dtype)

    return attend


def _attention(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    """Enter a mistake, alone and with the other that a query that sees nothing gets NaN."""
    task = "run_scaled_dot_product_attention"
    hows = ("zeroed",) if "unshifted" in knobs[0] else ("", "zeroed")  # "": a softmax of zeros
    alone = [wrong_attention(**one, blind=how) for one in knobs for how in hows]
    ATTENTION.add(task, name, hints, *alone)
    both = [wrong_attention(**one, blind="nan") for one in knobs]
    ATTENTION.add(task, f"{name}; and {BLIND}", hints, *both, double=True)


_SCALED = "scores = Q @ K.transpose(-2, -1) / math.sqrt(d_k)"
_attention(
    "missing 1/√d_k",
    (
        "How large are your scores, compared with Q and K?",
        "A sum of d_k products has a variance of d_k.",
        _SCALED,
    ),
    {"scale": lambda d, keys: 1.0},
)
_attention(
    "divided by d_k, not by its root",
    ("By what are the scores divided?", "The variance is d_k, the deviation its root.", _SCALED),
    {"scale": lambda d, keys: 1 / d},
)
_attention(
    "multiplied by √d_k",
    ("Do the scores become smaller or larger?", "They are divided by √d_k.", _SCALED),
    {"scale": lambda d, keys: d**0.5},
)
_attention(
    "divided by the root of the number of keys",
    (
        "Which axis of Q is d_k?",
        "d_k is the last axis of Q and K, not the length of the sequence.",
        "d_k = Q.shape[-1]",
    ),
    {"scale": lambda d, keys: keys**-0.5},
)
_attention(
    "softmax over the queries, not over the keys",
    (
        "Along which axis do the weights sum to 1?",
        "Each query spreads its weight over the keys: the last axis of the scores.",
        "softmax(scores, dim=-1)",
    ),
    {"dim": -2},
)
_attention(
    "the mask is inverted",
    (
        "What does True mean in the mask?",
        "True: may be seen. The others get −∞.",
        "scores.masked_fill(~mask, -math.inf)",
    ),
    {"inverted": True},
)
_attention(
    "the mask is ignored",
    (
        "Does your result change with the mask?",
        "masked_fill returns a new tensor; masked_fill_ changes the old one.",
        "scores = scores.masked_fill(~mask, -math.inf)",
    ),
    {"after": "ignored"},
)
_attention(
    "masked by a finite number that is not low enough",
    (
        "How much weight does a hidden key still get?",
        "exp(−10) is small, and not 0; a large score beats it.",
        "scores.masked_fill(~mask, -math.inf)",
    ),
    *({"fill": fill} for fill in (0.0, -1.0, -5.0, -10.0, -20.0, -50.0, -100.0, -1e3)),
    *({"added": fill} for fill in (1.0, -1.0, -10.0, -100.0, -1e3)),
)
ATTENTION.add(
    "run_scaled_dot_product_attention",
    "masked after the softmax",
    (
        "What do the weights of a query sum to?",
        "Weights that are zeroed afterwards are missing from the sum.",
        "fill the scores with −∞ before the softmax",
    ),
    wrong_attention(after="zeroed"),
)
ATTENTION.add(
    "run_scaled_dot_product_attention",
    "a fully masked row averages",
    (
        "What does a query get that may see nothing?",
        "With −1e9 everywhere all scores are equal: the softmax is uniform.",
        "fill with −∞, and torch.nan_to_num(weights) or zeros where mask.any(-1) is False",
    ),
    wrong_attention(fill=-1e9),
)
ATTENTION.add(
    "run_scaled_dot_product_attention",
    "a finite number is added to mask: a fully masked row sees everything",
    (
        "What does a query get that may see nothing?",
        "The same number is added to all its scores, which a softmax does not notice.",
        "fill with −∞, and zeros where mask.any(-1) is False",
    ),
    wrong_attention(added=-1e5),
    wrong_attention(added=-1e9),
)
ATTENTION.add(
    "run_scaled_dot_product_attention",
    BLIND,
    (
        "What does a query get that may see nothing?",
        "The softmax of −∞ alone is 0/0. Here such a query gets zeros.",
        "weights = torch.nan_to_num(softmax(scores, -1)), or zeros where mask.any(-1) is False",
    ),
    wrong_attention(blind="nan"),
)
_attention(
    "the maximum is not subtracted: exp overflows",
    (
        "What is exp of a score of 1000?",
        "The softmax inside attention needs its shift, too.",
        "scores - scores.amax(-1, keepdim=True), or your own run_softmax",
    ),
    {"unshifted": True},
)


# Several heads


def wrong_heads(rotary: bool, **knobs: Any) -> Callable[..., Tensor]:
    """Make multi-head attention with something wrong in it."""

    def run(d_model: int, heads: int, *rest: Any) -> Tensor:
        longest, theta, places = 0, 0.0, None
        if rotary:
            longest, theta, *rest, places = rest  # type: ignore[assignment]
        *weights, x = rest
        places = torch.arange(x.shape[-2]) if places is None else places
        sizes = d_model, heads, longest, theta
        return _heads(sizes, weights, x, places if rotary else None, knobs)

    return run


def _heads(
    sizes: tuple[int, int, int, float],
    weights: Sequence[Tensor],
    x: Tensor,
    places: Tensor | None,
    knobs: dict[str, Any],
) -> Tensor:
    d_model, heads, longest, theta = sizes
    rotate = knobs.get("rope", DEFINITIONS.run_rope)
    transposed = knobs.get("transposed", ())
    projected = [x @ (w if n in transposed else w.mT) for w, n in zip(weights, "qkv", strict=False)]
    if places is not None and knobs.get("rope_first"):
        projected[:2] = [rotate(d_model, theta, longest, y, places) for y in projected[:2]]
    q, k, v = (_cut(y, heads, knobs) for y in projected)
    if places is not None and not knobs.get("rope_first"):
        wanted = knobs.get("rotated", "qk")
        d = d_model // heads
        q, k, v = (
            rotate(d, theta, longest, y, places) if name in wanted else y
            for y, name in zip((q, k, v), "qkv", strict=True)
        )
    if knobs.get("swapped"):
        q, k = k, q
    seq = x.shape[-2]
    seen = torch.ones(seq, seq, dtype=torch.bool)
    seen = knobs.get("mask", lambda m: m.tril())(seen)
    scale = knobs.get("scale", lambda d, d_head: d_head**-0.5)(d_model, d_model // heads)
    attend = wrong_attention(scale=lambda d, keys: scale, blind=knobs.get("blind", ""))
    y = attend(q, k, v, seen)
    if knobs.get("merge") == "reshaped":
        y = y.reshape(*x.shape)
    elif knobs.get("interleaved") == "both":
        y = y.movedim(-3, -1).flatten(-2)
    else:
        y = y.transpose(-3, -2).flatten(-2)
    output = weights[3] if "o" in transposed else weights[3].mT
    return y if knobs.get("no_output") else y @ output


def _cut(y: Tensor, heads: int, knobs: dict[str, Any]) -> Tensor:
    if knobs.get("split") == "reshaped":
        return y.reshape(*y.shape[:-2], heads, y.shape[-2], -1)
    if knobs.get("interleaved"):
        return y.unflatten(-1, (-1, heads)).movedim(-1, -3)
    return y.unflatten(-1, (heads, -1)).transpose(-3, -2)


def _multihead(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    for task, rotary in ((ONE, False), (WITH_ROPE, True)):
        ATTENTION.add(task, name, hints, *(wrong_heads(rotary, **one) for one in knobs))


_CAUSAL = "mask = torch.tril(torch.ones(seq, seq, dtype=torch.bool))"
_multihead(
    "no causal mask: tokens see the future",
    ("Change the last token: which results change?", "Token s sees 0 … s.", _CAUSAL),
    {"mask": lambda m: m},
)
_multihead(
    "mask off by one: a token sees the next one",
    ("Does token 0 see token 1?", "The diagonal is the last that is seen.", _CAUSAL),
    {"mask": lambda m: m.tril(1)},
)
_multihead(
    "mask off by one: a token does not see itself",
    ("What does token 0 see?", "The diagonal belongs to what is seen.", _CAUSAL),
    {"mask": lambda m: m.tril(-1)},
    {"mask": lambda m: m.tril(-1), "blind": "nan"},
)
_multihead(
    "the mask is upside down: tokens see only the future",
    ("Rows are queries, columns are keys: which half is seen?", "tril, not triu.", _CAUSAL),
    {"mask": lambda m: m.triu()},
    {"mask": lambda m: m.triu(1)},
    {"mask": lambda m: m.triu(1), "blind": "nan"},
)
_multihead(
    "scaled by √d_model, not √d_head",
    (
        "How many products does one score sum?",
        "Every head has d_head = d_model / num_heads channels.",
        "scores / math.sqrt(d_model // num_heads)",
    ),
    {"scale": lambda d, d_head: d**-0.5},
)
_multihead(
    "missing 1/√d_head",
    ("How large are the scores?", "They are divided by √d_head.", _SCALED),
    {"scale": lambda d, d_head: 1.0},
)
_multihead(
    "heads are cut by a reshape alone: sequence and heads are mixed",
    (
        "Which token does the second row of head 0 come from?",
        "Cut the last axis first, then move the heads before the sequence.",
        "x.view(…, seq, num_heads, d_head).transpose(-3, -2)",
    ),
    {"split": "reshaped"},
    {"split": "reshaped", "merge": "reshaped"},
)
_multihead(
    "heads are joined without moving them back",
    (
        "Which numbers stand in the row of token 0?",
        "Before the heads are joined, they must stand beside their channels again.",
        "heads.transpose(-3, -2).reshape(…, seq, d_model)",
    ),
    {"merge": "reshaped"},
)
_multihead(
    "heads are interleaved, not consecutive channels",
    (
        "Which channels belong to head 0?",
        "Channels 0 … d_head − 1 are head 0: num_heads comes before d_head.",
        "x.view(…, seq, num_heads, d_head)",
    ),
    {"interleaved": "both"},
    {"interleaved": "cut"},
)
_multihead(
    "the output projection is missing",
    ("What is done with o_proj_weight?", "W_O mixes the heads at the end.", "heads @ o_proj.T"),
    {"no_output": True},
)
_multihead(
    "the output projection is not transposed",
    ("Which axis of W_O is summed?", "Weights are (d_out, d_in).", "heads @ o_proj_weight.T"),
    {"transposed": "o"},
)
_multihead(
    "the projections are not transposed",
    ("Which axis of W_Q is summed?", "Weights are (d_out, d_in).", "x @ q_proj_weight.T"),
    {"transposed": "qkvo"},
    {"transposed": "qkv"},
)
_multihead(
    "queries and keys are exchanged",
    ("Whose rows are the scores' rows?", "Rows are queries: Q Kᵀ.", _SCALED),
    {"swapped": True},
)


def _rotary(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    ATTENTION.add(WITH_ROPE, name, hints, *(wrong_heads(True, **one) for one in knobs))


_rotary(
    "RoPE is missing",
    ("Exchange two earlier tokens: does anything change?", "Rotate queries and keys.", "rope(q)"),
    {"rotated": ""},
)
_rotary(
    "only one of queries and keys is rotated",
    ("What makes a score depend on the distance?", "Both are rotated.", "rope(q), rope(k)"),
    {"rotated": "q"},
    {"rotated": "k"},
)
_rotary(
    "values are rotated, too",
    ("Does one token alone change with its position?", "V stays as it is.", "rope(q), rope(k), v"),
    {"rotated": "qkv"},
)
_rotary(
    "RoPE before the heads are cut",
    (
        "What is d_k in your rotation?",
        "Every head is rotated by itself, with d_k = d_head.",
        "cut into heads first, then rope(d_head, …)",
    ),
    {"rope_first": True},
)
_rotary(
    "token_positions are ignored",
    (
        "What happens when the positions have gaps?",
        "They are an argument; None stands for 0, 1, 2, …",
        "rope(d_head, theta, max_seq_len, q, token_positions)",
    ),
    {"rope": wrong_rope(ignores=True)},
)
_rotary(
    "RoPE pairs halves, not neighbours",
    ("Which two channels belong together?", "(0, 1), (2, 3), …", "x[..., 0::2], x[..., 1::2]"),
    {"rope": wrong_rope(half=True)},
)
