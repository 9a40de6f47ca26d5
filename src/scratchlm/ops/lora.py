"""Low-rank adapters as formulas: the matrix that W, A and B stand for together.

LoRA   W' = W + s B A                                              arXiv:2106.09685, section 4.1
DoRA   W' = m ⊙ V / ‖V‖,  V = W + s B A, ‖·‖ of each row           arXiv:2402.09353, eq. 5
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Matrix = Float[Tensor, "d_out d_in"]


def row_norms(
    weight: Matrix, a: Float[Tensor, "r d_in"], b: Float[Tensor, "d_out r"], scale: float
) -> Float[Tensor, " d_out"]:
    """Return ‖W + s B A‖ of each row: of the weights that lead to one output."""
    return torch.linalg.vector_norm(weight + scale * (b @ a), dim=1)


def merged_weight(
    weight: Matrix,
    a: Float[Tensor, "r d_in"],
    b: Float[Tensor, "d_out r"],
    scale: float,
    magnitude: Float[Tensor, " d_out"] | None = None,
) -> Matrix:
    """Return the one matrix that does what W and its adapter do, in W's dtype.

    Summed in float32 at least: a bfloat16 W takes up a small change only where it is rounded once.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    joined = weight.to(wide) + scale * (b @ a)
    if magnitude is not None:
        norms = row_norms(weight.to(wide), a, b, scale)
        joined = joined * (magnitude.to(wide) / norms)[:, None]
    return joined.to(weight.dtype)
