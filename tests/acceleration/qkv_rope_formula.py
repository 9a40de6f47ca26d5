"""Formulas for the Hopper kernels of q, k, v, RoPE and attention; on a CPU they stand in for them.

Importing this registers them as the ops' CPU implementations. The RoPE tables are read in the order
in which the kernels' threads hold them.
"""

import torch

from scratchlm.accelerate.kernels.hopper import attention_backward as attention_kernel
from scratchlm.accelerate.kernels.hopper import qkv_rope as qkv_kernel
from scratchlm.accelerate.kernels.triton.qkv_norm_rope import (
    launch_qkv_norm_rope_backward,
    qkv_norm_rope_backward,
)
from scratchlm.ops import reference

LAYOUTS = ("interleaved", "half")
CALLS = []  # of the stand-ins, by name


def random_tables(*shape):
    """Return cos and sin, scaled as some variants of RoPE scale them."""
    angle = torch.randn(*shape)
    return 1.3 * angle.cos(), 1.3 * angle.sin()


def unpack_tables(tables, interleaved):
    """Return cos and sin (positions, 32), looked up where the kernel's threads read them."""
    position, pair = torch.meshgrid(torch.arange(64), torch.arange(32), indexing="ij")
    w, j, q = position // 16, position // 8 % 2, position % 8
    if interleaved:
        g, h, p = pair // 8, pair // 4 % 2, pair % 4
        own = 2 * h + j
    else:
        g, p, e = pair // 8, pair // 2 % 4, pair % 2
        own = 2 * j + e
    thread = 32 * w + 4 * q + p
    return tables.reshape(2, -1, 2048)[..., g * 512 + thread * 4 + own].flatten(1, 2)


def split_heads(qkv, num_heads):
    """Return q, k and v (batch, heads, seq, 64) of (batch, seq, all heads · 64)."""
    heads, kv_heads = num_heads
    by_head = qkv.unflatten(-1, (-1, 64)).transpose(1, 2)
    return by_head.split((heads, kv_heads, kv_heads), dim=1)


def causal_attention(q, k, v):
    """Return attention's output (batch, heads, seq, 64) and the log-sum-exp of the scores."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / 8
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def qkv_attention(x, w, cos, sin, num_heads, layout):
    """Return attention's output (batch, seq, heads · 64) for the layer's input x."""
    q, k, v = split_heads(x @ w.t(), num_heads)
    q, k = (reference.rope(t, cos, sin, layout) for t in (q, k))
    return causal_attention(q, k, v)[0].transpose(1, 2).flatten(2)


def grad_qkv(qkv, attn_out, grad_attn_out, log_sum_exp, cos, sin, layout):
    """Return the gradient of the joined product before RoPE: the kernel's formulas."""
    heads, all_heads = attn_out.shape[-1] // 64, qkv.shape[-1] // 64
    kv_heads = (all_heads - heads) // 2
    q, k, v = split_heads(qkv, (heads, kv_heads))
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    do, o = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in (grad_attn_out, attn_out))
    p = (q @ k.transpose(-1, -2) / 8 - log_sum_exp.reshape(*q.shape[:3], 1)).exp().tril()
    ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) / 8
    dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do
    dq, dk = (reference.rope(d, cos, -sin, layout) for d in (dq, dk))
    dk, dv = (d.unflatten(1, (kv_heads, -1)).sum(2) for d in (dk, dv))
    return torch.cat((dq, dk, dv), dim=1).transpose(1, 2).flatten(2)


# On a CPU


def _qkv_rope_product(x, w, tables, rotated, interleaved):
    CALLS.append("qkv_rope_product")
    cos, sin = unpack_tables(tables, interleaved).to(x.dtype)
    rows = (x @ w.t()).unflatten(-1, (-1, 64)).unflatten(0, (-1, len(cos))).transpose(1, 2)
    layout = "interleaved" if interleaved else "half"
    qk = reference.rope(rows[:, : rotated // 64], cos, sin, layout)
    rows = torch.cat((qk, rows[:, rotated // 64 :]), dim=1)
    return rows.transpose(1, 2).flatten(2).flatten(0, 1)


def _rope_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, interleaved):
    layout = "interleaved" if interleaved else "half"
    dq, dk = (reference.rope(d, cos, -sin, layout) for d in (dq, dk))
    return torch.cat((dq, dk, dv), dim=1).transpose(1, 2).flatten(2), dq.new_zeros(2, 64)


def _cudnn_attention(q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, *debug, scale=None):
    CALLS.append("cudnn_attention")
    assert (bias, compute_log_sumexp, dropout_p, is_causal) == (None, True, 0.0, True)
    attn_out, log_sum_exp = causal_attention(q, k, v)
    none, seq = torch.empty(0), q.shape[2]
    attn_out = attn_out.transpose(1, 2).contiguous().transpose(1, 2)  # laid out as q
    return attn_out, log_sum_exp[..., None], none, none, seq, seq, none, none, none


def _attention_backward(qkv, attn_out, grad_attn_out, log_sum_exp, tables, interleaved):
    CALLS.append("attention_backward")
    cos, sin = unpack_tables(tables, interleaved).to(qkv.dtype)
    if len(cos) > qkv.shape[1]:
        cos, sin = (t.view(len(qkv), 1, -1, 32) for t in (cos, sin))
    layout = "interleaved" if interleaved else "half"
    return grad_qkv(qkv, attn_out, grad_attn_out, log_sum_exp, cos, sin, layout)


qkv_kernel.qkv_rope_product.register_kernel("cpu")(_qkv_rope_product)
attention_kernel.attention_backward.register_kernel("cpu")(_attention_backward)
# Beside a GPU Triton's interpreter is off.
qkv_norm_rope_backward.register_kernel("cpu")(
    _rope_backward if torch.cuda.is_available() else launch_qkv_norm_rope_backward
)
_ATEN = torch.library.Library("aten", "IMPL")
_ATEN.impl("_scaled_dot_product_cudnn_attention", _cudnn_attention, "CPU")
