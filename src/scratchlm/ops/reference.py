"""The formulas, as a textbook page.

This file is the definition: every op is written out from its formula, in plain tensor arithmetic,
with its axes named. A set of ops is an object; a formula made of others calls them through `self`,
so that whoever replaces one finds it used wherever its formula is used:

    class Mine(ReferenceOps):
        def softmax(self, x, dim=-1): ...

    OPS["reference"].replace(softmax=my_softmax)     the same, from a plain function

`ops/fast.py` has the same names for speed and is tested equal. Low-precision input is widened to
float32 where a sum or an exponential would lose it; the result has the input's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Literal

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scratchlm.ops.masks import CausalMask, Mask, check_attention
from scratchlm.ops.ranges import counted_targets
from scratchlm.ops.routing import Routed

# Every expert's probability; the weights of the chosen, and their indices
Routing = tuple[
    Float[Tensor, "tokens experts"], Float[Tensor, "tokens chosen"], Int[Tensor, "tokens chosen"]
]


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class ReferenceOps:
    """Every operation a model calls."""

    # Linear maps and lookups

    def linear(
        self,
        x: Float[Tensor, "*batch d_in"],
        weight: Float[Tensor, "d_out d_in"],
        bias: Float[Tensor, " d_out"] | None = None,
    ) -> Float[Tensor, "*batch d_out"]:
        """y = W x (+ b)."""
        y = einsum(x, weight, "... d_in, d_out d_in -> ... d_out")
        return y if bias is None else y + bias

    def grouped_linear(
        self,
        x: Float[Tensor, "rows d_in"],
        weight: Float[Tensor, "groups d_out d_in"],
        ends: Int[Tensor, " groups"],
    ) -> Float[Tensor, "rows d_out"]:
        """y = W_g x, with a matrix for each group of rows; group g ends before row `ends[g]`."""
        groups = x.tensor_split(ends[:-1].long().cpu())
        return torch.cat([self.linear(rows, w) for rows, w in zip(groups, weight, strict=True)])

    def embedding(
        self,
        ids: Int[Tensor, "*batch"],
        weight: Float[Tensor, "vocab d_model"],
        padding_id: int | None = None,
    ) -> Float[Tensor, "*batch d_model"]:
        """Row `id` of the table, for every id; the padding row passes no gradient on."""
        rows = weight[ids]
        if padding_id is None:
            return rows
        return torch.where((ids == padding_id)[..., None], rows.detach(), rows)

    # Normalisation

    def rms_norm(
        self, x: Float[Tensor, "*batch d"], weight: Float[Tensor, " d"], eps: float = 1e-5
    ) -> Float[Tensor, "*batch d"]:
        """x / sqrt(mean(x²) + ε) · g."""  # arXiv:1910.07467 eq. 4
        wide = _widen(x)
        rms = torch.sqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (wide / rms * weight).to(x.dtype)

    def layer_norm(
        self,
        x: Float[Tensor, "*batch d"],
        weight: Float[Tensor, " d"],
        bias: Float[Tensor, " d"] | None = None,
        eps: float = 1e-5,
    ) -> Float[Tensor, "*batch d"]:
        """(x − mean) / sqrt(var + ε) · g + b."""  # arXiv:1607.06450 eq. 4
        wide = _widen(x)
        centred = wide - wide.mean(dim=-1, keepdim=True)
        deviation = torch.sqrt(centred.pow(2).mean(dim=-1, keepdim=True) + eps)
        y = centred / deviation * weight
        return (y if bias is None else y + bias).to(x.dtype)

    # Activations

    def silu(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """x · σ(x)."""  # arXiv:1702.03118
        return x * torch.sigmoid(x)

    def gelu(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """x · Φ(x), Φ the normal distribution function."""  # arXiv:1606.08415
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def gelu_tanh(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The tanh approximation of GELU, which GPT-2 uses."""
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))
        return x * 0.5 * (1 + torch.tanh(inner))

    def relu(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """max(x, 0)."""
        return torch.where(x > 0, x, torch.zeros_like(x))

    # Softmax and its kin

    def softmax(self, x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
        """exp(x) / Σ exp(x), shifted by the maximum so that no exponential overflows.

        Limits are taken where the quotient has none: entries of +∞ share all the weight, and a
        slice of nothing but −∞ gives zeros.
        """
        wide = _widen(x)
        top = wide.detach().amax(dim=dim, keepdim=True) if x.shape[dim] else wide.sum(dim, True)
        is_top = torch.where(wide.detach() == math.inf, 0.0, -math.inf).to(wide.dtype)
        shifted = torch.where(top == math.inf, is_top, wide - top.masked_fill(top.isinf(), 0.0))
        weights = shifted.exp()
        total = weights.sum(dim=dim, keepdim=True)
        return (weights / total.masked_fill(total == 0, 1.0)).to(x.dtype)

    def log_sum_exp(self, x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*reduced"]:
        """log Σ exp(x), shifted by the maximum."""
        wide = _widen(x)
        top = wide.detach().amax(dim=dim, keepdim=True)
        top = top.masked_fill(top.isinf(), 0.0)
        return ((wide - top).exp().sum(dim=dim, keepdim=True).log() + top).squeeze(dim)

    def cross_entropy(
        self,
        logits: Float[Tensor, "*batch vocab"],
        targets: Int[Tensor, "*batch"],
        *,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Float[Tensor, ""]:
        """Mean of log Σ exp(logits) − logits[target] over the targets that count.

        `z_loss` · (log Σ exp(logits))² keeps the normaliser near 1 (arXiv:2204.02311, section 5).
        With no target that counts the loss is 0.
        """
        shape, vocab = logits.shape[:-1], logits.shape[-1]
        index, counts, wrong = counted_targets(shape, vocab, targets, ignore_index)
        normaliser = self.log_sum_exp(logits)  # (*batch)
        chosen = _widen(logits).gather(-1, index[..., None]).squeeze(-1)
        losses = normaliser - chosen
        if z_loss:
            losses = losses + z_loss * normaliser.pow(2)
        if wrong is not None:
            losses = losses.masked_fill(wrong, math.nan)
        total = losses.masked_fill(~counts, 0.0).sum()
        return total if reduction == "sum" else total / counts.sum().clamp(min=1)

    # Positions

    def rope(
        self,
        x: Float[Tensor, "*batch seq d"],
        cos: Float[Tensor, "*table seq half"],
        sin: Float[Tensor, "*table seq half"],
        layout: Literal["interleaved", "half"] = "interleaved",
    ) -> Float[Tensor, "*batch seq d"]:
        """Rotate each pair of channels by its angle: (a, b) → (a cos − b sin, a sin + b cos)."""
        # arXiv:2104.09864 eq. 34
        pairs = "... (half two) -> two ... half" if layout == "interleaved" else _HALVES
        a, b = rearrange(_widen(x), pairs, two=2)
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos])
        before, after = pairs.split(" -> ")
        return rearrange(rotated, f"{after} -> {before}").to(x.dtype)

    # Attention

    def scaled_dot_product_attention(
        self,
        query: Float[Tensor, "*batch query d_k"],
        key: Float[Tensor, "*batch key d_k"],
        value: Float[Tensor, "*batch key d_v"],
        mask: Bool[Tensor, "*mask query key"] | CausalMask | None = None,
    ) -> Float[Tensor, "*batch query d_v"]:
        """softmax(Q Kᵀ / √d_k) V; a query that may see nothing gets zeros."""
        # arXiv:1706.03762 eq. 1
        check_attention(query, key, value, mask)
        if isinstance(mask, CausalMask):
            mask = mask.table(range(query.shape[-2]), range(key.shape[-2]), query.device)
        scores = einsum(_widen(query), _widen(key), "... query d_k, ... key d_k -> ... query key")
        scores = scores / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        weights = self.softmax(scores, dim=-1)
        attn_out = einsum(weights, _widen(value), "... query key, ... key d_v -> ... query d_v")
        return attn_out.to(query.dtype)

    def attention(
        self,
        query: Float[Tensor, "batch heads query d_k"],
        key: Float[Tensor, "batch kv_heads key d_k"],
        value: Float[Tensor, "batch kv_heads key d_v"],
        mask: Mask = None,
    ) -> Float[Tensor, "batch heads query d_v"]:
        """Attention over heads; with fewer key heads, each serves a group of query heads."""
        # arXiv:2305.13245
        group = query.shape[-3] // key.shape[-3]
        if group > 1:
            key = repeat(key, "... kv_heads key d -> ... (kv_heads group) key d", group=group)
            value = repeat(value, "... kv_heads key d -> ... (kv_heads group) key d", group=group)
        return self.scaled_dot_product_attention(query, key, value, mask)

    # Routing to experts

    def route(
        self, logits: Float[Tensor, "tokens experts"], experts_per_token: int, renormalize: bool
    ) -> Routing:
        """Return every expert's probability, and the weights and indices of the top few."""
        probabilities = self.softmax(_widen(logits))  # (tokens, experts)
        weights, experts = probabilities.topk(experts_per_token, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights, experts

    # One's own

    def replace(self, **functions: Callable[..., Any]) -> ReferenceOps:
        """Return the same set with these ops instead, as plain functions (without `self`)."""
        for name in functions:
            if name not in OP_NAMES:
                near = ", ".join(get_close_matches(name, OP_NAMES) or OP_NAMES)
                raise ValueError(f"no op is called {name!r}; did you mean {near}?")
        methods = {name: staticmethod(function) for name, function in functions.items()}
        kind: type[ReferenceOps] = type(f"{type(self).__name__}Replaced", (type(self),), methods)
        made = object.__new__(kind)  # with what this set holds, whatever it was made from
        made.__dict__.update(self.__dict__)
        return made

    def __setattr__(self, name: str, value: object) -> None:
        if name in OP_NAMES:
            raise AttributeError(f"a set of ops is not changed in place: use .replace({name}=…)")
        super().__setattr__(name, value)


_HALVES = "... (two half) -> two ... half"

OP_NAMES = tuple(n for n in vars(ReferenceOps) if not n.startswith("_") and n != "replace")

# The formulas as functions

_formulas = ReferenceOps()
linear, grouped_linear = _formulas.linear, _formulas.grouped_linear
embedding, rope = _formulas.embedding, _formulas.rope
rms_norm, layer_norm = _formulas.rms_norm, _formulas.layer_norm
silu, gelu, gelu_tanh, relu = _formulas.silu, _formulas.gelu, _formulas.gelu_tanh, _formulas.relu
softmax, log_sum_exp = _formulas.softmax, _formulas.log_sum_exp
cross_entropy, attention = _formulas.cross_entropy, _formulas.attention
scaled_dot_product_attention = _formulas.scaled_dot_product_attention
ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu}

# What modules compose of them


def log_softmax(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """x − log Σ exp(x), without forming the softmax."""
    return (_widen(x) - log_sum_exp(x, dim).unsqueeze(dim)).to(x.dtype)


def linear_cross_entropy(
    hidden: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, "*batch"],
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Float[Tensor, ""]:
    """The cross-entropy of the logits W h: the LM head and the loss."""
    logits = linear(hidden, weight)
    return cross_entropy(
        logits, targets, ignore_index=ignore_index, z_loss=z_loss, reduction=reduction
    )


def swiglu(
    x: Float[Tensor, "*batch d_model"],
    w1: Float[Tensor, "d_ff d_model"],
    w2: Float[Tensor, "d_model d_ff"],
    w3: Float[Tensor, "d_ff d_model"],
    b1: Float[Tensor, " d_ff"] | None = None,
    b2: Float[Tensor, " d_model"] | None = None,
    b3: Float[Tensor, " d_ff"] | None = None,
) -> Float[Tensor, "*batch d_model"]:
    """W2(SiLU(W1 x) ⊙ W3 x)."""  # arXiv:2002.05202 eq. 6
    return linear(silu(linear(x, w1, b1)) * linear(x, w3, b3), w2, b2)


def mlp(
    x: Float[Tensor, "*batch d_model"],
    w1: Float[Tensor, "d_ff d_model"],
    w2: Float[Tensor, "d_model d_ff"],
    b1: Float[Tensor, " d_ff"] | None = None,
    b2: Float[Tensor, " d_model"] | None = None,
    activation: str = "gelu_tanh",
) -> Float[Tensor, "*batch d_model"]:
    """W2 act(W1 x)."""
    return linear(ACTIVATIONS[activation](linear(x, w1, b1)), w2, b2)


def route(
    x: Float[Tensor, "tokens d_model"],
    router: Float[Tensor, "experts d_model"],
    experts_per_token: int,
    renormalize: bool,
) -> Routing:
    """Return every expert's probability, and the weights and indices of the top few."""
    p, weights, experts = _formulas.route(linear(x, router), experts_per_token, renormalize)
    return p, weights.to(x.dtype), experts


def moe(
    x: Float[Tensor, "*batch d_model"],
    router: Float[Tensor, "experts d_model"],
    w1: Float[Tensor, "experts d_ff d_model"],
    w2: Float[Tensor, "experts d_model d_ff"],
    w3: Float[Tensor, "experts d_ff d_model"],
    experts_per_token: int,
    renormalize: bool = True,
) -> Routed:
    """Σ over a token's chosen experts of weight · SwiGLU_expert(x); no token is dropped."""
    tokens = x.reshape(-1, x.shape[-1])
    probabilities, weights, experts = route(tokens, router, experts_per_token, renormalize)
    output = torch.zeros_like(tokens)
    for expert in range(len(w1)):
        token, rank = (experts == expert).nonzero(as_tuple=True)  # who chose it, and as which
        answer = swiglu(tokens[token], w1[expert], w2[expert], w3[expert])
        output = output.index_add(0, token, answer * weights[token, rank, None])
    return Routed(output.view_as(x), probabilities, experts)
