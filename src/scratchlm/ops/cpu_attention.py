"""Causal attention on a CPU by our own kernel, as operations a compiler does not open.

    O = softmax(Q Kᵀ / √d_head) V       every token over itself and its past

`kernels/attention.cpp` has the formulas and the loops. Results lie in memory as (batch, seq, heads,
d_head): to merge the heads afterwards, or to give a product its gradient, copies nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scratchlm.ops import native
from scratchlm.ops.masks import are_groups


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "seq", "width")]


class _View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "row")),
    ]


def _call(name: str, q: Tensor, k: Tensor, *arguments: Tensor) -> None:
    """Call the kernel; four dimensions are passed with their strides, three as they lie."""
    batch, heads, seq, width = q.shape
    key_heads = k.shape[1]
    passed: list[Any] = [ctypes.byref(_Sizes(batch, heads, key_heads, seq, width))]
    for x in (q, k, *arguments):
        if x.ndim == 4:
            passed.append(ctypes.byref(_View(x.data_ptr(), *x.stride()[:3])))
        else:
            passed.append(ctypes.c_void_p(x.data_ptr()))
    library = native.library()
    assert library is not None, native.why_not()
    if getattr(library, name)(*passed, ctypes.c_int(torch.get_num_threads())):
        raise MemoryError(f"attention over {seq} tokens")


def _by_tokens(x: Tensor) -> Tensor:
    """Return room for a tensor like x, its heads side by side in memory."""
    batch, heads, seq, width = x.shape
    return x.new_empty(batch, seq, heads, width).transpose(1, 2)


def _readable(*tensors: Tensor) -> Sequence[Tensor]:
    """Return the tensors, channels one after the other."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what the kernel, which sees addresses, would read wrong."""
    if not (are_groups(q, k, v) and q.dtype == k.dtype == v.dtype == torch.float32):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"queries, keys and values in float32 must fit each other; got {shapes}")


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return O and, for the backward pass, every row's log₂ Σ 2^(score · log₂e)."""
    _check(q, k, v)
    q, k, v = _readable(q, k, v)
    out, lse = _by_tokens(q), q.new_empty(q.shape[:3])
    _call("attend", q, k, v, out, lse)
    return out, lse


def _causal_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    _check(q, k, v)
    if not q.shape == out.shape == grad_output.shape or lse.shape != q.shape[:3]:
        raise ValueError(f"output and gradient must be like the queries, {tuple(q.shape)}")
    q, k, v, out, grad_output = _readable(q, k, v, out, grad_output)
    gradients = _by_tokens(q), _by_tokens(k), _by_tokens(v)
    _call("attend_back", q, k, v, out, lse.contiguous(), grad_output, *gradients)
    return gradients


causal_attention = torch.library.custom_op(
    "scratchlm::causal_attention", _causal_attention, mutates_args=(), device_types="cpu"
)
causal_attention_backward = torch.library.custom_op(
    "scratchlm::causal_attention_backward",
    _causal_attention_backward,
    mutates_args=(),
    device_types="cpu",
)


@causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _by_tokens(q), q.new_empty(q.shape[:3])


@causal_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_tokens(q), _by_tokens(k), _by_tokens(v)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


@once_differentiable
def _backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = causal_attention_backward(
        *ctx.saved_tensors, grad_output
    )
    return gradients


causal_attention.register_autograd(_backward, setup_context=_setup_context)
