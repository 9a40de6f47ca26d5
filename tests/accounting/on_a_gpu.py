"""Stand-ins for a GPU's kernels: on the CPU they hold and save what those hold and save.

Their values count only as far as the memory does: some gradients are zeros.
"""

import torch
import torch.nn.functional as F

from scratchlm.accounting.verify import all_logits_at_once
from scratchlm.ops import OPS, Ops, fast, loss

ROWS = 16  # a kernel's program holds a row; a stand-in a few


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x.contiguous() * rstd).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


class FusedAttention(torch.autograd.Function):
    """In 16 bits cuDNN's, whose output is laid out as Q; else by token, as the other kernels'."""

    @staticmethod
    def forward(ctx, q, k, v):
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        by_token = made.transpose(1, 2).contiguous().transpose(1, 2)
        out = torch.empty_like(q).copy_(made) if q.dtype.itemsize == 2 else by_token
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:3])


class Norm(torch.autograd.Function):
    """By our kernel: it keeps its input as it is."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def rms_norm(x, weight, eps=1e-5):
    if x.is_contiguous():
        return Norm.apply(x, weight)
    if x.dtype == weight.dtype == torch.float32:
        return FusedNorm.apply(x, weight, eps)
    return FusedNorm.apply(x.float(), weight.float(), eps).to(x.dtype)


class Turn(torch.autograd.Function):
    """Pairs of channels turned, whatever view they are, into a tensor that lies by token."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        by_token = x.transpose(1, 2)
        return torch.zeros_like(by_token, memory_format=torch.contiguous_format).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad), None, None


def rope(x, cos, sin, layout="interleaved"):
    return Turn.apply(x, cos, sin)


class Heads(torch.autograd.Function):
    """The joined product cut into heads, normed and turned: it is kept where there are norms."""

    @staticmethod
    def forward(ctx, joined, heads, kv_heads, cos, sin, *gains):
        ctx.save_for_backward(*([joined] if gains else []), cos, sin, *gains)
        ctx.shape, ctx.gains = joined.shape, [gain.shape for gain in gains]
        width = joined.shape[-1] // (heads + 2 * kv_heads)
        q, k = (
            joined.new_zeros(*joined.shape[:2], number, width).transpose(1, 2)
            for number in (heads, kv_heads)
        )
        v = joined[..., (heads + kv_heads) * width :].unflatten(-1, (kv_heads, width))
        return q, k, v.transpose(1, 2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        of_gains = [torch.zeros(shape) for shape in ctx.gains]
        return dq.new_zeros(ctx.shape), None, None, None, None, *of_gains


class AddNorm(torch.autograd.Function):
    """A sum and its norm in one kernel: it keeps the sum."""

    @staticmethod
    def forward(ctx, x, delta, gain, low):
        y = x + delta
        ctx.save_for_backward(y, gain)
        ctx.delta = delta.dtype
        return y, torch.zeros_like(y, dtype=low)

    @staticmethod
    def backward(ctx, dy, dn):
        y, gain = ctx.saved_tensors
        dx = torch.zeros_like(y)
        of_delta = dx if ctx.delta == y.dtype else torch.zeros_like(y, dtype=ctx.delta)
        return dx, of_delta, torch.zeros_like(gain), None


class OpsOnAGpu(Ops):
    def turned_heads(self, x, weights, biases, heads, turn, norm):
        joined = joined_product(x, weights, biases)
        return Heads.apply(joined, *heads, *turn[:2], *(() if norm is None else norm[:2]))

    def add_norm(self, x, delta, gain, eps):
        low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return AddNorm.apply(x, delta, gain, low)


class Projected(torch.autograd.Function):
    """Queries, keys and values as views of one product, the first two turned on its way out."""

    @staticmethod
    def forward(ctx, x, w, cos, sin, heads, kv_heads):
        ctx.save_for_backward(x, w, cos, sin)
        width = len(w) // (heads + 2 * kv_heads)
        by_head = F.linear(x, w).unflatten(-1, (-1, width)).transpose(1, 2)
        return by_head.split((heads, kv_heads, kv_heads), dim=1)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        x, w, _, _ = ctx.saved_tensors
        joined = x.new_zeros(*x.shape[:-1], len(w))
        return joined @ w, torch.zeros_like(w), None, None, None, None


class OpsOnAHopperGpu(OpsOnAGpu):
    def turned_heads(self, x, weights, biases, heads, turn, norm):
        if norm is not None or biases[0] is not None:
            return super().turned_heads(x, weights, biases, heads, turn, norm)
        low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        w = torch.cat([weight.to(low) for weight in weights])
        return Projected.apply(x.to(low), w, *turn[:2], *heads)


def attention(q, k, v, mask=None):
    return FusedAttention.apply(q, k, v)


def joined_product(x, weights, biases):
    """Several maps as one product: what `ops/fast.py` does where x is on a GPU."""
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    joined = torch.cat([weight.to(low) for weight in weights])
    return F.linear(x, joined, None if biases[0] is None else torch.cat(biases))


def linears(x, weights, biases):
    sizes = [len(weight) for weight in weights]
    return joined_product(x, weights, biases).split(sizes, dim=-1)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, joined):
        ctx.save_for_backward(joined)
        a, b = joined.chunk(2, dim=-1)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(ctx.saved_tensors[0])


def swiglu(x, w1, w2, w3, b1=None, b2=None, b3=None):
    return fast.linear(Gate.apply(joined_product(x, (w1, w3), (b1, b3))), w2, b2)


def loss_and_gradient(logits, targets, vocab, z_loss, gradient):
    """Write the gradient over the logits, a few rows at a time: the kernel of the fused loss."""
    losses = []
    for rows, column in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
        logs = rows.float().log_softmax(-1)
        losses.append(-logs.gather(1, column[:, None])[:, 0])
        rows.copy_(logs.exp_().scatter_add_(1, column[:, None], -torch.ones(len(rows), 1)))
    return loss._Slopes(torch.cat(losses), logits, torch.ones(len(logits)))


def scaled_rows(x, factors, above, out):
    """Multiply rows in place, as a kernel does."""
    factors = factors if above is None else factors * above
    return torch.mul(x, factors[:, None].to(x.dtype), out=out)


def add_product(total, a, b):
    """Add a·b in float32 without widening a or b whole: a product with `out_dtype`."""
    total = torch.zeros(len(a), b.shape[1]) if total is None else total
    for columns, rows in zip(a.split(ROWS, dim=1), b.split(ROWS), strict=True):
        total.addmm_(columns.float(), rows.float())
    return total


def ops_on_a_gpu(execution):
    """Return the fast ops with the stand-ins; what is unfused is computed as it is written."""
    changed = {"rms_norm": rms_norm, "rope": rope, "attention": attention}
    changed |= {"linears": linears, "swiglu": swiglu}
    if execution.attention == "unfused":
        changed["attention"] = OPS["reference"].attention
    if execution.loss == "unfused":
        changed["linear_cross_entropy"] = all_logits_at_once
    kind = OpsOnAHopperGpu if execution.turned else OpsOnAGpu
    return kind(**vars(OPS["fast"]) | changed)
