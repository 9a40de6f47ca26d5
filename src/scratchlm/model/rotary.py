"""Rotary positions: the frequencies, the tables, and the two layouts in use in the world.

Channel pair i of a query or key at position p is rotated by the angle p · θ^(−2i/d), so that the
product of a query and a key depends only on the distance between them (arXiv:2104.09864).

`interleaved` pairs the channels (0,1), (2,3), …; `half` pairs (i, i + d/2). A model of one layout
becomes the same model in the other by permuting the rows of its query and key weights.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.config import LinearScaling, Llama3Scaling, NTKScaling, RopeScaling, YarnScaling
from scratchlm.model.layers import TABLE_ELEMENTS, PositionTables
from scratchlm.ops import Ops, get_ops
from scratchlm.ops.ranges import check_range

Layout = Literal["interleaved", "half"]


def rotary_frequencies(
    d_k: int,
    theta: float,
    scaling: RopeScaling | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, " half"]:
    """Return θ^(−2i/d) for every pair i, stretched as `scaling` says."""
    exponent = torch.arange(0, d_k, 2, device=device, dtype=torch.float32) / d_k
    if isinstance(scaling, NTKScaling):
        theta = theta * scaling.factor ** (d_k / (d_k - 2))
    frequency = 1.0 / theta**exponent
    match scaling:
        case LinearScaling():
            return frequency / scaling.factor
        case YarnScaling():
            return _yarn(frequency, d_k, theta, scaling)
        case Llama3Scaling():
            return _llama3(frequency, scaling)
        case NTKScaling() | None:
            return frequency
        case _:
            assert_never(scaling)


def _yarn(frequency: Tensor, d_k: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Keep the fast pairs, stretch the slow ones, and ramp between."""  # arXiv:2309.00071 eq. 23

    def pair_that_rotates(times: float) -> float:
        span = scaling.original_context_length / (times * 2 * math.pi)
        return d_k * math.log(span) / (2 * math.log(theta))

    low, high = pair_that_rotates(scaling.beta_fast), pair_that_rotates(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_k - 1)
    pair = torch.arange(d_k // 2, device=frequency.device, dtype=torch.float32)
    stretched = ((pair - low) / (high - low or 0.001)).clamp(0, 1)
    return frequency * (1 - stretched) + frequency / scaling.factor * stretched


def _llama3(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide by `factor` the pairs whose wavelength is beyond the original context."""
    wavelengths_in_context = scaling.original_context_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((wavelengths_in_context - low) / (high - low)).clamp(0, 1)
    return frequency * kept + frequency / scaling.factor * (1 - kept)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return what YaRN multiplies both tables by: attention's temperature, folded in."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


class RotaryEmbedding(PositionTables):
    """Rotate queries and keys by their position; tables are float32 whatever the model's dtype."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        theta: float,
        d_k: int,
        max_seq_len: int,
        layout: Layout = "interleaved",
        scaling: RopeScaling | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,  # accepted as everywhere; the tables stay float32
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        if d_k % 2:
            raise ValueError(f"d_k must be even to rotate pairs of channels; got d_k={d_k}")
        if layout not in ("interleaved", "half"):
            raise ValueError(f"layout must be one of interleaved, half; got layout={layout!r}")
        self.ops = get_ops(ops)
        self.theta, self.d_k, self.max_seq_len = theta, d_k, max_seq_len
        self.layout, self.scaling = layout, scaling
        self._build(device)

    def _build(self, device: torch.device | str | None) -> None:
        rows = min(self.max_seq_len, TABLE_ELEMENTS // self.d_k)
        if device is not None and torch.device(device).type == "meta":
            # No values: and arithmetic on meta tensors costs seconds of imports, the first time.
            cos, sin = (torch.empty(rows, self.d_k // 2, device=device) for _ in range(2))
        else:
            cos, sin = self._at(torch.arange(rows, device=device))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequency = rotary_frequencies(self.d_k, self.theta, self.scaling, positions.device)
        angle = positions[..., None] * frequency  # (…, half)
        factor = attention_factor(self.scaling)
        return angle.cos() * factor, angle.sin() * factor

    def tables(
        self, positions: Int[Tensor, "*positions seq"] | range
    ) -> tuple[Float[Tensor, "*positions seq half"], Float[Tensor, "*positions seq half"]]:
        """Return cos and sin at these positions; a range of consecutive ones gathers nothing."""
        if isinstance(positions, range):
            rows = slice(positions.start, positions.stop)
            if positions.stop <= len(self.cos):
                return self.cos[rows], self.sin[rows]
            positions = torch.arange(rows.start, rows.stop, device=self.cos.device)
        check_range(positions, self.max_seq_len, "position")
        whole = len(self.cos) == self.max_seq_len
        return (self.cos[positions], self.sin[positions]) if whole else self._at(positions)

    def forward(
        self,
        x: Float[Tensor, "*batch seq d"],
        token_positions: Int[Tensor, "*positions seq"] | range,
    ) -> Float[Tensor, "*batch seq d"]:
        """Rotate x, whose second last dimension is the sequence, by its positions."""
        if x.shape[-1] != self.d_k:
            raise ValueError(f"RoPE: the last dimension must be {self.d_k}; got {x.shape[-1]}")
        cos, sin = self.tables(token_positions)
        if cos.shape[-2] != x.shape[-2]:
            got = f"{cos.shape[-2]} for a sequence of {x.shape[-2]}"
            raise ValueError(f"token_positions must name one position per element; got {got}")
        if 2 < cos.ndim == x.ndim - 1:  # positions by row: the same for all heads of a row
            cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
        return self.ops.rope(x, cos, sin, self.layout)
