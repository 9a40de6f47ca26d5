"""On a CPU, the formula for the product that turns queries and keys, and for its backward pass.

It reads its tables from the order that the kernel's threads hold them in.
"""

import torch

from scratchlm.accelerate.kernels.hopper import qkv_rope as project_heads
from scratchlm.accelerate.kernels.triton import qkv_norm_rope as heads
from scratchlm.ops import reference

LAYOUTS = ("interleaved", "half")
CALLS = []  # of the product


def tables_of(lines, interleaved):
    """Return cos and sin (places, 32), each number looked up where the kernel's thread reads it."""
    place, pair = torch.meshgrid(torch.arange(64), torch.arange(32), indexing="ij")
    w, j, q = place // 16, place // 8 % 2, place % 8
    if interleaved:
        g, h, p = pair // 8, pair // 4 % 2, pair % 4
        own = 2 * h + j
    else:
        g, p, e = pair // 8, pair // 2 % 4, pair % 2
        own = 2 * j + e
    thread = 32 * w + 4 * q + p
    return lines.reshape(2, -1, 2048)[..., g * 512 + thread * 4 + own].flatten(1, 2)


def product(x, w, lines, turned, interleaved):
    CALLS.append("product")
    cos, sin = tables_of(lines, interleaved).to(x.dtype)
    rows = (x @ w.t()).unflatten(-1, (-1, 64)).unflatten(0, (-1, len(cos))).transpose(1, 2)
    some = rows[:, : turned // 64]
    layout = "interleaved" if interleaved else "half"
    some = reference.rope(some, cos, sin, layout)
    rows = torch.cat((some, rows[:, turned // 64 :]), dim=1)
    return rows.transpose(1, 2).flatten(2).flatten(0, 1)


def turn_back(dq, dk, dv, joined, cos, sin, q_gain, k_gain, eps, interleaved):
    layout = "interleaved" if interleaved else "half"
    dq, dk = (reference.rope(d, cos, -sin, layout) for d in (dq, dk))
    return torch.cat((dq, dk, dv), dim=1).transpose(1, 2).flatten(2), dq.new_zeros(2, 64)


project_heads._turned_product.register_kernel("cpu")(product)
# Beside a GPU nothing interprets kernels on the CPU.
on_cpu = turn_back if torch.cuda.is_available() else heads.heads_backward
heads.turn_heads_back.register_kernel("cpu")(on_cpu)


def angles(*shape):
    angle = torch.randn(*shape)
    return 1.3 * angle.cos(), 1.3 * angle.sin()  # stretched, as some scalings of RoPE have it
