"""Where the kernels written for Hopper run.

Their products on tensor cores have fused epilogues: SwiGLU's gate (`kernels/hopper/swiglu.py`),
RoPE on queries and keys (`qkv_rope.py`), the exponentials of the loss (`lm_head_exp.py`). A product
without an epilogue is cuBLAS's. Attention over heads of 64 goes backward by a kernel of ours
(`attention_backward.py`); forward, and elsewhere, it is cuDNN's. Clusters of thread blocks decode
(`decode_qkv_attention.py`). All are in Gluon, which is experimental: they run with the versions of
Triton they were tried with.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from scratchlm.accelerate.kernels import is_current
from scratchlm.ops.ranges import constant_in_graphs

VERSIONS = ("3.6", "3.7")
HEAD = 64  # channels of a head
# A result smaller than this leaves some of 132 multiprocessors without a tile of 128 × 128.
MIN_LOGITS = 132 * 128 * 128
# Attention's backward pass takes whole heads up to MAX_WHOLE_HEAD tokens, where at least such a
# share of the multiprocessors' rounds has one to work on; from MIN_SPLIT_HEAD tokens on it takes
# blocks of 128 keys, so many at least for each multiprocessor. Elsewhere cuDNN's is faster.
MAX_WHOLE_HEAD, MIN_OCCUPANCY = 2048, 0.75
MIN_SPLIT_HEAD, MIN_BLOCKS = 4096, 2


def _is_known() -> bool:
    try:
        return ".".join(version("triton").split(".")[:2]) in VERSIONS
    except PackageNotFoundError:
        return False


_KNOWN = _is_known()


@constant_in_graphs  # a compiler asks once, and does not look inside
def is_hopper(device: int) -> bool:
    """Whether this GPU is one, kernels are launched on it, and Triton is a known one."""
    return _KNOWN and is_current(device) and torch.cuda.get_device_capability(device) == (9, 0)


def _why_not_here(x: Tensor) -> str | None:
    return None if x.is_cuda and is_hopper(x.device.index) else "no Hopper GPU with a known Triton"


def why_no_swiglu(x: Tensor, w2: Tensor, dtype: torch.dtype) -> str | None:
    """Return why SwiGLU's products are not for this input, multiplied in `dtype`."""
    rows, (d, d_ff) = x.shape[:-1].numel(), w2.shape
    if dtype != torch.bfloat16:
        return "products are not in bfloat16"
    if rows % 128 or d % 64 or d_ff % 8 or rows == 0:
        return "tokens no multiple of 128, d_model of 64, or d_ff of 8"
    return _why_not_here(x)


def supports_rope_tables(cos: Tensor) -> bool:
    """Whether the QKV product's epilogue can read these tables (…, positions, pairs)."""
    whole = cos.shape[-1] == HEAD // 2 and cos.shape[:-1].numel() % 128 == 0 and cos.numel() > 0
    return whole and _why_not_here(cos) is None


def why_no_qkv_rope(x: Tensor, dtype: torch.dtype) -> str | None:
    """Return why the QKV product with RoPE is not for this input, multiplied in `dtype`."""
    rows, d = x.shape[:-1].numel(), x.shape[-1]
    if dtype != torch.bfloat16:
        return "products are not in bfloat16"
    if rows % 128 or d % 64 or rows == 0:
        return "tokens no multiple of 128, or d_model of 64"
    return _why_not_here(x)


def why_no_attention(x: Tensor, num_heads: tuple[int, int]) -> str | None:
    """Return why attention's backward kernel is not for this input, which the QKV product takes.

    Where heads are split, sums are taken in any order: not if runs are to be repeatable.
    """
    batch, seq, _ = x.shape
    if seq % 128:
        return "a sequence that is no multiple of 128"
    if not _cudnn_is_enabled():
        return "cuDNN's attention, which goes forward, is switched off"
    units, many = batch * num_heads[0], _multiprocessors(x.device.index)
    if seq <= MAX_WHOLE_HEAD:
        full = units >= MIN_OCCUPANCY * many * -(-units // many)
        return None if full else f"{units} heads do not fill {many} multiprocessors"
    if torch.are_deterministic_algorithms_enabled():
        return "heads this long are summed in any order, and runs are to be repeatable"
    full = seq >= MIN_SPLIT_HEAD and units * (seq // 128) >= MIN_BLOCKS * many
    return None if full else "heads too few or too short to split"


@constant_in_graphs
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@constant_in_graphs
def _cudnn_is_enabled() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


def supports_lm_head_exp(rows: Tensor, head: Tensor) -> bool:
    """Whether the product that writes exponentials of logits is for these rows and this head."""
    (count, d), columns = rows.shape, len(head)
    whole = d % 8 == 0 and columns % 8 == 0 and count * columns >= MIN_LOGITS
    low = rows.dtype == head.dtype == torch.bfloat16
    return whole and low and _why_not_here(rows) is None
