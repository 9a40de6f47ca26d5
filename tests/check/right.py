"""Right files in styles a learner may choose: loops, einsum, fused, float32, torch's own functions.

None of them may raise an alarm. Each entry is a task and a file that holds its function.
"""

RIGHT = [
    (
        "linear",
        "def run_linear(d_in, d_out, weights, in_features):\n    return in_features @ weights.T",
    ),
    (
        "linear",
        "def run_linear(a, b, weights, x):\n    return torch.nn.functional.linear(x, weights)",
    ),
    (
        "linear",
        """
def run_linear(d_in, d_out, weights, in_features):
    out = torch.zeros(*in_features.shape[:-1], d_out).to(in_features.dtype)
    for i in range(d_in):
        out = out + in_features[..., i : i + 1] * weights[:, i]
    return out
""",
    ),
    (
        "linear",
        """
def run_linear(d_in, d_out, weights, in_features):
    y = torch.einsum("oi,...i->...o", weights.float(), in_features.float())
    return y.to(in_features.dtype)
""",
    ),
    (
        "embedding",
        "def run_embedding(v, d, w, ids):\n    return torch.nn.functional.embedding(ids, w)",
    ),
    (
        "embedding",
        """
def run_embedding(vocab_size, d_model, weights, token_ids):
    rows = [weights[int(i)] for i in token_ids.flatten()]
    return torch.stack(rows).reshape(*token_ids.shape, d_model)
""",
    ),
    ("softmax", "def run_softmax(x, dim):\n    return torch.softmax(x, dim=dim)"),
    ("softmax", "def run_softmax(x, dim):\n    return (x - torch.logsumexp(x, dim, True)).exp()"),
    (
        "softmax",
        """
def run_softmax(x, dim):
    wide = x.float()
    e = torch.exp(wide - wide.max(dim, keepdim=True).values)
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)
""",
    ),
    ("silu", "def run_silu(x):\n    return torch.nn.functional.silu(x)"),
    ("silu", "def run_silu(x):\n    return x / (1 + torch.exp(-x))"),
    ("silu", "def run_silu(x):\n    return x * (0.5 * torch.tanh(x / 2) + 0.5)"),
    (
        "rmsnorm",
        """
def run_rmsnorm(d_model, eps, weights, x):
    y = torch.nn.functional.rms_norm(x.float(), (d_model,), weights.float(), eps)
    return y.to(x.dtype)
""",
    ),
    (
        "rmsnorm",
        """
class RMSNorm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps
    def forward(self, x, gain):
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * gain
def run_rmsnorm(d_model, eps, weights, in_features):
    return RMSNorm(eps)(in_features, weights)
""",
    ),
    (
        "rope",
        """
def run_rope(d_k, theta, max_seq_len, x, token_positions):
    angle = token_positions[..., None] * theta ** (-torch.arange(0, d_k, 2).double() / d_k)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)
""",
    ),
    (
        "rope",
        """
def run_rope(d_k, theta, max_seq_len, x, token_positions):
    table = torch.zeros(max_seq_len, d_k, d_k)
    for p in range(max_seq_len):
        for i in range(0, d_k, 2):
            a = p / theta ** (i / d_k)
            table[p, i : i + 2, i : i + 2] = torch.tensor(
                [[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
    return torch.einsum("...sij,...sj->...si", table[token_positions].to(x.dtype), x)
""",
    ),
    (
        "attention",
        """
def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=mask)
""",
    ),
    (
        "attention",
        """
def run_scaled_dot_product_attention(Q, K, V, mask=None):
    scores = (Q * Q.shape[-1] ** -0.25) @ (K * K.shape[-1] ** -0.25).mT
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, dim=-1)) @ V
""",
    ),
    (
        "attention",
        """
def run_scaled_dot_product_attention(Q, K, V, mask=None):
    out = torch.zeros(*Q.shape[:-1], V.shape[-1], dtype=Q.dtype)
    rows = []
    for i in range(Q.shape[-2]):
        s = (Q[..., i : i + 1, :] * K).sum(-1) / math.sqrt(Q.shape[-1])
        if mask is not None:
            s = s.masked_fill(~mask[..., i, :], -1e30)
        w = torch.softmax(s, -1)
        if mask is not None:
            w = w * mask[..., i, :]
        rows.append((w[..., None] * V).sum(-2))
    return torch.stack(rows, dim=-2)
""",
    ),
    (
        "swiglu",
        """
def run_swiglu(d_model, d_ff, w1, w2, w3, x):
    a, b = (x @ torch.cat([w1, w3]).T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(a) * b) @ w2.T
""",
    ),
    (
        "mha",
        """
def run_multihead_self_attention(d_model, num_heads, q, k, v, o, x):
    b = x.reshape(-1, *x.shape[-2:])
    n = b.shape[1]
    qkv = (b @ torch.cat([q, k, v]).T).view(len(b), n, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    y = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    return (y.transpose(1, 2).reshape(len(b), n, d_model) @ o.T).reshape(x.shape)
""",
    ),
    (
        "cross_entropy",
        """
def run_cross_entropy(inputs, targets, ignore_index=-100):
    flat = inputs.reshape(-1, inputs.shape[-1])
    return torch.nn.functional.cross_entropy(flat, targets.reshape(-1), ignore_index=ignore_index)
""",
    ),
    (
        "cross_entropy",
        """
def run_cross_entropy(inputs, targets, ignore_index=-100):
    losses = []
    for row, t in zip(inputs.reshape(-1, inputs.shape[-1]), targets.reshape(-1).tolist()):
        if t != ignore_index:
            losses.append(torch.logsumexp(row, 0) - row[t])
    return sum(losses) / len(losses)
""",
    ),
    ("adamw", "def get_adamw_cls():\n    return torch.optim.AdamW"),
    (
        "adamw",
        """
class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, wd=weight_decay,
                                      weight_decay=weight_decay))
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                (b1, b2), lr = group["betas"], group["lr"]
                for p in filter(lambda p: p.grad is not None, group["params"]):
                    s = self.state.setdefault(p, {})
                    s["n"] = s.get("n", 0) + 1
                    s["m"] = torch.lerp(s.get("m", torch.zeros_like(p)), p.grad, 1 - b1)
                    s["v"] = torch.lerp(s.get("v", torch.zeros_like(p)), p.grad**2, 1 - b2)
                    up = s["m"] / (1 - b1 ** s["n"])
                    down = (s["v"] / (1 - b2 ** s["n"])) ** 0.5 + group["eps"]
                    p.copy_(p - lr * (up / down + group["weight_decay"] * p))
def get_adamw_cls():
    return Mine
""",
    ),
    (
        "schedule",
        """
def run_get_lr_cosine_schedule(it, high, low, warmup, cycle):
    if it < warmup:
        return high * it / warmup
    p = min(1.0, (it - warmup) / (cycle - warmup))
    return low + (high - low) * math.cos(p * math.pi / 2) ** 2
""",
    ),
    (
        "clipping",
        """
def run_gradient_clipping(parameters, max_l2_norm):
    torch.nn.utils.clip_grad_norm_(list(parameters), max_l2_norm)
""",
    ),
    (
        "clipping",
        """
def run_gradient_clipping(parameters, max_l2_norm):
    ps = [p for p in parameters if p.grad is not None]
    norm = torch.cat([p.grad.flatten() for p in ps]).norm()
    if norm > max_l2_norm:
        for p in ps:
            p.grad.data.copy_(p.grad * (max_l2_norm / norm))
""",
    ),
    (
        "tokenizer",
        """
class Wrapped:
    def __init__(self, vocab, merges, special):
        import tiktoken
        special = {s: next(i for i, t in vocab.items() if t == s.encode()) for s in special or []}
        ranks = {t: i for i, t in vocab.items() if t.decode("utf-8", "replace") not in special}
        self.enc = tiktoken.Encoding("mine", pat_str=PATTERN, mergeable_ranks=ranks,
                                     special_tokens=special)
    def encode(self, text):
        return self.enc.encode(text, allowed_special="all")
    def encode_iterable(self, texts):
        return (i for text in texts for i in self.encode(text))
    def decode(self, ids):
        return self.enc.decode(ids)
def get_tokenizer(vocab, merges, special_tokens=None):
    return Wrapped(vocab, merges, special_tokens)
""",
    ),
]
