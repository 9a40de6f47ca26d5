"""Where the kernels written for Hopper run.

Products on its tensor cores do at the end of a tile what would be a kernel of its own: SwiGLU's
gate (`kernels/swiglu.py`), the rotation of queries and keys (`kernels/project_heads.py`), the
exponentials of the loss (`kernels/exp_product.py`). Elsewhere cuBLAS multiplies, as it does
wherever there is nothing to do at the end of a tile. Attention over heads of 64 channels trains by
kernels of ours (`kernels/attend.py`, `kernels/attend_back.py`); elsewhere it is cuDNN's. Hopper's
clusters decode (`kernels/project_attend.py`; `model/fused.py` asks). All are in Gluon, which is
experimental: for the versions of Triton they were tried with.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from scratchlm.accelerate.kernels import is_current

VERSIONS = ("3.6", "3.7")
# A result smaller than this leaves some of 132 multiprocessors without a tile of 128 × 128.
LEAST = 132 * 128 * 128
# Attention's backward pass takes heads up to LONGEST tokens whole, where at least such a share of
# the multiprocessors' rounds has one to work on; from CUT tokens on it takes them in blocks of 128
# keys, so many at least for each multiprocessor. Elsewhere cuDNN attends, forward too.
LONGEST, LEAST_BUSY = 2048, 0.75
CUT, LEAST_BLOCKS = 4096, 2


def _is_known() -> bool:
    try:
        return ".".join(version("triton").split(".")[:2]) in VERSIONS
    except PackageNotFoundError:
        return False


_KNOWN = _is_known()


@torch.compiler.assume_constant_result  # a compiler asks once, and does not look inside
def is_hopper(device: int) -> bool:
    """Whether this GPU is one, kernels are launched on it, and Triton is a known one."""
    return _KNOWN and is_current(device) and torch.cuda.get_device_capability(device) == (9, 0)


def takes_gate(x: Tensor, w2: Tensor, dtype: torch.dtype) -> bool:
    """Whether SwiGLU's products are for this input, multiplied in `dtype`."""
    rows, (d, d_ff) = x.shape[:-1].numel(), w2.shape
    whole = rows % 128 == 0 and d % 64 == 0 and d_ff % 8 == 0 and rows > 0
    return whole and dtype == torch.bfloat16 and x.is_cuda and is_hopper(x.device.index)


def takes_tables(cos: Tensor) -> bool:
    """Whether the product that turns queries and keys can read these tables (…, places, pairs)."""
    whole = cos.shape[-1] == 32 and cos.shape[:-1].numel() % 128 == 0 and cos.numel() > 0
    return whole and cos.is_cuda and is_hopper(cos.device.index)


def takes_heads(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether that product is for this input, multiplied in `dtype`; `takes_tables` for its GPU."""
    rows, d = x.shape[:-1].numel(), x.shape[-1]
    return rows % 128 == 0 and d % 64 == 0 and rows > 0 and dtype == torch.bfloat16


def takes_attention(x: Tensor, heads: tuple[int, int]) -> bool:
    """Whether attention's kernels are for this input, which `takes_heads`.

    Where heads are cut, sums are taken in any order: not if runs are to be repeatable.
    """
    batch, seq, _ = x.shape
    if heads[0] != heads[1] or seq % 128 or not _may_attend_at_once():
        return False
    units, many = batch * heads[0], _multiprocessors(x.device.index)
    if seq <= LONGEST:
        return units >= LEAST_BUSY * many * -(-units // many)
    enough = seq >= CUT and units * (seq // 128) >= LEAST_BLOCKS * many
    return enough and not torch.are_deterministic_algorithms_enabled()


@torch.compiler.assume_constant_result
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.compiler.assume_constant_result
def _may_attend_at_once() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()  # else somebody wants another way


def takes_head(rows: Tensor, head: Tensor) -> bool:
    """Whether the product that writes exponentials is for these rows and this head."""
    (count, d), columns = rows.shape, len(head)
    whole = d % 8 == 0 and columns % 8 == 0 and count * columns >= LEAST
    if not (whole and rows.is_cuda and rows.dtype == head.dtype == torch.bfloat16):
        return False
    return is_hopper(rows.device.index)
