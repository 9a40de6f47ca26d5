"""Learners' files for linear, embedding, softmax, SiLU, RMSNorm and RoPE."""

from check.learner import Learner

LAYERS = [
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
]
