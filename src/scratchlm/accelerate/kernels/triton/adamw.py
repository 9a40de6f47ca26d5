"""AdamW over many tensors in one launch: every number is read once and written once.

    g ← s·g
    m ← β₁m + (1 − β₁)g        v ← β₂v + (1 − β₂)g²
    θ ← (1 − lr·λ)θ − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

θ and v are float32, g and m float32 or bfloat16: 28 bytes a parameter, or down to 22. Where θ has a
twin in bfloat16, what products read, that is written too: 2 more. The tensors lie where they lie: a
table has a row for each, with the addresses of its θ, m, v and twin, how many numbers, and the
first of its chunks; one list has the addresses of the gradients, another says of every chunk, a
program each, whose it is. The factors are floats, for which nothing is compiled anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 6  # of the table
Place = tuple[int, int, int, int, int]  # addresses of θ, m, v and the twin or 0; how many numbers
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class Tiling(NamedTuple):
    """How much a program takes at a time, how many times, and with how many warps."""

    block: int = 2048
    rounds: int = 1
    warps: int = 8
    hint: str = "evict_first"  # nothing is read again soon; "": the cache's own ways


class Kinds(NamedTuple):
    """What the tensors of a launch have in common."""

    gradient: torch.dtype = torch.float32
    moment: torch.dtype = torch.float32
    aligned: bool = True  # every address is a multiple of 16
    twins: bool = False


PLAIN = Kinds()


class Factors(NamedTuple):
    """What a step multiplies with."""

    decay: float  # 1 − lr·λ
    rate: float  # lr / (1 − β₁ᵗ)
    root: float  # 1 / √(1 − β₂ᵗ)
    eps: float
    beta1: float
    beta2: float


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    p,
    g,
    m,
    v,
    twin,
    at,
    inside,
    scale,
    decay,
    rate,
    root,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
    TWIN: tl.constexpr,
    HINT: tl.constexpr,
):
    w = tl.load(p + at, mask=inside, eviction_policy=HINT)
    slope = tl.load(g + at, mask=inside, eviction_policy=HINT).to(tl.float32) * scale
    mean = tl.load(m + at, mask=inside, eviction_policy=HINT).to(tl.float32)
    square = tl.load(v + at, mask=inside, eviction_policy=HINT)
    mean = beta1 * mean + rest1 * slope
    square = beta2 * square + rest2 * (slope * slope)
    # Rounded as torch rounds: the quick root takes the smallest numbers for 0.
    w = decay * w - rate * tl.div_rn(mean, tl.sqrt_rn(square) * root + eps)
    tl.store(p + at, w, mask=inside, eviction_policy=HINT)
    if TWIN:
        tl.store(twin + at, w.to(tl.bfloat16), mask=inside)
    tl.store(m + at, mean.to(m.dtype.element_ty), mask=inside, eviction_policy=HINT)
    tl.store(v + at, square, mask=inside, eviction_policy=HINT)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    places,
    gradients,
    owners,
    scale,
    decay,
    rate,
    root,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    FOUR_G: tl.constexpr,
    FOUR_M: tl.constexpr,
    TWIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    HINT: tl.constexpr,
):
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    row = places + owner * COLUMNS
    p = tl.load(row).to(tl.pointer_type(tl.float32))
    g = tl.load(gradients + owner).to(tl.pointer_type(GRADIENT))
    m = tl.load(row + 1).to(tl.pointer_type(MOMENT))
    v = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    twin = tl.load(row + 3).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:  # so that a thread loads four numbers at once, whatever their size
        p = tl.multiple_of(p, 16)
        g = tl.multiple_of(g, FOUR_G)
        m = tl.multiple_of(m, FOUR_M)
        v = tl.multiple_of(v, 16)
        twin = tl.multiple_of(twin, 8)
    start = (program - tl.load(row + 5)) * CHUNK
    stop = tl.minimum(start + CHUNK, tl.load(row + 4))
    whole = stop - (stop - start) % BLOCK
    factor = 1.0
    if scale is not None:
        factor = tl.load(scale).to(tl.float32)
    for first in range(start, whole, BLOCK):
        at = first + tl.arange(0, BLOCK)
        _block(
            *(p, g, m, v, twin, at, None),
            *(factor, decay, rate, root, eps, beta1, rest1, beta2, rest2),
            TWIN,
            HINT,
        )
    for first in range(whole, stop, REST):  # in small pieces: masked addresses take registers
        at = first + tl.arange(0, REST)
        inside = at < stop
        _block(
            *(p, g, m, v, twin, at, inside),
            *(factor, decay, rate, root, eps, beta1, rest1, beta2, rest2),
            TWIN,
            HINT,
        )


class Table:
    """Where some tensors lie, on the device; written anew where that changes, without a wait."""

    def __init__(self, places: list[Place], device: torch.device, tiling: Tiling) -> None:
        self.places, self.device, self.tiling = places, device, tiling
        size = tiling.block * tiling.rounds
        chunks = torch.tensor([-(-count // size) for *_, count in places])
        firsts = (chunks.cumsum(0) - chunks)[:, None]
        self.rows = self._send(torch.cat((torch.tensor(places), firsts), dim=1))
        owners = torch.arange(len(places), dtype=torch.int32)
        self.owners = self._send(owners.repeat_interleave(chunks))
        self.gradients: list[int] = []
        self.gradient_list: Tensor

    def set_gradients(self, addresses: list[int]) -> None:
        """Say where the gradients lie now."""
        if addresses != self.gradients:
            self.gradients = addresses
            self.gradient_list = self._send(torch.tensor(addresses))

    def _send(self, numbers: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return numbers.to(self.device)
        # Pinned memory is given out again only after the copy: torch's allocator sees to it.
        return numbers.pin_memory().to(self.device, non_blocking=True)


def move(
    table: Table,
    factors: Factors,
    scale: Tensor | None = None,
    kinds: Kinds = PLAIN,
) -> None:
    """Move all tensors of a table once, and their twins if they have some."""
    decay, rate, root, eps, beta1, beta2 = factors
    block, rounds, warps, hint = table.tiling
    with torch.cuda.device_of(table.rows):
        _adamw[(len(table.owners),)](
            table.rows,
            table.gradient_list,
            table.owners,
            scale,
            decay,
            rate,
            root,
            eps,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            GRADIENT=TYPES[kinds.gradient],
            MOMENT=TYPES[kinds.moment],
            FOUR_G=4 * kinds.gradient.itemsize,
            FOUR_M=4 * kinds.moment.itemsize,
            TWIN=kinds.twins,
            ALIGNED=kinds.aligned,
            BLOCK=block,
            CHUNK=block * rounds,
            REST=min(block, 32 * warps),
            COLUMNS=COLUMNS,
            HINT=hint,
            num_warps=warps,
        )
