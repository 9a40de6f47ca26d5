"""A matrix copied to its transpose on a CPU: torch's own copy goes item by item."""

from __future__ import annotations

import ctypes
from pathlib import Path

from jaxtyping import Shaped
from torch import Tensor

from scratchlm.ops import native

SOURCE = Path(__file__).with_name("transpose.cpp")


def transpose_into(
    out: Shaped[Tensor, "columns rows"], matrix: Shaped[Tensor, "rows columns"]
) -> None:
    """Set out = matrixᵀ."""
    size = matrix.element_size()
    fits = (
        out.dtype == matrix.dtype
        and size in (2, 4)
        and out.device.type == matrix.device.type == "cpu"
        and out.stride(1) == matrix.stride(1) == 1
    )
    library = native.library(SOURCE) if fits else None
    if library is None:
        out.copy_(matrix.T.contiguous())  # a strided copy is slower than two
        return
    if out.shape != matrix.T.shape:
        raise ValueError(f"out must be {list(matrix.T.shape)}; got {list(out.shape)}")
    pointer, number = ctypes.c_void_p, ctypes.c_long
    library.transpose(
        pointer(matrix.data_ptr()),
        number(matrix.stride(0)),
        pointer(out.data_ptr()),
        number(out.stride(0)),
        number(matrix.shape[0]),
        number(matrix.shape[1]),
        number(size),
    )
