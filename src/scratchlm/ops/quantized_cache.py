"""Keys and values in 8 bits: one scale for every token and head.

    s = max_d |x_d| / M        c_d = round(x_d / s)        x̂_d = c_d · s

M is the largest number of the format: 127 of int8, whose codes are whole numbers; 448 of fp8
(e4m3: a sign, 4 bits of exponent, 3 of mantissa). Rounding is to the nearest, ties to even. A row
of zeros has the scale 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

KVDtype = Literal["int8", "fp8"]
DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(
    x: Float[Tensor, "*rows d"], dtype: torch.dtype
) -> tuple[Shaped[Tensor, "*rows d"], Float[Tensor, " *rows"]]:
    """Return the codes of rows, in `dtype`, and their scales in float32."""
    x = x.float()
    scale = x.abs().amax(dim=-1) / LARGEST[dtype]
    codes = torch.where(scale[..., None] == 0, 0.0, x / scale[..., None])
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def dequantize_rows(
    codes: Shaped[Tensor, "*rows d"], scale: Float[Tensor, " *rows"]
) -> Float[Tensor, "*rows d"]:
    """Return the rows that codes and scales stand for, in float32."""
    return codes.float() * scale[..., None]
