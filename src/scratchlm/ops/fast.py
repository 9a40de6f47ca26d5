"""The same names and signatures as `ops/reference.py`, as fast as the machine allows.

An op stands here, or in a file of its own beside this one (`attention.py`, `experts.py`,
`loss.py`), only where it is faster than its reference; the others are the reference's own.
`tests/ops/test_fast_matches_reference.py` holds every one of them to the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels import launches_for
from scratchlm.ops import loss
from scratchlm.ops import swiglu as products_with_gate
from scratchlm.ops.ranges import can_look, counted_targets

# On a CPU, a product of few rows with a matrix this large is bound by reading the matrix, and
# torch's own leaves that to one core. Cut into row blocks, two for each thread, it is read at the
# memory's full speed: 1.3 to 2.5 times as fast.
BLOCKS_FROM = 1 << 17  # elements of the matrix
BLOCKS_UP_TO = 64  # rows of x
AS_COLUMNS = range(2, 6)  # rows of x for which W xᵀ is faster than x Wᵀ


def trains_by_kernel(x: Tensor) -> bool:
    """Whether the kernels with a backward pass of their own are for this input."""
    return torch.is_grad_enabled() and x.dtype != torch.float64 and launches_for(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W x (+ b)."""
    if weight.numel() >= BLOCKS_FROM and x.is_cpu and not torch.compiler.is_compiling():
        rows = x.shape[:-1].numel()
        single = x.dtype is weight.dtype is torch.float32
        if rows <= BLOCKS_UP_TO and single and weight.is_contiguous():
            y = _linear_by_blocks(x.reshape(rows, x.shape[-1]), weight)
            y = y.view(*x.shape[:-1], len(weight))
            return y if bias is None else y + bias
    twin = twin_of((weight,))
    return F.linear(x, weight if twin is None else twin, bias)


def twin_of(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the rounded copy that training keeps of these matrices together, if it does."""
    twin: Tensor | None = getattr(weights[0], "twin", None)
    whole = twin is not None and len(twin) == sum(len(weight) for weight in weights)
    return twin if whole else None


def _linear_by_blocks(x: Tensor, weight: Tensor) -> Tensor:
    (rows, d_in), d_out = x.shape, len(weight)
    num_blocks = math.gcd(d_out, 2 * torch.get_num_threads())
    blocks = weight.view(num_blocks, -1, d_in)
    if rows in AS_COLUMNS:
        y = torch.bmm(blocks, x.t().expand(num_blocks, d_in, rows))  # (block, d_out / blocks, rows)
        return y.view(d_out, rows).t()
    y = torch.bmm(x.expand(num_blocks, rows, d_in), blocks.mT)  # (block, rows, d_out / blocks)
    return y.transpose(0, 1).reshape(rows, d_out)


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Several maps of one input, in one product where that is cheaper.

    Where it trains on a GPU, or keeps a twin of them, the matrices are joined. Where it does not
    train, those that lie one after the other in memory (`side_by_side`) are read as one matrix.
    """
    if torch.is_grad_enabled():
        if x.is_cuda or twin_of(weights) is not None:
            joined = joined_product(x, weights, biases)
            return joined.split([len(weight) for weight in weights], dim=-1)
    elif x.is_cpu and not torch.compiler.is_compiling() and not any(b is not None for b in biases):
        whole = as_one_matrix(weights)
        if whole is not None:
            return linear(x, whole).split([len(weight) for weight in weights], dim=-1)
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def as_one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix that these are the row blocks of, if they lie so in memory."""
    first = weights[0]
    place, rows = first.data_ptr(), 0
    for weight in weights:
        if weight.data_ptr() != place or not weight.is_contiguous():
            return None
        place += weight.nbytes
        rows += len(weight)
    ends = (first.storage_offset() + rows * first.shape[1]) * first.element_size()
    if first.untyped_storage().nbytes() < ends:  # neighbours by chance
        return None
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def in_one(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the matrices one below the other: their twin, or a copy in `dtype`.

    Joining costs nothing then: the cast that autocast makes anyway writes elsewhere.
    """
    twin = twin_of(weights)
    if twin is not None:
        return twin
    parts = [part.to(dtype) for part in weights]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def low_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that x is multiplied in."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def joined_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """[W₁ x; W₂ x; …] in one product."""
    weight = in_one(weights, low_dtype(x))
    bias = None
    if any(part is not None for part in biases):
        parts = zip(weights, biases, strict=True)
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in parts])
    return F.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    """Row `id` of the table, for every id."""
    return _looked_up(ids, weight, padding_id, weight.dtype)


def low_embedding(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    """The same rows; where a kernel writes them, rounded as autocast would for a product."""
    return _looked_up(ids, weight, padding_id, low_dtype(weight))


def _looked_up(ids: Tensor, weight: Tensor, padding_id: int | None, dtype: torch.dtype) -> Tensor:
    if not looks_up_by_kernel(ids, weight):
        return F.embedding(ids, weight, padding_idx=padding_id)
    from scratchlm.accelerate.kernels.triton.embedding import Lookup

    return Lookup.apply(ids, weight, padding_id, dtype)


def looks_up_by_kernel(ids: Tensor, weight: Tensor) -> bool:
    """Whether the table learns, and the kernels read it and these ids right."""
    learns = trains_by_kernel(weight) and weight.requires_grad
    if not learns or torch.compiler.is_compiling():
        return False
    whole = ids.dtype in (torch.int32, torch.int64) and ids.device == weight.device
    return whole and weight.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x²) + ε) · g."""
    by_kernel = trains_by_kernel(x) and not torch.compiler.is_compiling()
    if by_kernel and x.is_contiguous() and _is_readable(weight, x):
        from scratchlm.accelerate.kernels.triton.rms_norm import Norm

        return Norm.apply(x, weight, eps)
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        if can_look(x) and x.numel():  # on a CPU, not traced
            if torch.is_grad_enabled():
                return _RMSNorm.apply(x, weight, eps)
            return _scaled(x, weight, eps)[0]
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _is_readable(gain: Tensor, x: Tensor) -> bool:
    """Whether kernels, which see addresses, read this gain of x right."""
    return gain.is_contiguous() and gain.shape == x.shape[-1:]


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
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor, None]:
        # With h = x·s, d of them, and u = above·g:  ∂x = s·(u − h·mean(u·h)). LayerNorm's kernel,
        # told that the mean of x is 0, gives s·(u − mean(u) − h·mean(u·h)): mean(u) is put back.
        x, weight, scale = ctx.saved_tensors
        zero = torch.zeros_like(scale)
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            above, x, weight.shape, zero, scale, weight, None, [True, True, False]
        )
        mean = (above @ weight).unsqueeze(-1) / len(weight)
        return torch.addcmul(of_x, mean, scale), of_weight, None


def add_norm(x: Tensor, delta: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + δ and its RMSNorm, by one kernel where a GPU trains."""
    if not (trains_by_kernel(x) and x.shape == delta.shape and _is_readable(gain, x)):
        total = x + delta
        return total, rms_norm(total, gain, eps)
    from scratchlm.accelerate.kernels.triton.rms_norm import add_norm as by_kernel

    # What the norm feeds is products: where autocast would round it for them, it is written so.
    total, normed = by_kernel(x, delta, gain, eps, low_dtype(x))
    return total, normed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / sqrt(var + ε) · g + b."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
}


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Mean of log Σ exp(logits) − logits[target] over the targets that count."""
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


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """The head and the loss, slice by slice; on a GPU a compiler joins them its own way."""
    if torch.compiler.is_compiling() and not loss.compiles_closed(hidden, weight):
        logits = F.linear(hidden, weight)
        return cross_entropy(
            logits, targets, ignore_index=ignore_index, z_loss=z_loss, reduction=reduction
        )
    return loss.linear_cross_entropy(
        hidden, weight, targets, ignore_index=ignore_index, z_loss=z_loss, reduction=reduction
    )


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: Literal["interleaved", "half"] = "interleaved",
) -> Tensor:
    """Turn each pair of channels by its angle."""
    if x.ndim == 4 and trains_by_kernel(x):
        from scratchlm.accelerate.kernels.triton.rope import turn

        return turn(x, cos, sin, layout == "interleaved", False)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if layout == "half":  # x ⊙ (cos, cos) + (second half, first half) ⊙ (−sin, sin)
        swapped = wide.roll(cos.shape[-1], dims=-1)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
    if torch.compiler.is_compiling():  # compilers do not take complex numbers
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    by = torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
    return torch.view_as_real(_as_complex(wide) * by).flatten(-2).to(x.dtype)


def _as_complex(x: Tensor) -> Tensor:
    """Read neighbouring channels as one complex number, without a copy where memory allows."""
    *strides, last = x.stride()
    if last != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in strides):
        x = x.contiguous()
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
) -> Tensor:
    """W2(SiLU(W1 x) ⊙ W3 x)."""
    if trains_by_kernel(x):
        low, biased = low_dtype(x), any(bias is not None for bias in (b1, b2, b3))
        if not biased and hopper.takes_gate(x, w2, low):
            w13, w2 = in_one((w1, w3), low), in_one((w2,), low)
            return products_with_gate.swiglu(x.to(low), w13, w2)
        return linear(gate(joined_product(x, (w1, w3), (b1, b3))), w2, b2)
    gated, up = linears(x, (w1, w3), (b1, b3))
    return linear(F.silu(gated) * up, w2, b2)


def gate(joined: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second half."""
    if trains_by_kernel(joined):
        from scratchlm.accelerate.kernels.triton.swiglu_gate import gate as by_kernel

        return by_kernel(joined)
    a, b = joined.chunk(2, dim=-1)
    return F.silu(a) * b


def mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "gelu_tanh",
) -> Tensor:
    """W2 act(W1 x)."""
    return linear(ACTIVATIONS[activation](linear(x, w1, b1)), w2, b2)
