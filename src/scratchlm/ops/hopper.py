"""Where the products written for Hopper's tensor cores run, and the plain one of them.

    y = x Wᵀ (+ onto),    ∂x = ∂y W by the same kernel,    ∂W = ∂yᵀ x by cuBLAS

The kernels (`kernels/turns.py`, `products.py`, `swiglu.py`, `exp_product.py`) are in Gluon, which
is experimental: they are for the versions of Triton they were tried with. Elsewhere cuBLAS
multiplies, and what they do at the end of a tile is a kernel of its own.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

VERSIONS = ("3.6", "3.7")
# Results smaller than this leave some of 132 multiprocessors without a tile of 128 × 128.
LEAST = 132 * 128 * 128


def _is_known() -> bool:
    try:
        return ".".join(version("triton").split(".")[:2]) in VERSIONS
    except PackageNotFoundError:
        return False


_KNOWN = _is_known()


@torch.compiler.assume_constant_result  # a compiler asks once, and does not look inside
def is_hopper(device: int) -> bool:
    """Whether this GPU is one, and Triton a known one."""
    return _KNOWN and torch.cuda.get_device_capability(device) == (9, 0)


def takes(x: Tensor, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernels are for x and a matrix of `columns` outputs, multiplied in `dtype`."""
    rows, d = x.shape[:-1].numel(), x.shape[-1]
    whole = d % 8 == 0 and columns % 8 == 0 and rows * min(d, columns) >= LEAST
    return whole and dtype == torch.bfloat16 and x.is_cuda and is_hopper(x.device.index)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """W x for x of any shape, both in bfloat16, where `takes` says so."""
    from scratchlm.ops.kernels.products import product as by_kernel

    y: Tensor = by_kernel(x.reshape(-1, x.shape[-1]), weight, None)
    return y.view(*x.shape[:-1], len(weight))
