"""The ops of `ops/reference.py` at speed: torch's own functions, one for one.

An op stands here only where it is faster than its formula. Some skip the ops their formula is made
of (torch's attention never calls our softmax): where a subclass brings one of those, its formula is
used instead. `tests/ops/test_fast_matches_reference.py` holds every op to the definition.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from scratchlm.ops import attention as attention_kernels
from scratchlm.ops import experts
from scratchlm.ops.masks import Mask, check_attention
from scratchlm.ops.ranges import can_look, counted_targets
from scratchlm.ops.reference import OP_NAMES, ReferenceOps

# On a CPU, a product of few rows with a matrix this large is bound by reading the matrix, and
# torch's own leaves that to one core. Cut into row blocks, two for each thread, it is read at the
# memory's full speed: 1.3 to 2.5 times as fast.
BLOCKS_FROM = 1 << 17  # elements of the matrix
BLOCKS_UP_TO = 64  # rows of x
AS_COLUMNS = range(2, 6)  # rows of x for which W xᵀ is faster than x Wᵀ

# op -> the ops of its formula that it does not call
SKIPS = {
    "attention": ("scaled_dot_product_attention", "softmax"),
    "scaled_dot_product_attention": ("softmax",),
    "grouped_linear": ("linear",),
    "cross_entropy": ("log_sum_exp",),
}


class FastOps(ReferenceOps):
    """Torch's own kernels, and our attention on a CPU."""

    by_formula: frozenset[str] = frozenset()  # ops that would skip a user-provided one

    def __init_subclass__(cls, **options: Any) -> None:
        """Find the ops whose fast implementation would skip an op of this class's own."""
        super().__init_subclass__(**options)
        own = {op for op in OP_NAMES if getattr(cls, op) is not getattr(FastOps, op)}
        cls.by_formula = frozenset(op for op, skipped in SKIPS.items() if own & set(skipped))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """y = W x (+ b)."""
        if weight.numel() >= BLOCKS_FROM and x.is_cpu and not torch.compiler.is_compiling():
            rows = x.shape[:-1].numel()
            single = x.dtype is weight.dtype is torch.float32
            if rows <= BLOCKS_UP_TO and single and weight.is_contiguous():
                y = _linear_by_blocks(x.reshape(rows, x.shape[-1]), weight)
                y = y.view(*x.shape[:-1], len(weight))
                return y if bias is None else y + bias
        return F.linear(x, weight, bias)

    def grouped_linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """y = W_g x, with a matrix for each group of rows; group g ends before row `ends[g]`."""
        if "grouped_linear" in self.by_formula:
            return super().grouped_linear(x, weight, ends)
        return experts.grouped_linear(x, weight, ends)

    def embedding(self, ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
        """Row `id` of the table, for every id."""
        return F.embedding(ids, weight, padding_idx=padding_id)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        """x / sqrt(mean(x²) + ε) · g."""
        if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
            if can_look(x) and x.numel():  # on a CPU, not traced
                if torch.is_grad_enabled():
                    return _RMSNorm.apply(x, weight, eps)
                return _scaled(x, weight, eps)[0]
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """(x − mean) / sqrt(var + ε) · g + b."""
        if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        wide_bias = None if bias is None else bias.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)

    def silu(self, x: Tensor) -> Tensor:
        """x · σ(x)."""
        return F.silu(x)

    def gelu(self, x: Tensor) -> Tensor:
        """x · Φ(x)."""
        return F.gelu(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """The tanh approximation of GELU."""
        return F.gelu(x, approximate="tanh")

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)."""
        return F.relu(x)

    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Mean of log Σ exp(logits) − logits[target] over the targets that count."""
        if "cross_entropy" in self.by_formula:
            options: Any = {"ignore_index": ignore_index, "z_loss": z_loss, "reduction": reduction}
            return super().cross_entropy(logits, targets, **options)
        shape, vocab = logits.shape[:-1], logits.shape[-1]
        index, counts, wrong = counted_targets(shape, vocab, targets, ignore_index)
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        rows, counts = wide.reshape(-1, wide.shape[-1]), counts.reshape(-1)
        labels = index.reshape(-1).masked_fill(~counts, -100)
        total = F.cross_entropy(rows, labels, ignore_index=-100, reduction="sum")
        if z_loss:
            total = total + z_loss * rows.logsumexp(-1).masked_fill(~counts, 0.0).pow(2).sum()
        if wrong is not None:
            total = total.masked_fill(wrong.any(), torch.nan)
        return total if reduction == "sum" else total / counts.sum().clamp(min=1)

    def rope(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: Literal["interleaved", "half"] = "interleaved",
    ) -> Tensor:
        """Rotate each pair of channels by its angle."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if layout == "half":  # x ⊙ (cos, cos) + (second half, first half) ⊙ (−sin, sin)
            swapped = wide.roll(cos.shape[-1], dims=-1)
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
            return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
        if torch.compiler.is_compiling():  # compilers do not take complex numbers
            a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
            rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
            return rotated.flatten(-2).to(x.dtype)
        angle = torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
        return torch.view_as_real(_as_complex(wide) * angle).flatten(-2).to(x.dtype)

    def scaled_dot_product_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask = None
    ) -> Tensor:
        """softmax(Q Kᵀ / √d_k) V."""
        if "scaled_dot_product_attention" in self.by_formula:
            return super().scaled_dot_product_attention(query, key, value, mask)
        check_attention(query, key, value, mask)
        return attention_kernels.attend(query, key, value, mask)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask = None) -> Tensor:
        """Attention over heads; with fewer key heads, each serves a group of query heads."""
        if "attention" in self.by_formula:
            return super().attention(query, key, value, mask)
        grouped = query.shape[-3] != key.shape[-3]
        return attention_kernels.attend(query, key, value, mask, grouped)


def has_fast_attention(ops: ReferenceOps) -> bool:
    """Whether a set of ops attends by the kernels of `ops/attention.py`."""
    fast = isinstance(ops, FastOps) and "attention" not in ops.by_formula
    return fast and type(ops).attention is FastOps.attention


def _linear_by_blocks(x: Tensor, weight: Tensor) -> Tensor:
    (rows, d_in), d_out = x.shape, len(weight)
    num_blocks = math.gcd(d_out, 2 * torch.get_num_threads())
    blocks = weight.view(num_blocks, -1, d_in)
    if rows in AS_COLUMNS:
        y = torch.bmm(blocks, x.t().expand(num_blocks, d_in, rows))  # (block, d_out / blocks, rows)
        return y.view(d_out, rows).t()
    y = torch.bmm(x.expand(num_blocks, rows, d_in), blocks.mT)  # (block, rows, d_out / blocks)
    return y.transpose(0, 1).reshape(rows, d_out)


def _scaled(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x · s · g and s = 1 / sqrt(mean(x²) + ε): five operations, where torch takes nine."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    start = torch.scalar_tensor(eps, dtype=x.dtype)
    scale = torch.addcmul(start, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight), scale


class _RMSNorm(torch.autograd.Function):
    """On a CPU: torch's own is a chain of small operations, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _scaled(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        # With h = x·s and u = grad_output·g:  dx = s·(u − h·mean(u·h)). LayerNorm's kernel, told
        # that the mean of x is 0, gives s·(u − mean(u) − h·mean(u·h)): mean(u) is put back.
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # this derivative will be differentiated: by the formula
            scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + ctx.eps)
            h, u = x * scale, grad_output * weight
            dx = scale * (u - h * (u * h).mean(dim=-1, keepdim=True))
            return dx, (grad_output * h).flatten(0, -2).sum(0), None
        zero = torch.zeros_like(scale)
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            grad_output, x, weight.shape, zero, scale, weight, None, [True, True, False]
        )
        mean = (grad_output @ weight).unsqueeze(-1) / len(weight)
        return torch.addcmul(dx, mean, scale), dweight, None


def _as_complex(x: Tensor) -> Tensor:
    """Read neighbouring channels as one complex number, without a copy where memory allows."""
    *strides, last = x.stride()
    if last != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in strides):
        x = x.contiguous()
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
