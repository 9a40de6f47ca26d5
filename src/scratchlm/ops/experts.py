"""The products of a mixture of experts at speed: one grouped product for all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from scratchlm.ops.ranges import can_look


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y = W_g x, with a matrix for each group of rows; group g ends before row `ends[g]`."""
    device = x.device.type
    if device in ("cuda", "cpu") and torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        x, weight = x.to(low), weight.to(low)
    if _supports_grouped_mm(x, weight):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    if can_look(ends):
        groups = x.tensor_split(ends[:-1].long())
        products = [F.linear(rows, w) for rows, w in zip(groups, weight, strict=True)]
        return torch.cat(products)
    # The sizes of the groups cannot be read here: every matrix multiplies all rows, and a row
    # keeps the product of its own group.
    row = torch.arange(len(x), device=x.device)[:, None]
    out = x.new_zeros(len(x), weight.shape[1])
    for end, matrix in zip(reversed(ends.unbind()), reversed(weight.unbind()), strict=True):
        out = torch.where(row < end, F.linear(x, matrix), out)
    return out


def _supports_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether the grouped product takes this dtype, with rows that start on 16 bytes."""
    kinds = {torch.bfloat16}
    if can_look(x):  # neither traced nor on another device, where it takes bfloat16 alone
        kinds |= {torch.float32, torch.float16}
    aligned = all(width * weight.element_size() % 16 == 0 for width in weight.shape[-2:])
    return x.dtype in kinds and aligned
