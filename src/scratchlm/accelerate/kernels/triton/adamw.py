"""Multi-tensor AdamW: one launch updates all tensors, one read and one write per element.

    g ← s·g
    m ← β₁m + (1 − β₁)g        v ← β₂v + (1 − β₂)g²
    θ ← (1 − lr·λ)θ − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

θ and v are float32, g and m float32 or bfloat16: 22 to 28 bytes of traffic per parameter. If θ has
a bf16 shadow copy, that is written too (2 bytes more). A table on the device has one row per
tensor: the addresses of θ, m, v and the shadow, the number of elements, and its first chunk. A
second list has the addresses of the gradients, a third maps each chunk (one program) to its tensor.
Hyperparameters are passed as floats, so a new value does not recompile the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 6  # of the table
Row = tuple[int, int, int, int, int]  # addresses of θ, m, v and the shadow (or 0); numel
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class Tiling(NamedTuple):
    """Elements per block, blocks per program, warps, and the cache hint."""

    block: int = 2048
    blocks_per_program: int = 1
    warps: int = 8
    eviction_policy: str = "evict_first"  # nothing is read again soon; "": the default policy


class Variant(NamedTuple):
    """What the tensors of a launch have in common; each variant is compiled separately."""

    grad: torch.dtype = torch.float32
    moment: torch.dtype = torch.float32
    aligned: bool = True  # every address is a multiple of 16
    shadow: bool = False


DEFAULT = Variant()


class Factors(NamedTuple):
    """The scalars of one step."""

    decay: float  # 1 − lr·λ
    step_size: float  # lr / (1 − β₁ᵗ)
    inv_sqrt_correction: float  # 1 / √(1 − β₂ᵗ)
    eps: float
    beta1: float
    beta2: float


@triton.jit
def _update_block(  # type: ignore[no-untyped-def]
    p,
    g,
    m,
    v,
    shadow,
    offsets,
    mask,
    scale,
    decay,
    step_size,
    inv_sqrt_correction,
    eps,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    SHADOW: tl.constexpr,
    EVICTION: tl.constexpr,
):
    param = tl.load(p + offsets, mask=mask, eviction_policy=EVICTION)
    grad = tl.load(g + offsets, mask=mask, eviction_policy=EVICTION).to(tl.float32) * scale
    exp_avg = tl.load(m + offsets, mask=mask, eviction_policy=EVICTION).to(tl.float32)
    exp_avg_sq = tl.load(v + offsets, mask=mask, eviction_policy=EVICTION)
    exp_avg = beta1 * exp_avg + one_minus_beta1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad)
    # IEEE rounding, as in torch: the approximate square root flushes subnormals to 0.
    denominator = tl.sqrt_rn(exp_avg_sq) * inv_sqrt_correction + eps
    param = decay * param - step_size * tl.div_rn(exp_avg, denominator)
    tl.store(p + offsets, param, mask=mask, eviction_policy=EVICTION)
    if SHADOW:
        tl.store(shadow + offsets, param.to(tl.bfloat16), mask=mask)
    tl.store(m + offsets, exp_avg.to(m.dtype.element_ty), mask=mask, eviction_policy=EVICTION)
    tl.store(v + offsets, exp_avg_sq, mask=mask, eviction_policy=EVICTION)


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    rows,
    grads,
    owners,
    scale,
    decay,
    step_size,
    inv_sqrt_correction,
    eps,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr,
    MOMENT_ALIGNMENT: tl.constexpr,
    SHADOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVICTION: tl.constexpr,
):
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    row = rows + owner * COLUMNS
    p = tl.load(row).to(tl.pointer_type(tl.float32))
    g = tl.load(grads + owner).to(tl.pointer_type(GRAD))
    m = tl.load(row + 1).to(tl.pointer_type(MOMENT))
    v = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    shadow = tl.load(row + 3).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:  # so that loads are vectorized, four elements of any size
        p = tl.multiple_of(p, 16)
        g = tl.multiple_of(g, GRAD_ALIGNMENT)
        m = tl.multiple_of(m, MOMENT_ALIGNMENT)
        v = tl.multiple_of(v, 16)
        shadow = tl.multiple_of(shadow, 8)
    start = (program - tl.load(row + 5)) * CHUNK
    stop = tl.minimum(start + CHUNK, tl.load(row + 4))
    tail = stop - (stop - start) % BLOCK
    factor = 1.0
    if scale is not None:
        factor = tl.load(scale).to(tl.float32)
    for first in range(start, tail, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        _update_block(
            *(p, g, m, v, shadow, offsets, None, factor, decay, step_size),
            *(inv_sqrt_correction, eps, beta1, one_minus_beta1, beta2, one_minus_beta2),
            SHADOW,
            EVICTION,
        )
    for first in range(tail, stop, TAIL_BLOCK):  # small blocks: masks cost registers
        offsets = first + tl.arange(0, TAIL_BLOCK)
        mask = offsets < stop
        _update_block(
            *(p, g, m, v, shadow, offsets, mask, factor, decay, step_size),
            *(inv_sqrt_correction, eps, beta1, one_minus_beta1, beta2, one_minus_beta2),
            SHADOW,
            EVICTION,
        )


class Table:
    """The addresses of some tensors, on the device; updated by asynchronous copies."""

    def __init__(self, rows: list[Row], device: torch.device, tiling: Tiling) -> None:
        self.rows, self.device, self.tiling = rows, device, tiling
        size = tiling.block * tiling.blocks_per_program
        num_chunks = torch.tensor([-(-numel // size) for *_, numel in rows])
        first_chunks = (num_chunks.cumsum(0) - num_chunks)[:, None]
        self.device_rows = self._send(torch.cat((torch.tensor(rows), first_chunks), dim=1))
        owners = torch.arange(len(rows), dtype=torch.int32)
        self.owners = self._send(owners.repeat_interleave(num_chunks))
        self.grads: list[int] = []
        self.device_grads: Tensor

    def set_grads(self, addresses: list[int]) -> None:
        """Set the addresses of the gradients."""
        if addresses != self.grads:
            self.grads = addresses
            self.device_grads = self._send(torch.tensor(addresses))

    def _send(self, values: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return values.to(self.device)
        # torch's allocator reuses pinned memory only after the copy.
        return values.pin_memory().to(self.device, non_blocking=True)


def update(
    table: Table,
    factors: Factors,
    scale: Tensor | None = None,
    variant: Variant = DEFAULT,
) -> None:
    """Take one AdamW step for all tensors of a table, and write their bf16 shadows, if any."""
    decay, step_size, inv_sqrt_correction, eps, beta1, beta2 = factors
    block, blocks_per_program, warps, eviction_policy = table.tiling
    with torch.cuda.device_of(table.device_rows):
        _adamw_kernel[(len(table.owners),)](
            table.device_rows,
            table.device_grads,
            table.owners,
            scale,
            decay,
            step_size,
            inv_sqrt_correction,
            eps,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            GRAD=TYPES[variant.grad],
            MOMENT=TYPES[variant.moment],
            GRAD_ALIGNMENT=4 * variant.grad.itemsize,
            MOMENT_ALIGNMENT=4 * variant.moment.itemsize,
            SHADOW=variant.shadow,
            ALIGNED=variant.aligned,
            BLOCK=block,
            CHUNK=block * blocks_per_program,
            TAIL_BLOCK=min(block, 32 * warps),
            COLUMNS=COLUMNS,
            EVICTION=eviction_policy,
            num_warps=warps,
        )
