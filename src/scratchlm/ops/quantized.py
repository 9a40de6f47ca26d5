"""Weights in few bits: each format by its formula, in plain tensor arithmetic.

A matrix (rows, d_in) is stored as bytes (rows, bytes_per_row): every row is a sequence of blocks,
every block a few scales and the small whole numbers q they multiply.

    q8_0   32 weights     w = d · q            q in −127 … 127
    q4_0   32 weights     w = d · (q − 8)      q in 0 … 15
    q4_k   8 × 32         w = d · s · q − m · t        q in 0 … 15;  s, t in 0 … 63, of each 32
    q6_k   16 × 16        w = d · s · (q − 32)         q in 0 … 63;  s in −128 … 127, of each 16
    nf4    64 weights     w = d · table[q]     quantiles of a normal (arXiv:2305.14314)
    int8   a row          w = d · q
    fp8    a row          w = d · q            q in float8_e4m3

The scales d and m of a block are float16, those of a row float32. The first four are GGUF's, byte
by byte, and in a product with them the other factor is rounded too, to 8 bits in groups of 32:

    y = Σ_blocks d_w · d_x · Σ q_w · q_x
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from scratchlm.ops.quantized_search import search_q4_k, search_q6_k

ACTIVATION_BLOCK = 32
# Weights quantised together: what a search computes stays in a CPU's cache, or fills a GPU.
_AT_ONCE = {False: 1 << 17, True: 1 << 22}
_FP8 = torch.float8_e4m3fn

Blocks = Float[Tensor, "blocks weights"]
Packed = UInt8[Tensor, "blocks bytes"]


@dataclass(frozen=True)
class Format:
    """How a block of weights becomes bytes, and bytes become weights."""

    name: str
    block_size: int  # weights of a block; 0: a whole row
    block_bytes: int  # of a block; of a row: besides one byte a weight
    pack: Callable[[Blocks], Packed]
    unpack: Callable[[Packed], Blocks]
    int8_activations: bool = False  # whether products are of whole numbers

    def fits(self, d_in: int) -> bool:
        """Say whether rows of `d_in` weights are whole blocks."""
        return d_in > 0 and (self.block_size == 0 or d_in % self.block_size == 0)

    def bytes_per_row(self, d_in: int) -> int:
        """Return what a row of `d_in` weights takes."""
        if not self.fits(d_in):
            raise ValueError(f"{self.name} takes rows of {self.block_size} weights; got {d_in}")
        return d_in // self.block_size * self.block_bytes if self.block_size else d_in + 4

    def weights_per_row(self, row_bytes: int) -> int:
        """Return how many weights a row of bytes holds."""
        if self.block_size == 0:
            return row_bytes - 4
        return row_bytes // self.block_bytes * self.block_size


def quantize(
    weight: Float[Tensor, "rows d_in"], format: str | Format
) -> UInt8[Tensor, "rows bytes"]:
    """Store a matrix in a format."""
    kind = get_format(format)
    rows, d_in = weight.shape
    out = weight.new_empty((rows, kind.bytes_per_row(d_in)), dtype=torch.uint8)
    step = max(1, _AT_ONCE[weight.is_cuda] // d_in)
    for first in range(0, rows, step):
        part = weight[first : first + step].float()
        if not torch.isfinite(part).all():
            raise ValueError(f"{kind.name}: weights must be finite")
        blocks = part.reshape(-1, kind.block_size or d_in)
        out[first : first + step] = kind.pack(blocks).reshape(len(part), -1)
    return out


def dequantize(
    packed: UInt8[Tensor, "rows bytes"], format: str | Format
) -> Float[Tensor, "rows d_in"]:
    """Return the matrix that the bytes stand for, in float32."""
    kind = get_format(format)
    blocks = packed.reshape(-1, kind.block_bytes if kind.block_size else packed.shape[1])
    return kind.unpack(blocks).reshape(len(packed), -1)


def quantize_activations(
    x: Float[Tensor, "*batch d_in"],
) -> tuple[Int8[Tensor, "*batch d_in"], Float[Tensor, "*batch blocks"]]:
    """Round each 32 numbers to d · q with q in −127 … 127, halves to even."""
    blocks = x.float().unflatten(-1, (-1, ACTIVATION_BLOCK))
    largest = blocks.abs().amax(dim=-1)
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    q = torch.round(blocks * inverse[..., None]).to(torch.int8)
    return q.flatten(-2), largest / 127


def rounded(x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_in"]:
    """Return x̂, what is left of x in 8 bits."""
    q, scale = quantize_activations(x)
    return (q.unflatten(-1, (-1, ACTIVATION_BLOCK)) * scale[..., None]).flatten(-2).to(x.dtype)


def quantized_linear(
    x: Float[Tensor, "*batch d_in"],
    packed: UInt8[Tensor, "d_out bytes"],
    format: str | Format,
    bias: Float[Tensor, " d_out"] | None = None,
    int8_activations: bool | None = None,
) -> Float[Tensor, "*batch d_out"]:
    """y = Ŵ x̂ (+ b), with x̂ in 8 bits where the format's product is of whole numbers."""
    kind = get_format(format)
    wide = x.float()
    if kind.int8_activations if int8_activations is None else int8_activations:
        wide = rounded(wide)
    y = wide @ dequantize(packed, kind).mT
    return (y if bias is None else y + bias).to(x.dtype)


# Scales and bits


def _half(scale: Tensor) -> Packed:
    """Return (blocks, 2) bytes of float16."""
    half = scale.to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError("a scale exceeds float16: the weights are too large to quantise")
    return half[:, None].contiguous().view(torch.uint8)


def _read_half(packed: Packed) -> Tensor:
    return packed.contiguous().view(torch.float16).float()


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _round_half_away(x: Tensor) -> Tensor:
    size = x.abs()
    whole = size.floor()
    return x.sign() * (whole + (2 * (size - whole)).floor())


def _low_high(low: Tensor, high: Tensor) -> Tensor:
    return low | (high << 4)


# Blocks of 32


def _pack_q8_0(blocks: Blocks) -> Packed:
    d = blocks.abs().amax(dim=1) / 127
    q = _round_half_away(blocks * _inverse(d)[:, None]).to(torch.int8)
    return torch.cat([_half(d), q.view(torch.uint8)], dim=1)


def _unpack_q8_0(packed: Packed) -> Blocks:
    return packed[:, 2:].view(torch.int8) * _read_half(packed[:, :2])


def _pack_q4_0(blocks: Blocks) -> Packed:
    extreme = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))[:, 0]
    d = extreme / -8
    q = (blocks * _inverse(d)[:, None] + 8.5).to(torch.uint8).clamp(max=15)
    return torch.cat([_half(d), _low_high(q[:, :16], q[:, 16:])], dim=1)


def _unpack_q4_0(packed: Packed) -> Blocks:
    q = torch.cat([packed[:, 2:] & 15, packed[:, 2:] >> 4], dim=1)
    return (q.to(torch.int8) - 8) * _read_half(packed[:, :2])


# Super-blocks of 256


def _pack_q4_k(blocks: Blocks) -> Packed:
    d, m, s, t, q = search_q4_k(blocks)  # (n), (n), (n, 8), (n, 8), (n, 8, 32)
    s, t = s.to(torch.uint8), t.to(torch.uint8)
    scales = torch.cat(
        [
            s[:, :4] | (s[:, 4:] >> 4 << 6),
            t[:, :4] | (t[:, 4:] >> 4 << 6),
            _low_high(s[:, 4:] & 15, t[:, 4:] & 15),
        ],
        dim=1,
    )
    q = q.to(torch.uint8)
    return torch.cat(
        [_half(d), _half(m), scales, _low_high(q[:, ::2], q[:, 1::2]).flatten(1)], dim=1
    )


def _unpack_q4_k(packed: Packed) -> Blocks:
    low, middle, high = packed[:, 4:16].split(4, dim=1)
    s = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)  # (n, 8)
    t = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=1)
    pairs = packed[:, 16:].unflatten(1, (4, 32))
    q = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1, 2)  # (n, 8, 32)
    scale, offset = _read_half(packed[:, :2]) * s, _read_half(packed[:, 2:4]) * t
    return (scale[..., None] * q - offset[..., None]).flatten(1)


def _pack_q6_k(blocks: Blocks) -> Packed:
    d, s, q = search_q6_k(blocks)  # (n), (n, 16), (n, 16, 16)
    q = q.to(torch.uint8).reshape(-1, 2, 4, 32)  # halves, quarters of a half
    low = _low_high(q[:, :, :2] & 15, q[:, :, 2:] & 15).flatten(1)
    two = q >> 4
    high = two[:, :, 0] | (two[:, :, 1] << 2) | (two[:, :, 2] << 4) | (two[:, :, 3] << 6)
    scales = s.to(torch.int8).view(torch.uint8)
    return torch.cat([low, high.flatten(1), scales, _half(d)], dim=1)


def _unpack_q6_k(packed: Packed) -> Blocks:
    low = packed[:, :128].unflatten(1, (2, 2, 32))
    high = packed[:, 128:192].unflatten(1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    q = torch.cat([low & 15, low >> 4], dim=2) | ((high >> shifts & 3) << 4)  # (n, 2, 4, 32)
    scale = _read_half(packed[:, 208:]) * packed[:, 192:208].contiguous().view(torch.int8)
    return ((q.to(torch.int8) - 32).reshape(-1, 16, 16) * scale[..., None]).flatten(1)


# Other blocks

# The quantiles of a standard normal, 8 below zero and 9 above with 0 in both, scaled to ±1.
_lower = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
_upper = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
NF4_TABLE = torch.cat([-_lower, torch.zeros(1, dtype=torch.float64), _upper.flip(0)])
NF4_TABLE = (NF4_TABLE / _upper[0]).float()
_nf4_tables: dict[torch.device, Tensor] = {}


def _nf4_table(device: torch.device) -> Tensor:
    """Return the table on a device: it stays there, as a recorded step cannot fetch it."""
    table = _nf4_tables.get(device)
    if table is None and torch.compiler.is_compiling():
        return NF4_TABLE.to(device)
    if table is None:
        with torch.inference_mode(False):  # for steps of training, too
            table = _nf4_tables[device] = NF4_TABLE.to(device)
    return table


def _pack_nf4(blocks: Blocks) -> Packed:
    table = _nf4_table(blocks.device)
    half = _half(blocks.abs().amax(dim=1))
    between = (table[1:] + table[:-1]) / 2
    q = torch.bucketize(blocks * _inverse(_read_half(half)), between).to(torch.uint8)
    return torch.cat([half, _low_high(q[:, :32], q[:, 32:])], dim=1)


def _unpack_nf4(packed: Packed) -> Blocks:
    q = torch.cat([packed[:, 2:] & 15, packed[:, 2:] >> 4], dim=1).int()
    return _nf4_table(packed.device)[q] * _read_half(packed[:, :2])


# Rows: a float32 scale, then a byte a weight


def _pack_int8(rows: Blocks) -> Packed:
    d = rows.abs().amax(dim=1, keepdim=True) / 127
    q = torch.round(rows * _inverse(d)).to(torch.int8)
    return torch.cat([d.view(torch.uint8), q.view(torch.uint8)], dim=1)


def _row_scales(packed: Packed) -> Float[Tensor, "rows 1"]:
    """Read what rows begin with; one row alone counts as contiguous wherever it lies."""
    return packed[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)


def _unpack_int8(packed: Packed) -> Blocks:
    return packed[:, 4:].view(torch.int8) * _row_scales(packed)


def _pack_fp8(rows: Blocks) -> Packed:
    d = rows.abs().amax(dim=1, keepdim=True) / torch.finfo(_FP8).max
    q = (rows * _inverse(d)).to(_FP8)
    return torch.cat([d.view(torch.uint8), q.view(torch.uint8)], dim=1)


def _unpack_fp8(packed: Packed) -> Blocks:
    return packed[:, 4:].contiguous().view(_FP8).float() * _row_scales(packed)


FORMATS = {
    format.name: format
    for format in (
        Format("q8_0", 32, 34, _pack_q8_0, _unpack_q8_0, int8_activations=True),
        Format("q4_0", 32, 18, _pack_q4_0, _unpack_q4_0, int8_activations=True),
        Format("q4_k", 256, 144, _pack_q4_k, _unpack_q4_k, int8_activations=True),
        Format("q6_k", 256, 210, _pack_q6_k, _unpack_q6_k, int8_activations=True),
        Format("nf4", 64, 34, _pack_nf4, _unpack_nf4),
        Format("int8", 0, 4, _pack_int8, _unpack_int8),
        Format("fp8", 0, 4, _pack_fp8, _unpack_fp8),
    )
}


def get_format(format: str | Format) -> Format:
    """Return a format by its name."""
    if isinstance(format, Format):
        return format
    if format not in FORMATS:
        raise ValueError(f"a format is one of {', '.join(FORMATS)}; got {format!r}")
    return FORMATS[format]
