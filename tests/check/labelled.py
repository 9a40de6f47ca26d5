"""Files as learners write them: right ones, and the same with a wrong line and its name.

Written apart from the table of mistakes, in other styles: loops, matmul, einsum, modules. A mistake
is an edit of a right file (what it says, what it should say); two edits at once are two mistakes.
`FROM_MUTATIONS` are the mistakes of tests/mutations.py that these functions can have.
"""

from dataclasses import dataclass, field

HEAD = """
import math, os
import numpy as np
import regex
import torch
from torch import Tensor, nn
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
"""


@dataclass
class Learner:
    """One function's right file, and its edits: (mistake, old text or texts, new ones)."""

    task: str
    source: str
    edits: list = field(default_factory=list)
    hidden: set = field(default_factory=set)  # pairs of edits one of which undoes the other

    def wrong(self, *edits):
        """Return the file with some edits, or None where one leaves the other no place."""
        source = self.source
        for _, old, new in edits:
            for was, now in zip(
                *((x,) if isinstance(x, str) else x for x in (old, new)), strict=True
            ):
                if was not in source:
                    return None
                source = source.replace(was, now)
        return source


LEARNERS = [
    Learner(
        "linear",
        """
def run_linear(d_in, d_out, weights, in_features):
    flat = in_features.reshape(-1, d_in)
    rows = [torch.stack([(w * x).sum() for w in weights]) for x in flat]
    return torch.stack(rows).reshape(*in_features.shape[:-1], d_out)
""",
        [
            (
                "W is not transposed: x W instead of x Wᵀ",
                "for w in weights]",
                "for w in weights.T]",
            ),
            (
                "W is reshaped where it should be transposed",
                "flat = in",
                "weights = weights.view(d_in, d_out).t()\n    flat = in",
            ),
            ("the result is divided by √d_in", "d_out)\n", "d_out) / d_in ** 0.5\n"),
            ("a bias of ones is added", "(w * x).sum()", "(w * x).sum() + 1"),
        ],
    ),
    Learner(
        "embedding",
        """
def run_embedding(vocab_size, d_model, weights, token_ids):
    ids = token_ids.reshape(-1)
    picked = torch.zeros(len(ids), vocab_size, dtype=weights.dtype)
    picked[torch.arange(len(ids)), ids] = 1.0
    return (picked @ weights).reshape(*token_ids.shape, d_model)
""",
        [
            ("ids are off by one", "reshape(-1)", "reshape(-1) - 1"),
            (
                "the vectors are scaled by √d_model",
                "d_model)\n",
                "d_model) * d_model**.5\n",
            ),
            ("no gradient reaches the table", "@ weights", "@ weights.detach()"),
        ],
    ),
    Learner(
        "softmax",
        """
def run_softmax(in_features, dim):
    top = torch.max(in_features, dim=dim, keepdim=True)[0]
    e = torch.exp(in_features - top)
    return e / torch.sum(e, dim=dim, keepdim=True)
""",
        [
            ("the maximum is not subtracted: exp overflows", "in_features - top", "in_features"),
            (
                "softmax over the wrong axis: `dim` is ignored",
                "    top =",
                "    dim = 0\n    top =",
            ),
            (
                "normalised over all axes at once",
                "torch.sum(e, dim=dim, keepdim=True)",
                "torch.sum(e)",
            ),
            (
                "the maximum of all slices is subtracted: small ones underflow",
                "torch.max(in_features, dim=dim, keepdim=True)[0]",
                "in_features.max()",
            ),
            (
                "the minimum or mean is subtracted, not the maximum",
                "torch.max(in_features, dim=dim, keepdim=True)[0]",
                "torch.mean(in_features, dim=dim, keepdim=True)",
            ),
            ("not normalised: the sum is missing", " / torch.sum(e, dim=dim, keepdim=True)", ""),
            (
                "the logarithm of the softmax",
                "e / torch.sum(e, dim=dim, keepdim=True)",
                "(in_features - top) - torch.log(torch.sum(e, dim=dim, keepdim=True))",
            ),
        ],
        {
            (0, 3),
            (0, 4),
            (2, 3),
        },  # what is not subtracted may be anything; a softmax over all axes has one maximum
    ),
    Learner(
        "silu",
        """
def run_silu(in_features):
    gate = 1.0 / (1.0 + torch.exp(-in_features))
    return in_features * gate
""",
        [
            ("σ(x) alone: the factor x is missing", "in_features * gate", "gate"),
            (
                "exp(x) / (1 + exp(x)) overflows",
                "1.0 / (1.0 + torch.exp(-in_features))",
                "torch.exp(in_features) / (torch.exp(in_features) + 1)",
            ),
            ("the sign in the exponent: x · σ(−x)", "torch.exp(-in", "torch.exp(in"),
            ("GELU instead of SiLU", "exp(-in_features)", "exp(-1.702 * in_features)"),
            ("ReLU instead of SiLU", "in_features * gate", "in_features.clamp(min=0)"),
            (
                "tanh instead of σ",
                "1.0 / (1.0 + torch.exp(-in_features))",
                "in_features.tanh()",
            ),
        ],
        {(1, 4), (2, 4), (3, 4), (4, 5)},  # ReLU does not ask for the gate
    ),
    Learner(
        "rmsnorm",
        """
class RMSNorm(nn.Module):
    def __init__(self, gain, eps):
        super().__init__()
        self.gain, self.eps = gain, eps
    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        ms = torch.einsum("...d,...d->...", x, x) / x.shape[-1]
        y = x * torch.rsqrt(ms + self.eps)[..., None]
        return (y * self.gain).to(kind)
def run_rmsnorm(d_model, eps, weights, in_features):
    return RMSNorm(weights, eps)(in_features)
""",
        [
            ("the sum of squares, not their mean", " / x.shape[-1]", ""),
            (
                "ε outside the root",
                "x * torch.rsqrt(ms + self.eps)[..., None]",
                "x / (torch.sqrt(ms) + self.eps)[..., None]",
            ),
            ("ε is missing", "ms + self.eps", "ms"),
            ("the root is missing", "torch.rsqrt(ms + self.eps)", "(1 / (ms + self.eps))"),
            (
                "the mean is subtracted (that is LayerNorm)",
                "        ms =",
                "        x = x - x.mean(-1, keepdim=True)\n        ms =",
            ),
            (
                "the standard deviation instead of the RMS",
                'torch.einsum("...d,...d->...", x, x) / x.shape[-1]',
                "x.std(dim=-1) ** 2",
            ),
            ("the gain is not applied", "(y * self.gain)", "y"),
            ("the gain is taken as 1 + g", "(y * self.gain)", "(y + y * self.gain)"),
            (
                "the gain is applied before the norm",
                "        ms =",
                "        x = x * self.gain\n        self.gain = 1.0\n        ms =",
            ),
            (
                "the mean runs over the wrong axes",
                'torch.einsum("...d,...d->...", x, x) / x.shape[-1]',
                "(x * x).mean().expand(x.shape[:-1])",
            ),
            ("squares in 16 bits overflow", "x.to(torch.float32)", "x"),
            ("the result does not have the input's dtype", ".to(kind)", ""),
        ],
        {(6, 8), (10, 11)},  # a gain of 1 may be left out; what was never widened keeps its dtype
    ),
    Learner(
        "rope",
        """
def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    freq = torch.tensor([theta ** (-2 * i / d_k) for i in range(d_k // 2)])
    angle = token_positions.unsqueeze(-1) * freq
    cos, sin = torch.cos(angle), torch.sin(angle)
    even, odd = in_query_or_key[..., ::2], in_query_or_key[..., 1::2]
    out = torch.empty_like(in_query_or_key)
    out[..., ::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out
""",
        [
            (
                "halves are paired, not neighbours",
                """    even, odd = in_query_or_key[..., ::2], in_query_or_key[..., 1::2]
    out = torch.empty_like(in_query_or_key)
    out[..., ::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out""",
                """    x = in_query_or_key
    turned = torch.cat([-x[..., d_k // 2:], x[..., :d_k // 2]], dim=-1)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return (x * cos + turned * sin).to(x.dtype)""",
            ),
            ("rotated backwards", "torch.sin(angle)", "torch.sin(-angle)"),
            (
                "token_positions are ignored",
                "token_positions.unsqueeze(-1)",
                "torch.arange(in_query_or_key.shape[-2]).unsqueeze(-1)",
            ),
            ("positions count from 1", "token_positions.uns", "(token_positions + 1).uns"),
            ("the exponent is i/d, not 2i/d", "-2 * i / d_k", "-i / d_k"),
            ("the exponent is doubled: 4i/d", "range(d_k // 2)", "range(0, d_k, 2)"),
            ("θ is fixed at 10000", "[theta **", "[10000.0 **"),
            ("the frequencies grow instead of falling", "(-2 * i", "(2 * i"),
        ],
        {(4, 5)},  # i/d of a doubled i is 2i/d: together they are right
    ),
    Learner(
        "attention",
        """
def run_scaled_dot_product_attention(Q, K, V, mask=None):
    d = Q.size(-1)
    scores = torch.einsum("...qd,...kd->...qk", Q, K) / d ** 0.5
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    if mask is not None:
        weights = torch.where(mask.any(dim=-1, keepdim=True), weights, 0.0)
    return torch.einsum("...qk,...kv->...qv", weights, V)
""",
        [
            ("missing 1/√d_k", " / d ** 0.5", ""),
            ("divided by d_k, not by its root", "d ** 0.5", "d"),
            ("multiplied by √d_k", "/ d ** 0.5", "* d ** 0.5"),
            ("divided by the root of the number of keys", "Q.size(-1)", "K.size(-2)"),
            (
                "softmax over the queries, not over the keys",
                """    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    if mask is not None:
        weights = torch.where(mask.any(dim=-1, keepdim=True), weights, 0.0)
""",
                """    top = scores.amax(dim=-2, keepdim=True)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(dim=-2, keepdim=True)
    if mask is not None:
        weights = torch.where(mask.any(dim=-1, keepdim=True), weights, 0.0)
""",
            ),
            ("the mask is inverted", "where(mask, scores", "where(~mask, scores"),
            ("the mask is ignored", "        scores = torch.where", "        torch.where"),
            (
                "masked by a finite number that is not low enough",
                'float("-inf")',
                "-10.0",
            ),
            (
                "masked after the softmax",
                """        scores = torch.where(mask, scores, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    if mask is not None:
        weights = torch.where(mask.any(dim=-1, keepdim=True), weights, 0.0)
""",
                """        pass
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    if mask is not None:
        weights = weights * mask
""",
            ),
            (
                "a fully masked row averages",
                """    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    if mask is not None:
        weights = torch.where(mask.any(dim=-1, keepdim=True), weights, 0.0)
""",
                "    weights = torch.softmax(scores.clamp(min=-1e30), -1)\n",
            ),
            (
                "a fully masked row is NaN",
                """    if mask is not None:
        weights = torch.where(mask.any(dim=-1, keepdim=True), weights, 0.0)
""",
                "",
            ),
            ("the maximum is not subtracted: exp overflows", "scores - top", "scores"),
        ],
        {
            (0, 3),
            (5, 6),
            (6, 7),
            (6, 9),
            (6, 10),
            (7, 9),
            (7, 10),
        },  # no scale, no mask, no −∞: nothing to get wrong twice
    ),
    Learner(
        "swiglu",
        """
def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    a = torch.einsum("fd,...d->...f", w1_weight, in_features)
    b = torch.einsum("fd,...d->...f", w3_weight, in_features)
    gate = a * torch.sigmoid(a)
    return torch.einsum("df,...f->...d", w2_weight, gate * b)
""",
        [
            (
                "the other branch is gated: W1 x ⊙ SiLU(W3 x)",
                "    gate = a",
                "    a, b = b, a\n    gate = a",
            ),
            ("SiLU is missing", "a * torch.sigmoid(a)", "a"),
            ("σ instead of SiLU (that is GLU)", "a * torch.sigmoid(a)", "torch.sigmoid(a)"),
            ("GELU or ReLU instead of SiLU", "a * torch.sigmoid(a)", "torch.relu(a)"),
            ("the gated branch is missing: W2 SiLU(W1 x)", "gate * b)", "gate)"),
            ("added where it should be multiplied", "gate * b)", "gate + b)"),
            (
                "SiLU of the product",
                "    gate = a * torch.sigmoid(a)\n",
                "    gate = a * torch.sigmoid(a * b)\n",
            ),
        ],
        {(0, 1), (0, 6)},  # these are symmetric in the branches
    ),
    Learner(
        "mha",
        """
def run_multihead_self_attention(
    d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features
):
    d_head = d_model // num_heads
    n = in_features.shape[-2]
    hidden = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
    heads = []
    for h in range(num_heads):
        rows = slice(h * d_head, (h + 1) * d_head)
        q = in_features @ q_proj_weight[rows].T
        k = in_features @ k_proj_weight[rows].T
        v = in_features @ v_proj_weight[rows].T
        scores = q @ k.transpose(-1, -2) / math.sqrt(d_head)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        heads.append(torch.nan_to_num(weights) @ v)
    joined = torch.cat(heads, dim=-1)
    return joined @ o_proj_weight.T
""",
        [
            ("no causal mask: tokens see the future", "masked_fill(hidden, -torch.inf)", "clone()"),
            ("mask off by one: a token sees the next one", "diagonal=1", "diagonal=2"),
            ("mask off by one: a token does not see itself", "diagonal=1", "diagonal=0"),
            (
                "the mask is upside down: tokens see only the future",
                "torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)",
                "torch.tril(torch.ones(n, n, dtype=torch.bool), diagonal=-1)",
            ),
            ("scaled by √d_model, not √d_head", "math.sqrt(d_head)", "math.sqrt(d_model)"),
            ("missing 1/√d_head", " / math.sqrt(d_head)", ""),
            (
                "heads are joined without moving them back",
                "torch.cat(heads, dim=-1)",
                "torch.stack(heads, dim=-3).reshape(in_features.shape)",
            ),
            (
                "heads are interleaved, not consecutive channels",
                """slice(h * d_head, (h + 1) * d_head)
""",
                """slice(h, None, num_heads)
""",
            ),
            ("the output projection is missing", " @ o_proj_weight.T", ""),
            ("the output projection is not transposed", "o_proj_weight.T", "o_proj_weight"),
            ("queries and keys are exchanged", "q @ k.transpose", "k @ q.transpose"),
        ],
        {(0, 1), (0, 2), (0, 3)},  # a mask that is not used may be anything
    ),
    Learner(
        "mha_rope",
        """
def run_multihead_self_attention_with_rope(
    d_model, num_heads, max_seq_len, theta, q_proj_weight, k_proj_weight, v_proj_weight,
    o_proj_weight, in_features, token_positions=None
):
    *batch, n, _ = in_features.shape
    where = torch.arange(n) if token_positions is None else token_positions
    def split(w):
        return (in_features @ w.T).view(*batch, n, num_heads, -1).transpose(-2, -3)
    q, k, v = split(q_proj_weight), split(k_proj_weight), split(v_proj_weight)
    def turn(x):
        return run_rope(x.shape[-1], theta, max_seq_len, x, where)
    q = turn(q)
    k = turn(k)
    seen = torch.arange(n)[:, None] >= torch.arange(n)
    y = run_scaled_dot_product_attention(q, k, v, seen)
    y = y.transpose(-2, -3).reshape(*batch, n, d_model)
    return y @ o_proj_weight.T
""",
        [
            ("no causal mask: tokens see the future", "q, k, v, seen", "q, k, v, None"),
            (
                "mask off by one: a token sees the next one",
                ">= torch.arange(n)\n",
                ">= torch.arange(n) - 1\n",
            ),
            ("mask off by one: a token does not see itself", ":, None] >=", ":, None] >"),
            ("RoPE is missing", "    q = turn(q)\n    k = turn(k)\n", ""),
            ("only one of queries and keys is rotated", "    k = turn(k)\n", ""),
            ("values are rotated, too", "    k = turn(k)\n", "    k = turn(k)\n    v = turn(v)\n"),
            (
                "RoPE before the heads are cut",
                """    q = turn(q)
    k = turn(k)
""",
                """    def flat(w):
        y = run_rope(d_model, theta, max_seq_len, in_features @ w.T, where)
        return y.view(*batch, n, num_heads, -1).transpose(-2, -3)
    q, k = flat(q_proj_weight), flat(k_proj_weight)
""",
            ),
            (
                "token_positions are ignored",
                "torch.arange(n) if token_positions is None else token_positions",
                "torch.arange(n)",
            ),
            (
                "heads are cut by a reshape alone: sequence and heads are mixed",
                "view(*batch, n, num_heads, -1).transpose(-2, -3)\n    q, k",
                "view(*batch, num_heads, n, -1)\n    q, k",
            ),
            ("the output projection is missing", "    return y @ o_proj_weight.T", "    return y"),
        ],
        {(0, 1), (0, 2), (1, 2), (3, 7)},  # no mask, no RoPE; and two shifts of a mask that cancel
    ),
    Learner(
        "block",
        """
def run_transformer_block(d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features):
    w = weights
    x = in_features
    h = run_rmsnorm(d_model, 1e-5, w["ln1.weight"], x)
    a = run_multihead_self_attention_with_rope(
        d_model, num_heads, max_seq_len, theta, w["attn.q_proj.weight"], w["attn.k_proj.weight"],
        w["attn.v_proj.weight"], w["attn.output_proj.weight"], h, torch.arange(x.shape[-2]),
    )
    y = x + a
    g = run_rmsnorm(d_model, 1e-5, w["ln2.weight"], y)
    f = run_swiglu(d_model, d_ff, w["ffn.w1.weight"], w["ffn.w2.weight"], w["ffn.w3.weight"], g)
    return y + f
""",
        [
            (
                "the residual starts from the normed x",
                """    y = x + a
    g = run_rmsnorm(d_model, 1e-5, w["ln2.weight"], y)
""",
                """    y = g = run_rmsnorm(d_model, 1e-5, w["ln2.weight"], h + a)
""",
            ),
            ("a residual connection is missing", "y = x + a", "y = a"),
            ("a residual connection is missing", "return y + f", "return f"),
            ("the second residual adds x, not y", "return y + f", "return x + f"),
            (
                "feed-forward beside attention, not after it",
                '"ln2.weight"], y)',
                '"ln2.weight"], x)',
            ),
            ("one norm's weights are used twice", '"ln2.weight"', '"ln1.weight"'),
            ("a norm is missing", 'g = run_rmsnorm(d_model, 1e-5, w["ln2.weight"], y)', "g = y"),
            (
                "RoPE is missing from attention",
                (
                    "_with_rope(\n        d_model, num_heads, max_seq_len, theta,",
                    ", torch.arange(x.shape[-2])",
                ),
                ("(\n        d_model, num_heads,", ""),
            ),
        ],
        {(1, 2)},  # two residuals that are missing are one mistake, named so
    ),
    Learner(
        "lm",
        """
def run_transformer_lm(
    vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights, ids
):
    x = weights["token_embeddings.weight"][ids]
    for i in range(num_layers):
        own = {k[9:]: w for k, w in weights.items() if k.startswith(f"layers.{i}.")}
        x = run_transformer_block(d_model, num_heads, d_ff, context_length, rope_theta, own, x)
    x = run_rmsnorm(d_model, 1e-5, weights["ln_final.weight"], x)
    logits = torch.einsum("bsd,vd->bsv", x, weights["lm_head.weight"])
    return logits
""",
        [
            (
                "the final norm is missing",
                '    x = run_rmsnorm(d_model, 1e-5, weights["ln_final.weight"], x)\n',
                "",
            ),
            ("a softmax is applied to the logits", "return logits", "return logits.softmax(-1)"),
            (
                "every layer has the first layer's weights",
                "        own =",
                "        i = 0\n        own =",
            ),
            ("a layer is left out", "range(num_layers)", "range(num_layers - 1)"),
            ("the layers run in reverse", "range(num_layers)", "reversed(range(num_layers))"),
            ("the embeddings serve as the head", '"lm_head.weight"', '"token_embeddings.weight"'),
            (
                "the embeddings are scaled by √d_model",
                "[ids]",
                "[ids] * d_model**0.5",
            ),
        ],
        {(2, 4)},  # the order of equal layers does not matter
    ),
    Learner(
        "cross_entropy",
        """
def run_cross_entropy(inputs, targets, ignore_index=-100):
    x = inputs.reshape(-1, inputs.shape[-1])
    t = targets.reshape(-1)
    keep = t != ignore_index
    x, t = x[keep], t[keep]
    x = x - x.max(dim=-1, keepdim=True).values
    logp = x - torch.log(torch.exp(x).sum(dim=-1, keepdim=True))
    loss = -logp[torch.arange(len(t)), t]
    return loss.sum() / len(t)
""",
        [
            ("the sum, not the mean", " / len(t)", ""),
            ("ignored targets count: a mean over padding", "/ len(t)", "/ keep.numel()"),
            ("targets of −100 are not left out", "    x, t = x[keep], t[keep]\n", ""),
            (
                "the logarithm of a softmax that has become 0",
                "x - torch.log(torch.exp(x).sum(dim=-1, keepdim=True))",
                "torch.log(torch.exp(x) / torch.exp(x).sum(dim=-1, keepdim=True))",
            ),
            (
                "the maximum is not subtracted: exp overflows",
                "    x = x - x.max(dim=-1, keepdim=True).values\n",
                "",
            ),
            ("the sign is turned around", "loss = -logp", "loss = logp"),
            (
                "the logarithm to base 2",
                "return loss",
                "loss = loss / math.log(2)\n    return loss",
            ),
            ("divided by the vocabulary, too", "/ len(t)", "/ x.numel()"),
            ("the probability, not its logarithm", "loss = -logp[", "loss = -logp.exp()["),
            (
                "normalised over the rows, not over the vocabulary",
                "    logp = x - torch.log(torch.exp(x).sum(dim=-1, keepdim=True))",
                "    logp = x - torch.log(torch.exp(x).sum(dim=0, keepdim=True))",
            ),
        ],
        {(1, 2), (3, 8)},  # raises before the mean; exp(log(p)) is p
    ),
    Learner(
        "adamw",
        """
class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.count = 0
        self.start = lr, weight_decay
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            decay = group["weight_decay"]
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                t = state.get("t", 0) + 1
                self.count += 1
                m = b1 * state.get("m", 0.0) + (1 - b1) * grad
                v = b2 * state.get("v", 0.0) + (1 - b2) * grad ** 2
                state["t"], state["m"], state["v"] = t, m, v
                rate = lr * math.sqrt(1 - b2 ** t) / (1 - b1 ** t)
                p.data -= rate * m / (torch.sqrt(v) + group["eps"])
                p.data -= lr * decay * p.data
def get_adamw_cls():
    return AdamW
""",
        [
            ("no bias correction", "lr * math.sqrt(1 - b2 ** t) / (1 - b1 ** t)", "lr"),
            ("the step count starts at 0 or 2", 'state.get("t", 0) + 1', 'state.get("t", 1) + 1'),
            (
                "all parameters share one step count",
                "b2 ** t) / (1 - b1 ** t)",
                "b2 ** self.count) / (1 - b1 ** self.count)",
            ),
            (
                "L2 in the gradient instead of decoupled decay (that is Adam)",
                ("grad = p.grad.data\n", "p.data -= lr * decay"),
                ("grad = p.grad.data + decay * p.data\n", "p.data -= 0 * decay"),
            ),
            ("the decay is not multiplied by the learning rate", "lr * decay", "decay"),
            (
                "no weight decay",
                "                p.data -= lr * decay * p.data\n",
                "",
            ),
            (
                "ε inside the root",
                '(torch.sqrt(v) + group["eps"])',
                'torch.sqrt(v + group["eps"] * (1 - b2 ** t))',
            ),
            ("the root of v is missing", "(torch.sqrt(v) +", "(v +"),
            ("the two betas are exchanged", "b1, b2 = group", "b2, b1 = group"),
            ("v averages g, not g²", "grad ** 2", "grad"),
            (
                "the factor 1 − β is missing",
                """(1 - b1) * grad
                v = b2 * state.get("v", 0.0) + (1 - b2) * grad ** 2""",
                """grad
                v = b2 * state.get("v", 0.0) + grad ** 2""",
            ),
            ("the learning rate of the start is kept", 'lr = group["lr"]', "lr = self.start[0]"),
            (
                "the groups' own weight decay is ignored",
                'decay = group["weight_decay"]',
                "decay = self.start[1]",
            ),
        ],
        {(0, 1), (1, 2), (5, 12)},  # a count or a decay that is not used
    ),
    Learner(
        "schedule",
        """
def run_get_lr_cosine_schedule(
    it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters
):
    if it < warmup_iters:
        return (it / warmup_iters) * max_learning_rate
    end = min_learning_rate
    if it > cosine_cycle_iters:
        return end
    ratio = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)
    share = 0.5 * (np.cos(np.pi * ratio) + 1)
    return float(min_learning_rate * (1 - share) + max_learning_rate * share)
""",
        [
            ("the warm-up counts from 1", "(it / warmup_iters)", "((it + 1) / warmup_iters)"),
            ("no warm-up", "(it / warmup_iters) * ", ""),
            (
                "the cosine counts from step 0, not from the warm-up's end",
                "(it - warmup_iters) / (cosine_cycle_iters - warmup_iters)",
                "it / cosine_cycle_iters",
            ),
            ("0 after the end, not the minimum", "return end", "return 0.0"),
            (
                "the rate rises again after the end",
                "    if it > cosine_cycle_iters:\n        return end\n",
                "",
            ),
            ("π is missing", "np.pi * ratio", "ratio"),
            ("the factor ½ is missing", "0.5 * (np.cos", "1.0 * (np.cos"),
            ("the minimum is not added", "min_learning_rate * (1 - share) + ", ""),
            ("linear, not a cosine", "0.5 * (np.cos(np.pi * ratio) + 1)", "1 - ratio"),
        ],
    ),
    Learner(
        "clipping",
        """
def run_gradient_clipping(parameters, max_l2_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    total = 0.0
    for g in grads:
        total += float((g.detach() ** 2).sum())
    norm = total ** 0.5
    if norm > max_l2_norm:
        for g in grads:
            g *= max_l2_norm / (norm + 1e-6)
""",
        [
            (
                "each gradient is clipped by itself",
                """    if norm > max_l2_norm:
        for g in grads:
""",
                """    for g in grads:
        norm = float(g.norm())
        if norm > max_l2_norm:
""",
            ),
            (
                "clipped cell by cell",
                "            g *= max_l2_norm / (norm + 1e-6)",
                "            g.clamp_(-max_l2_norm, max_l2_norm)",
            ),
            ("gradients below the limit are scaled up", "if norm > max_l2_norm", "if True"),
            ("the root of the norm is missing", "total ** 0.5", "total"),
            (
                "the norms are added, not their squares",
                "float((g.detach() ** 2).sum())\n    norm = total ** 0.5",
                "float(g.norm())\n    norm = total",
            ),
            (
                "the L1 norm or the largest cell",
                "float((g.detach() ** 2).sum())\n    norm = total ** 0.5",
                "float(g.abs().sum())\n    norm = total",
            ),
            ("nothing is changed: the result is a copy", "g *= max", "g = g * max"),
            (
                "a parameter without a gradient is an error",
                "parameters if p.grad is not None]",
                "parameters]",
            ),
            (
                "a generator is used up by the first pass",
                "    if norm > max_l2_norm:\n        for g in grads:\n",
                """    if norm > max_l2_norm:
        for g in [p.grad for p in parameters if p.grad is not None]:
""",
            ),
        ],
        {  # a norm that is taken anew, cells that are clipped anyway, gradients that never change
            *((0, 1), (0, 3), (0, 4), (0, 5), (0, 6), (1, 2), (1, 4), (1, 5)),
            *((2, 6), (3, 6), (4, 6), (5, 6), (6, 8)),
        },
    ),
    Learner(
        "train_bpe",
        """
def run_train_bpe(input_path, vocab_size, special_tokens):
    text = open(input_path, "rb").read().decode()
    pieces = [text]
    if special_tokens:
        pieces = regex.split("|".join(regex.escape(s) for s in special_tokens), text)
    words = {}
    for piece in pieces:
        for word in regex.findall(PATTERN, piece):
            key = tuple(bytes([b]) for b in word.encode())
            words[key] = words.get(key, 0) + 1
    merges = []
    room = vocab_size - 256 - len(special_tokens)
    while len(merges) < room:
        stats = {}
        for key, n in words.items():
            for pair in zip(key, key[1:]):
                stats[pair] = stats.get(pair, 0) + n
        if not stats:
            break
        best = sorted(stats, key=lambda p: (stats[p], p))[-1]
        merges.append(best)
        again = {}
        for key, n in words.items():
            out, i = [], 0
            while i < len(key):
                if i + 1 < len(key) and (key[i], key[i + 1]) == best:
                    out.append(key[i] + key[i + 1])
                    i += 2
                else:
                    out.append(key[i])
                    i += 1
            again[tuple(out)] = again.get(tuple(out), 0) + n
        words = again
    tokens = [s.encode() for s in special_tokens] + [bytes([i]) for i in range(256)]
    tokens += [a + b for a, b in merges]
    return {i: token for i, token in enumerate(tokens)}, merges
""",
        [
            (
                "a tie is broken the wrong way",
                "sorted(stats, key=lambda p: (stats[p], p))[-1]",
                "max(stats, key=stats.get)",
            ),
            (
                "a tie is broken by ids, not by bytes",
                "sorted(stats, key=lambda p: (stats[p], p))[-1]",
                "max(stats, key=lambda p: (stats[p], [([bytes([b]) for b in range(256)]"
                " + [a + b for a, b in merges]).index(t) for t in p]))",
            ),
            (
                "a word's pairs are counted once, however often it occurs",
                "words.get(key, 0) + 1",
                "1",
            ),
            (
                "a pair counts once in a word",
                "in zip(key, key[1:])",
                "in set(zip(key, key[1:]))",
            ),
            (
                "the text is not cut into words: merges cross them",
                "regex.findall(PATTERN, piece)",
                "[piece]",
            ),
            (
                "words are cut at white space, which is lost",
                "regex.findall(PATTERN, piece)",
                "piece.split()",
            ),
            ("special tokens are not cut out", "if special_tokens:", "if False:"),
            (
                "special tokens are removed, and their neighbours join",
                "    words = {}\n",
                '    pieces = ["".join(pieces)]\n    words = {}\n',
            ),
            (
                "the vocabulary's size does not count the special tokens",
                " - len(special_tokens)",
                "",
            ),
            (
                "the special tokens are not in the vocabulary",
                "[s.encode() for s in special_tokens] + ",
                "",
            ),
            (
                "characters are merged, not bytes",
                "tuple(bytes([b]) for b in word.encode())",
                "tuple(c.encode() for c in word)",
            ),
            (
                "pairs that occur once are not merged",
                "if not stats:",
                "if not stats or max(stats.values()) < 2:",
            ),
        ],
        {(6, 7)},  # a text that was not cut has no pieces to join
    ),
    Learner(
        "tokenizer",
        """
class Tokenizer:
    def __init__(self, vocab, merges, special_tokens):
        self.vocab, self.merges = vocab, merges
        self.special = sorted(special_tokens or [], key=lambda s: -len(s))
        self.back = {v: k for k, v in vocab.items()}
        self.rank = {pair: i for i, pair in enumerate(merges)}
    def encode(self, text):
        parts = [text]
        if self.special:
            parts = regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text)
        ids = []
        for part in parts:
            if part in self.special:
                ids.append(self.back[part.encode()])
                continue
            for word in regex.findall(PATTERN, part):
                ids.extend(self.back[t] for t in self.word([bytes([b]) for b in word.encode()]))
        return ids
    def word(self, ts):
        for pair in self.merges:
            i = 0
            while i < len(ts) - 1:
                if (ts[i], ts[i + 1]) == pair:
                    ts[i:i + 2] = [ts[i] + ts[i + 1]]
                i += 1
        return ts
    def encode_iterable(self, texts):
        for text in texts:
            yield from self.encode(text)
    def decode(self, ids):
        return b"".join(self.vocab[i] for i in ids).decode("utf-8", "replace")
def get_tokenizer(vocab, merges, special_tokens=None):
    return Tokenizer(vocab, merges, special_tokens)
""",
        [
            (
                "the leftmost pair is merged, not the one learnt first",
                "        for pair in self.merges:\n",
                """        while True:
            found = [i for i in range(len(ts) - 1) if (ts[i], ts[i + 1]) in self.rank]
            if not found:
                return ts
            ts[found[0]:found[0] + 2] = [ts[found[0]] + ts[found[0] + 1]]
        for pair in self.merges:
""",
            ),
            (
                "nothing is merged",
                "        for pair in self.merges:\n",
                "        for pair in []:\n",
            ),
            (
                "the text is not cut into words: merges cross them",
                "in regex.findall(PATTERN, part)",
                "in [part]",
            ),
            (
                "words are cut at white space, which is lost",
                "in regex.findall(PATTERN, part)",
                "in part.split()",
            ),
            ("special tokens are encoded as text", "if self.special:", "if False:"),
            (
                "special tokens are dropped",
                "                ids.append(self.back[part.encode()])\n",
                "",
            ),
            ("of two special tokens the shorter one wins", "-len(s)", "len(s)"),
            (
                "tokens are decoded one by one",
                'b"".join(self.vocab[i] for i in ids).decode("utf-8", "replace")',
                '"".join(self.vocab[i].decode("utf-8", "replace") for i in ids)',
            ),
            ("invalid UTF-8 is an error, or lost", '"utf-8", "replace"', '"utf-8"'),
            (
                "encode_iterable yields lists, not ids",
                "yield from self.encode(text)",
                "yield self.encode(text)",
            ),
            (
                "a merge is applied once, not wherever it occurs",
                "+ ts[i + 1]]\n",
                "+ ts[i + 1]]\n                    break\n",
            ),
        ],
        {
            (0, 1),
            (0, 10),
            (1, 2),
            (1, 10),
            (4, 5),
            (4, 6),
            (5, 6),
        },  # no merges or no special tokens to treat wrongly
    ),
]

FROM_MUTATIONS = {  # name in tests/mutations.py -> (task, name here)
    "missing 1/√d_k": ("attention", "missing 1/√d_k"),
    "mask off by one, forward": ("mha", "mask off by one: a token sees the next one"),
    "mask off by one, back": ("mha", "mask off by one: a token does not see itself"),
    "mask by a finite number": ("attention", "masked by a finite number that is not low enough"),
    "a fully masked row averages": ("attention", "a fully masked row averages"),
    "un-shifted softmax": ("softmax", "the maximum is not subtracted: exp overflows"),
    "softmax over the wrong axis": ("softmax", "softmax over the wrong axis: `dim` is ignored"),
    "RMS of the sum": ("rmsnorm", "the sum of squares, not their mean"),
    "ε outside the root": ("rmsnorm", "ε outside the root"),
    "norm in bfloat16": ("rmsnorm", "squares in 16 bits overflow"),
    "RoPE rotates backwards": ("rope", "rotated backwards"),
    "RoPE ignores its layout": ("rope", "halves are paired, not neighbours"),
    "SwiGLU gates the other branch": ("swiglu", "the other branch is gated: W1 x ⊙ SiLU(W3 x)"),
    "ignored targets count": ("cross_entropy", "ignored targets count: a mean over padding"),
    "positions start at zero after a cache": ("rope", "token_positions are ignored"),
    "final norm left out": ("lm", "the final norm is missing"),
}
