"""A matrix copied to its transpose on a CPU: torch's own copy goes item by item."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

from scratchlm.ops import native

SOURCE = Path(__file__).with_name("transpose.cpp")
# The bits of an exponent: all of them are 1 in NaN and infinities.
EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def transpose_into(
    out: Shaped[Tensor, "columns rows"], matrix: Shaped[Tensor, "rows columns"]
) -> bool:
    """Set out = matrixᵀ; return whether all values are finite, which is free on the way."""
    if out.shape != matrix.T.shape:
        raise ValueError(f"out must be {list(matrix.T.shape)}; got {list(out.shape)}")
    if (out.dtype, out.device) != (matrix.dtype, matrix.device):
        same = torch.empty(out.shape, dtype=matrix.dtype, device=matrix.device)
        finite = transpose_into(same, matrix)
        out.copy_(same)
        return finite
    fits = (
        matrix.dtype in EXPONENTS
        and matrix.device.type == "cpu"
        and out.stride(1) == matrix.stride(1) == 1
    )
    library = native.library(SOURCE) if fits else None
    if library is None:
        out.copy_(matrix.T.contiguous())  # a strided copy is slower than two
        return bool(matrix.isfinite().all())
    pointer, number = ctypes.c_void_p, ctypes.c_long
    finite = library.transpose(
        pointer(matrix.data_ptr()),
        number(matrix.stride(0)),
        pointer(out.data_ptr()),
        number(out.stride(0)),
        number(matrix.shape[0]),
        number(matrix.shape[1]),
        number(matrix.element_size()),
        number(EXPONENTS[matrix.dtype]),
    )
    return bool(finite)
