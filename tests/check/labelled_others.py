"""Wrong files in one more style, dense and with torch's own functions: (task, mistake, file)."""

OTHERS = [
    (
        "linear",
        "W is not transposed: x W instead of x Wᵀ",
        """
def run_linear(d_in, d_out, weights, in_features):
    return torch.einsum("ij,...i->...j", weights, in_features)
""",
    ),
    (
        "linear",
        "W is not transposed: x W instead of x Wᵀ",
        """
def run_linear(d_in, d_out, weights, in_features):
    return torch.matmul(in_features, weights)
""",
    ),
    (
        "embedding",
        "the vectors are scaled by √d_model",
        """
def run_embedding(v, d, w, ids):
    return torch.index_select(w, 0, ids.flatten()).view(*ids.shape, d) * math.sqrt(d)
""",
    ),
    (
        "softmax",
        "softmax over the wrong axis: `dim` is ignored",
        """
def run_softmax(x, dim):
    e = (x - x.max(dim=-1, keepdim=True)[0]).exp()
    return e / e.sum(dim=-1, keepdim=True)
""",
    ),
    (
        "softmax",
        "the maximum is not subtracted: exp overflows",
        """
def run_softmax(x, dim):
    return torch.exp(x) / torch.exp(x).sum(dim=dim).unsqueeze(dim)
""",
    ),
    (
        "softmax",
        "the maximum of all slices is subtracted: small ones underflow",
        """
def run_softmax(x, dim):
    x = x - torch.max(x)
    return x.exp() / x.exp().sum(dim, keepdim=True)
""",
    ),
    (
        "silu",
        "GELU instead of SiLU",
        """
def run_silu(x):
    return nn.functional.gelu(x)
""",
    ),
    (
        "silu",
        "the sign in the exponent: x · σ(−x)",
        """
def run_silu(x):
    return x / (1 + x.exp())
""",
    ),
    (
        "rmsnorm",
        "ε outside the root",
        """
def run_rmsnorm(d, eps, w, x):
    y = x.float()
    r = y.norm(dim=-1, keepdim=True) / math.sqrt(d)
    return (y / (r + eps) * w).to(x.dtype)
""",
    ),
    (
        "rmsnorm",
        "the sum of squares, not their mean",
        """
def run_rmsnorm(d, eps, w, x):
    y = x.float()
    return (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + eps) * w.float()).to(x.dtype)
""",
    ),
    (
        "rmsnorm",
        "squares in 16 bits overflow",
        """
def run_rmsnorm(d, eps, w, x):
    return x * torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + eps) * w
""",
    ),
    (
        "rmsnorm",
        "the gain is not applied",
        """
def run_rmsnorm(d, eps, w, x):
    return nn.functional.rms_norm(x.float(), (d,), None, eps).to(x.dtype)
""",
    ),
    (
        "rope",
        "halves are paired, not neighbours",
        """
def run_rope(d, theta, n, x, pos):
    f = theta ** (-torch.arange(0, d, 2) / d)
    a = pos[..., None] * f
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * a.cos() - x2 * a.sin(), x2 * a.cos() + x1 * a.sin()], -1).to(x.dtype)
""",
    ),
    (
        "rope",
        "rotated backwards",
        """
def run_rope(d, theta, n, x, pos):
    f = theta ** (-torch.arange(0, d, 2) / d)
    a = pos[..., None] * f
    e, o = (x[..., ::2], x[..., 1::2])
    return (
        torch.stack([e * a.cos() + o * a.sin(), o * a.cos() - e * a.sin()], -1)
        .flatten(-2)
        .to(x.dtype)
    )
""",
    ),
    (
        "rope",
        "θ is fixed at 10000",
        """
def run_rope(d, theta, n, x, pos):
    f = 1 / 10000 ** (torch.arange(0, d, 2).float() / d)
    a = torch.einsum("...s,f->...sf", pos.float(), f)
    z = torch.view_as_complex(
        x.float().reshape(*x.shape[:-1], -1, 2).contiguous()
    ) * torch.polar(torch.ones_like(a), a)
    return torch.view_as_real(z).flatten(-2).to(x.dtype)
""",
    ),
    (
        "rope",
        "token_positions are ignored",
        """
def run_rope(d, theta, n, x, pos):
    a = torch.arange(n)[:, None] / theta ** (torch.arange(0, d, 2) / d)
    c, s = (a.cos()[: x.shape[-2]], a.sin()[: x.shape[-2]])
    e, o = (x[..., ::2], x[..., 1::2])
    return torch.stack([e * c - o * s, e * s + o * c], -1).flatten(-2).to(x.dtype)
""",
    ),
    (
        "attention",
        "missing 1/√d_k",
        """
def run_scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    return torch.softmax(s, -1).nan_to_num() @ v
""",
    ),
    (
        "attention",
        "the mask is inverted",
        """
def run_scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        s = s.masked_fill(mask, float("-inf"))
    return torch.softmax(s, -1).nan_to_num() @ v
""",
    ),
    (
        "attention",
        "a fully masked row averages",
        """
def run_scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        s = s.masked_fill(~mask, -1000000000.0)
    return torch.softmax(s, -1) @ v
""",
    ),
    (
        "attention",
        "masked by a finite number that is not low enough",
        """
def run_scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        s = s + ~mask * -100.0
    return torch.softmax(s, -1) @ v
""",
    ),
    (
        "attention",
        "a fully masked row is NaN",
        """
def run_scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return torch.softmax(s, -1) @ v
""",
    ),
    (
        "attention",
        "softmax over the queries, not over the keys",
        """
def run_scaled_dot_product_attention(q, k, v, mask=None):
    s = k @ q.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        s = s.masked_fill(~mask.mT, -torch.inf)
    w = torch.softmax(s, -1).mT
    if mask is not None:
        w = torch.where(mask.any(-1, keepdim=True), w, 0)
    return w @ v
""",
    ),
    (
        "swiglu",
        "the other branch is gated: W1 x ⊙ SiLU(W3 x)",
        """
def run_swiglu(d, f, w1, w2, w3, x):
    return nn.functional.silu(x @ w3.T) * (x @ w1.T) @ w2.T
""",
    ),
    (
        "swiglu",
        "GELU or ReLU instead of SiLU",
        """
def run_swiglu(d, f, w1, w2, w3, x):
    return nn.functional.gelu(x @ w1.T) * (x @ w3.T) @ w2.T
""",
    ),
    (
        "mha",
        "no causal mask: tokens see the future",
        """
def run_multihead_self_attention(d, h, q, k, v, o, x):
    s = lambda w: (x @ w.T).unflatten(-1, (h, -1)).transpose(-2, -3)
    return (
        nn.functional.scaled_dot_product_attention(s(q), s(k), s(v))
        .transpose(-2, -3)
        .flatten(-2)
        @ o.T
    )
""",
    ),
    (
        "mha",
        "heads are cut by a reshape alone: sequence and heads are mixed",
        """
def run_multihead_self_attention(d, h, q, k, v, o, x):
    n = x.shape[-2]
    s = lambda w: (x @ w.T).reshape(*x.shape[:-2], h, n, d // h)
    y = nn.functional.scaled_dot_product_attention(s(q), s(k), s(v), is_causal=True)
    return y.transpose(-2, -3).reshape(x.shape) @ o.T
""",
    ),
    (
        "mha",
        "scaled by √d_model, not √d_head",
        """
def run_multihead_self_attention(d, h, q, k, v, o, x):
    s = lambda w: (x @ w.T).unflatten(-1, (h, -1)).transpose(-2, -3)
    return (
        nn.functional.scaled_dot_product_attention(
            s(q), s(k), s(v), is_causal=True, scale=d ** (-0.5)
        )
        .transpose(-2, -3)
        .flatten(-2)
        @ o.T
    )
""",
    ),
    (
        "mha",
        "the mask is upside down: tokens see only the future",
        """
def run_multihead_self_attention(d, h, q, k, v, o, x):
    n = x.shape[-2]
    m = torch.triu(torch.ones(n, n), diagonal=1).bool()
    s = lambda w: (x @ w.T).unflatten(-1, (h, -1)).transpose(-2, -3)
    return (
        nn.functional.scaled_dot_product_attention(s(q), s(k), s(v), attn_mask=m)
        .transpose(-2, -3)
        .flatten(-2)
        @ o.T
    )
""",
    ),
    (
        "mha_rope",
        "values are rotated, too",
        """
def run_multihead_self_attention_with_rope(d, h, n, t, q, k, v, o, x, p=None):
    s = lambda w: run_rope(d // h, t, n, (x @ w.T).unflatten(-1, (h, -1)).transpose(-2, -3), p)
    return (
        nn.functional.scaled_dot_product_attention(s(q), s(k), s(v), is_causal=True)
        .transpose(-2, -3)
        .flatten(-2)
        @ o.T
    )
""",
    ),
    (
        "block",
        "post-norm: the norms come after the sums",
        """
def run_transformer_block(d, h, f, n, t, w, x):
    a = run_multihead_self_attention_with_rope(
        d,
        h,
        n,
        t,
        *[w["attn.%s.weight" % k] for k in ("q_proj", "k_proj", "v_proj", "output_proj")],
        x,
    )
    y = run_rmsnorm(d, 1e-05, w["ln1.weight"], x + a)
    return run_rmsnorm(
        d,
        1e-05,
        w["ln2.weight"],
        y + run_swiglu(d, f, w["ffn.w1.weight"], w["ffn.w2.weight"], w["ffn.w3.weight"], y),
    )
""",
    ),
    (
        "cross_entropy",
        "the sum, not the mean",
        """
def run_cross_entropy(x, t, ignore_index=-100):
    return nn.functional.cross_entropy(
        x.reshape(-1, x.shape[-1]), t.reshape(-1), reduction="sum"
    )
""",
    ),
    (
        "cross_entropy",
        "the logarithm of a softmax that has become 0",
        """
def run_cross_entropy(x, t, ignore_index=-100):
    p = torch.softmax(x.reshape(-1, x.shape[-1]), -1)
    t = t.reshape(-1)
    k = t != -100
    return -torch.log(p[k].gather(1, t[k][:, None])).mean()
""",
    ),
    (
        "cross_entropy",
        "targets of −100 are not left out",
        """
def run_cross_entropy(x, t, ignore_index=-100):
    lp = torch.log_softmax(x, -1)
    return -lp.gather(-1, t.unsqueeze(-1)).mean()
""",
    ),
    (
        "adamw",
        "L2 in the gradient instead of decoupled decay (that is Adam)",
        """
def get_adamw_cls():
    return torch.optim.Adam
""",
    ),
    (
        "adamw",
        "no bias correction",
        """
class A(torch.optim.Optimizer):
    def __init__(s, p, lr, betas, eps, weight_decay):
        super().__init__(p, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(s):
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = s.state[p]
                if "m" not in st:
                    st["m"] = torch.zeros_like(p)
                    st["v"] = torch.zeros_like(p)
                st["m"].lerp_(p.grad, 1 - g["betas"][0])
                st["v"].lerp_(p.grad**2, 1 - g["betas"][1])
                p.add_(st["m"] / (st["v"].sqrt() + g["eps"]), alpha=-g["lr"])
                p.mul_(1 - g["lr"] * g["weight_decay"])


def get_adamw_cls():
    return A
""",
    ),
    (
        "schedule",
        "the rate rises again after the end",
        """
def run_get_lr_cosine_schedule(it, a, b, w, c):
    if it < w:
        return a * it / w
    return b + (a - b) * (1 + math.cos((it - w) / (c - w) * math.pi)) / 2
""",
    ),
    (
        "schedule",
        "the minimum is not added",
        """
def run_get_lr_cosine_schedule(it, a, b, w, c):
    if it < w:
        return a * it / w
    if it > c:
        return b
    return (a - b) * (1 + math.cos((it - w) / (c - w) * math.pi)) / 2
""",
    ),
    (
        "clipping",
        "each gradient is clipped by itself",
        """
def run_gradient_clipping(ps, m):
    for p in ps:
        if p.grad is not None:
            torch.nn.utils.clip_grad_norm_([p], m)
""",
    ),
    (
        "clipping",
        "clipped cell by cell",
        """
def run_gradient_clipping(ps, m):
    torch.nn.utils.clip_grad_value_(list(ps), m)
""",
    ),
    (
        "train_bpe",
        "a tie is broken the wrong way",
        """
def run_train_bpe(path, n, special):
    from collections import Counter

    t = open(path, encoding="utf8").read()
    parts = regex.split("|".join(map(regex.escape, special)), t) if special else [t]
    ws = [[bytes([b]) for b in w.encode()] for p in parts for w in regex.findall(PATTERN, p)]
    merges = []
    while len(merges) < n - 256 - len(special):
        c = Counter((pr for w in ws for pr in zip(w, w[1:])))
        if not c:
            break
        best = min(c.items(), key=lambda kv: (-kv[1], kv[0]))[0]
        merges.append(best)
        for w in ws:
            i = 0
            while i < len(w) - 1:
                if (w[i], w[i + 1]) == best:
                    w[i : i + 2] = [w[i] + w[i + 1]]
                i += 1
    v = (
        [bytes([i]) for i in range(256)]
        + [a + b for a, b in merges]
        + [s.encode() for s in special]
    )
    return (dict(enumerate(v)), merges)
""",
    ),
]
