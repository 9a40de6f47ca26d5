"""Stand-ins for a GPU's kernels: on the CPU they hold and save what those hold and save.

Their values count only as far as the memory does: some gradients are zeros.
"""

import torch
import torch.nn.functional as F

from scratchlm.accounting.verify import all_logits_at_once
from scratchlm.ops import OPS, Ops, fast

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


def rms_norm(x, weight, eps=1e-5):
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


class NormTurn(torch.autograd.Function):
    """A norm over a head, then the turn, in one kernel: it keeps its input."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin):
        ctx.save_for_backward(x, weight, cos, sin)
        return Turn.apply(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.saved_tensors[1]
        return torch.zeros_like(grad), torch.zeros_like(weight), None, None


class OpsOnAGpu(Ops):
    def norm_rope(self, x, gain, eps, cos, sin, layout):
        return NormTurn.apply(x, gain, cos, sin)


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
    return torch.cat(losses), logits


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
    return OpsOnAGpu(**vars(OPS["fast"]) | changed)
