"""Stand-ins for a GPU's kernels: on the CPU they hold and save what those hold and save.

An accelerated model looks up, at every call, whether kernels are for its input, and imports them
then. `kernels_on_a_gpu` answers for a GPU and puts the stand-ins where the kernels are found.
Their values count only as far as the memory does: some results and gradients are zeros.
"""

import torch
import torch.nn.functional as F

from scratchlm.accelerate import accelerate, conditions, hopper, lm_head_loss
from scratchlm.model import TransformerLM
from scratchlm.ops import OPS
from scratchlm.ops import attention as attention_kernels

KERNELS = "scratchlm.accelerate.kernels"
ROWS = 16  # a kernel's program holds a row; a stand-in a few


def kernels_on_a_gpu(monkeypatch, execution, d_head):
    """Let accelerated models on the CPU run as on a GPU."""
    monkeypatch.setattr(conditions, "trains_by_kernel", lambda x: True)
    monkeypatch.setattr(conditions, "compute_dtype", compute_dtype)
    monkeypatch.setattr("scratchlm.ops.fast.can_look", lambda x: False)
    monkeypatch.setattr(F, "rms_norm", torch_rms_norm)
    monkeypatch.setattr(attention_kernels, "attend", attend)
    monkeypatch.setattr(f"{KERNELS}.triton.rms_norm.rms_norm", rms_norm)
    monkeypatch.setattr(f"{KERNELS}.triton.rms_norm.add_rms_norm", AddNorm.apply)
    monkeypatch.setattr(f"{KERNELS}.triton.qkv_norm_rope.qkv_norm_rope", qkv_norm_rope)
    monkeypatch.setattr(f"{KERNELS}.triton.swiglu_gate.swiglu_gate", Gate.apply)
    monkeypatch.setattr(lm_head_loss, "_loss_and_dlogits", loss_and_dlogits)
    monkeypatch.setattr(lm_head_loss, "_scaled_rows", scaled_rows)
    monkeypatch.setattr(lm_head_loss, "_add_product", add_product)
    if not execution.rope_epilogue:
        return
    monkeypatch.setattr(hopper, "HEAD", d_head)
    monkeypatch.setattr(hopper, "why_no_qkv_rope", lambda x, dtype: None)
    monkeypatch.setattr(hopper, "supports_rope_tables", lambda cos: True)
    monkeypatch.setattr(hopper, "why_no_attention", lambda x, num_heads: None)
    monkeypatch.setattr(f"{KERNELS}.hopper.qkv_rope.rope_tables", rope_tables)
    monkeypatch.setattr(f"{KERNELS}.hopper.qkv_rope.qkv_rope_attention", qkv_rope_attention)


def accelerated_model(config, execution, dtype=None):
    """Return an accelerated model; what is unfused is computed as it is written."""
    ops, without = OPS["fast"], []
    if execution.attention == "unfused":
        ops = ops.replace(attention=OPS["reference"].attention)
    if execution.loss == "unfused":
        without = ["chunked_lm_head_loss"]
    return accelerate(TransformerLM(config, ops=ops, dtype=dtype), without)


def compute_dtype(x):
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


# Norms


class FusedNorm(torch.autograd.Function):
    """Torch's own kernel."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x.contiguous() * rstd).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


def torch_rms_norm(x, shape, weight, eps):
    return FusedNorm.apply(x, weight, eps)


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


def rms_norm(x, weight, eps):
    assert x.is_contiguous()
    return Norm.apply(x, weight)


class AddNorm(torch.autograd.Function):
    """A sum and its norm in one kernel: it keeps the sum."""

    @staticmethod
    def forward(ctx, x, delta, weight, eps, out_dtype):
        y = x + delta
        ctx.save_for_backward(y, weight)
        ctx.delta = delta.dtype
        return y, torch.zeros_like(y, dtype=out_dtype)

    @staticmethod
    def backward(ctx, dy, dn):
        y, weight = ctx.saved_tensors
        dx = torch.zeros_like(y)
        ddelta = dx if ctx.delta == y.dtype else torch.zeros_like(y, dtype=ctx.delta)
        return dx, ddelta, torch.zeros_like(weight), None, None


# Attention


class FusedAttention(torch.autograd.Function):
    """In 16 bits cuDNN's, whose output is laid out as Q; else by token, as the other kernels'."""

    @staticmethod
    def forward(ctx, q, k, v):
        attn_out = fused_attention(q, k, v)
        ctx.save_for_backward(q, k, v, attn_out, log_sum_exp(q))
        return attn_out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:3])


def fused_attention(q, k, v):
    attn_out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if q.dtype.itemsize == 2:
        return torch.empty_like(q).copy_(attn_out)
    return attn_out.transpose(1, 2).contiguous().transpose(1, 2)


def log_sum_exp(q):
    return q.new_zeros(q.shape[:-1], dtype=torch.float32)


def attend(q, k, v, mask, grouped=False):
    assert mask.is_plain
    return FusedAttention.apply(q, k, v)


class NormRope(torch.autograd.Function):
    """The joined product cut into heads, normed and rotated: it is kept where there are norms."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, kv_heads, *gains):
        ctx.save_for_backward(*([qkv] if gains else []), cos, sin, *gains)
        ctx.shape, ctx.gains = qkv.shape, [gain.shape for gain in gains]
        width = qkv.shape[-1] // (heads + 2 * kv_heads)
        q, k = (
            qkv.new_zeros(*qkv.shape[:2], number, width).transpose(1, 2)
            for number in (heads, kv_heads)
        )
        v = qkv[..., (heads + kv_heads) * width :].unflatten(-1, (kv_heads, width))
        return q, k, v.transpose(1, 2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        of_gains = [torch.zeros(shape) for shape in ctx.gains]
        return dq.new_zeros(ctx.shape), None, None, None, None, *of_gains


def qkv_norm_rope(qkv, cos, sin, norm, num_heads, interleaved):
    return NormRope.apply(qkv, cos, sin, *num_heads, *(() if norm is None else norm[:2]))


def rope_tables(cos, sin, interleaved):
    return torch.stack((cos, sin))


class QkvRopeAttention(torch.autograd.Function):
    """From the layer's input to attention's output."""

    @staticmethod
    def forward(ctx, x, w, tables, heads, kv_heads):
        qkv = F.linear(x, w)
        q, k, v = split_heads(qkv, heads, kv_heads)
        attn_out = fused_attention(q, k, v).transpose(1, 2).flatten(2)
        ctx.save_for_backward(x, w, qkv, attn_out, log_sum_exp(q), tables)
        return attn_out

    @staticmethod
    def backward(ctx, grad):
        x, w, *_ = ctx.saved_tensors
        return *product_gradients(x, w), None, None, None


def qkv_rope_attention(x, w, tables, num_heads, interleaved):
    return QkvRopeAttention.apply(x, w, tables, *num_heads)


def split_heads(qkv, heads, kv_heads):
    by_head = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    return by_head.split((heads, kv_heads, kv_heads), dim=1)


def product_gradients(x, w):
    grad_qkv = x.new_zeros(*x.shape[:-1], len(w))
    return grad_qkv @ w, torch.zeros_like(w)


# Feed-forward


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        a, b = gate_up.chunk(2, dim=-1)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(ctx.saved_tensors[0])


# LM head and loss


def loss_and_dlogits(logits, targets, vocab, z_loss, gradient):
    """Write the gradient over the logits, a few rows at a time: the kernel of the fused loss."""
    losses = []
    for rows, column in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
        logs = rows.float().log_softmax(-1)
        losses.append(-logs.gather(1, column[:, None])[:, 0])
        rows.copy_(logs.exp_().scatter_add_(1, column[:, None], -torch.ones(len(rows), 1)))
    return lm_head_loss._DLogits(torch.cat(losses), logits, torch.ones(len(logits)))


def scaled_rows(x, factors, grad_output, out):
    """Multiply rows in place, as a kernel does."""
    factors = factors if grad_output is None else factors * grad_output
    return torch.mul(x, factors[:, None].to(x.dtype), out=out)


def add_product(total, a, b):
    """Add a·b in float32 without widening a or b whole: a product with `out_dtype`."""
    total = torch.zeros(len(a), b.shape[1]) if total is None else total
    for columns, rows in zip(a.split(ROWS, dim=1), b.split(ROWS), strict=True):
        total.addmm_(columns.float(), rows.float())
    return total
