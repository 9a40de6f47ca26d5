"""Learners' files for attention, SwiGLU, heads, block and model."""

from check.learner import Learner

ATTENTION = [
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
]
