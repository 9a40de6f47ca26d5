"""SwiGLU's gate inside the two products beside it, for Hopper's tensor cores.

    forward    [a | b] = x [W1; W3]ᵀ,    h = SiLU(a) ⊙ b
    backward   ∂h = ∂y W2,    ∂a = ∂h ⊙ b ⊙ σ(a)(1 + a(1 − σ(a))),    ∂b = ∂h ⊙ SiLU(a)

As kernels of their own, the gate and its backward read and write what the product before them has
just written: 3 and 5 passes over (tokens, d_ff). Here h leaves with a and b, and ∂h never lies in
memory. Triton's own products cannot hide what the gate reads and writes; so this is Gluon, Triton's
lower language, with one program on each multiprocessor made of three parts:

    a loading warp    fills a ring of operand tiles by TMA
    two consumers     of four warps, take tiles of 128 × 128 in turn: one's gate runs under the
                      other's products

i is a program's i-th tile, c = i mod 2 its consumer, j = i div 2. What waits for what:

    full[s]        the copies into stage s of the ring
    empty[s]       stage s has been multiplied
    turn[c]        c may multiply: the other has waited for all of its stages. This also keeps a
                   barrier's parity true: nobody waits for a stage two fills ahead
    given[2h + c]  half h (64 columns) of a and b for c's tile, in the backward pass

In the backward pass a and b have one set of buffers, and ∂a lies over a, ∂b over b: the consumer of
tile i, once its results have been read out, itself starts the copies for tile i + 1.

Gluon is experimental, and nothing interprets it on a CPU: `ops/swiglu.py` says where this runs.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE, DEEP = 128, 64  # rows and columns of a tile of the result; of what is summed over, at a time
STAGES = 5  # 32 KiB each; with the gate's 64 KiB all the shared memory there is
GROUP = 8  # rows of tiles whose operands stay in the L2 cache together
REGISTERS = 240  # of a consumer's thread; the loader has what is left of 504
# Of numbers that change from model to model, none is compiled in.
_SIZES = ["tiles_down", "tiles_across", "depth"]


@gluon.jit
def _place(tile, tiles_down, tiles_across, GROUP: gl.constexpr):
    """Return the row and the column of a tile: down each column of a group of rows."""
    group = tile // (GROUP * tiles_across)
    rest = tile % (GROUP * tiles_across)
    rows = gl.minimum(tiles_down - group * GROUP, GROUP)
    rows = gl.maximum(rows, 1)  # past the last tile, where nobody looks
    return group * GROUP + rest % rows, rest // rows


@gluon.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(−x)) by the two instructions there are for it."""
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [power + 1.0],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _halves(acc):
    """Cut 128 × 128 sums into left and right; no number moves to another thread."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left, right = acc.reshape(128, 2, 64).permute(0, 2, 1).split()
    left = gl.convert_layout(left, half, assert_trivial=True)
    return left, gl.convert_layout(right, half, assert_trivial=True)


@gluon.jit
def _multiply(a_ring, b_ring, full, empty, i, depth, STAGES: gl.constexpr, FLIP: gl.constexpr):
    """Sum over the ring's next `depth` stages; hand all but the last back, and return which it is.

    The stage before is computed, not remembered: a name given another's value before a loop, and
    again inside it, keeps its first value (Triton 3.6 and 3.7).
    """
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    s = (i * depth) % STAGES
    phase = ((i * depth) // STAGES) & 1
    acc = gl.zeros([128, 128], gl.float32, whole)
    for k in range(depth):
        mbarrier.wait(full.index(s), phase)
        b = b_ring.index(s)
        if FLIP:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_ring.index(s), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # this one runs on, the one before is done
        mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=k > 0)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1
    return acc, (s + STAGES - 1) % STAGES


@gluon.jit
def _count(tiles_down, tiles_across):
    """Return how many tiles are this program's: every num_programs-th."""
    rest = tiles_down * tiles_across - gl.program_id(0)
    return (rest + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _mine(i, tiles_down, tiles_across, GROUP: gl.constexpr):
    """Return the row and the column of this program's i-th tile."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    return _place(tile, tiles_down, tiles_across, GROUP)


@gluon.jit
def _taken_in_turn(
    rings, bars, i, depth, STAGES: gl.constexpr, C: gl.constexpr, FLIP: gl.constexpr
):
    """Wait for the turn of consumer C, multiply, let the other have its turn."""
    full, empty, turn = bars
    mbarrier.wait(turn.index(C), (i // 2 & 1) ^ (1 - C))  # the first turn is there from the start
    acc, last = _multiply(rings[0], rings[1], full, empty, i, depth, STAGES, FLIP)
    mbarrier.arrive(turn.index(1 - C), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(last), count=1)
    return acc


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(bars.index(b), count=1)
    return bars


# Backward: (∂y W2) through the gate


@gluon.jit
def _ask_for_half(left, right, given, gate, m, n, c, h: gl.constexpr, pred):
    """Start the copies of 64 columns of a and b for consumer c's next tile."""
    bar, row, column = given.index(2 * h + c), m * 128, n * 128 + 64 * h
    mbarrier.expect(bar, 2 * 128 * 64 * 2, pred=pred)
    tma.async_copy_global_to_shared(left, [row, column], bar, gate.index(2 * h), pred=pred)
    tma.async_copy_global_to_shared(right, [row, column], bar, gate.index(2 * h + 1), pred=pred)


@gluon.jit
def _load_back(descs, rings, gate, bars, given, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr):
    dy, w2, left, right, _, _ = descs
    full, empty, _ = bars
    tiles_down, tiles_across, depth = sizes
    m, n = _mine(0, tiles_down, tiles_across, GROUP)
    for h in gl.static_range(2):
        _ask_for_half(left, right, given, gate, m, n, 0, h, True)
    s = 0
    phase = 1
    for i in range(_count(tiles_down, tiles_across)):
        m, n = _mine(i, tiles_down, tiles_across, GROUP)
        for k in range(depth):
            mbarrier.wait(empty.index(s), phase)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * 128 * 64 * 2)
            tma.async_copy_global_to_shared(dy, [m * 128, k * 64], bar, rings[0].index(s))
            tma.async_copy_global_to_shared(w2, [k * 64, n * 128], bar, rings[1].index(s))
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1


@gluon.jit
def _consume_back(
    descs,
    rings,
    gate,
    bars,
    given,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
):
    _, _, left, right, left_out, right_out = descs
    tiles_down, tiles_across, depth = sizes
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    count = _count(tiles_down, tiles_across)
    for i in range(C, count, 2):
        parts = _halves(_taken_in_turn(rings, bars, i, depth, STAGES, C, False))
        m, n = _mine(i, tiles_down, tiles_across, GROUP)
        for h in gl.static_range(2):
            mbarrier.wait(given.index(2 * h + C), i // 2 & 1)
            a = gate.index(2 * h).load(half).to(gl.float32)
            b = gate.index(2 * h + 1).load(half).to(gl.float32)
            s = _sigmoid(a)
            g = parts[h] * s
            da = (g * b) * (1.0 + a * (1.0 - s))
            db = g * a
            gate.index(2 * h).store(da.to(gl.bfloat16))
            gate.index(2 * h + 1).store(db.to(gl.bfloat16))
            fence_async_shared()
            row, column = m * 128, n * 128 + 64 * h
            tma.async_copy_shared_to_global(left_out, [row, column], gate.index(2 * h))
            tma.async_copy_shared_to_global(right_out, [row, column], gate.index(2 * h + 1))
        more = i + 1 < count
        m, n = _mine(i + 1, tiles_down, tiles_across, GROUP)
        tma.store_wait(2)  # the first half's buffers have been read out
        _ask_for_half(left, right, given, gate, m, n, 1 - C, 0, more)
        tma.store_wait(0)
        _ask_for_half(left, right, given, gate, m, n, 1 - C, 1, more)


@gluon.jit(do_not_specialize=_SIZES)
def _back(
    dy,
    w2,
    left,
    right,
    left_out,
    right_out,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], dy.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], w2.layout)
    gate = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], left.layout)
    bars = (_barriers(STAGES), _barriers(STAGES), _barriers(2))
    given = _barriers(4)
    fence_async_shared()
    descs = (dy, w2, left, right, left_out, right_out)
    sizes = (tiles_down, tiles_across, depth)
    rings = (a_ring, b_ring)
    gl.warp_specialize(
        [
            (_consume_back, (descs, rings, gate, bars, given, sizes, STAGES, GROUP, 0)),
            (_consume_back, (descs, rings, gate, bars, given, sizes, STAGES, GROUP, 1)),
            (_load_back, (descs, rings, gate, bars, given, sizes, STAGES, GROUP)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Forward: x [W1; W3]ᵀ and the gate; a tile is 64 columns of a and the same 64 of b


@gluon.jit
def _load_forward(descs, rings, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr):
    x, w1, w3, _, _, _ = descs
    full, empty, _ = bars
    tiles_down, tiles_across, depth = sizes
    s = 0
    phase = 1
    for i in range(_count(tiles_down, tiles_across)):
        m, n = _mine(i, tiles_down, tiles_across, GROUP)
        for k in range(depth):
            mbarrier.wait(empty.index(s), phase)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * 128 * 64 * 2)
            pair = rings[1].index(s)._reinterpret(gl.bfloat16, [2, 64, 64], w1.layout)
            tma.async_copy_global_to_shared(x, [m * 128, k * 64], bar, rings[0].index(s))
            tma.async_copy_global_to_shared(w1, [n * 64, k * 64], bar, pair.index(0))
            tma.async_copy_global_to_shared(w3, [n * 64, k * 64], bar, pair.index(1))
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1


@gluon.jit
def _consume_forward(
    descs, rings, out, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr
):
    _, _, _, left, right, hidden = descs
    tiles_down, tiles_across, depth = sizes
    for i in range(C, _count(tiles_down, tiles_across), 2):
        a, b = _halves(_taken_in_turn(rings, bars, i, depth, STAGES, C, True))
        m, n = _mine(i, tiles_down, tiles_across, GROUP)
        a = a.to(gl.bfloat16)
        b = b.to(gl.bfloat16)
        tma.store_wait(0)  # of the tile before: long since read out
        out.index(2 * C).store(a)
        out.index(2 * C + 1).store(b)
        fence_async_shared()
        tma.async_copy_shared_to_global(left, [m * 128, n * 64], out.index(2 * C))
        tma.async_copy_shared_to_global(right, [m * 128, n * 64], out.index(2 * C + 1))
        a = a.to(gl.float32)
        h = (a * _sigmoid(a) * b.to(gl.float32)).to(gl.bfloat16)
        tma.store_wait(1)  # a's buffer has been read out
        out.index(2 * C).store(h)
        fence_async_shared()
        tma.async_copy_shared_to_global(hidden, [m * 128, n * 64], out.index(2 * C))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_SIZES)
def _forward(
    x,
    w1,
    w3,
    left,
    right,
    hidden,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], x.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], w1.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], left.layout)
    bars = (_barriers(STAGES), _barriers(STAGES), _barriers(2))
    fence_async_shared()
    descs = (x, w1, w3, left, right, hidden)
    sizes = (tiles_down, tiles_across, depth)
    rings = (a_ring, b_ring)
    gl.warp_specialize(
        [
            (_consume_forward, (descs, rings, out, bars, sizes, STAGES, GROUP, 0)),
            (_consume_forward, (descs, rings, out, bars, sizes, STAGES, GROUP, 1)),
            (_load_forward, (descs, rings, bars, sizes, STAGES, GROUP)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Calls

_LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix for TMA, which fills with zeros, and cuts off, what lies past its edges."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns], _LINES)


def _launch(
    kernel: object, tensors: list[TensorDescriptor], sizes: tuple[int, int, int], programs: int
) -> None:
    if programs == 0:
        programs = torch.cuda.get_device_properties().multi_processor_count
    kernel[(min(sizes[0] * sizes[1], programs),)](  # type: ignore[index]
        *tensors,
        *sizes,
        STAGES=STAGES,
        GROUP=GROUP,
        REGISTERS=REGISTERS,
        num_warps=4,
        maxnreg=168,  # 65,536 shared out over 12 warps, before they are given their own
    )


def gated_product(x: Tensor, w13: Tensor, programs: int = 0) -> tuple[Tensor, Tensor]:
    """Return [a | b] = x [W1; W3]ᵀ and SiLU(a) ⊙ b, in bfloat16 as all is."""
    (rows, d), d_ff = x.shape, len(w13) // 2
    x, w13 = x.contiguous(), w13.contiguous()
    joined, hidden = x.new_empty(rows, 2 * d_ff), x.new_empty(rows, d_ff)
    tensors = [
        _described(x, 128, 64),
        *(_described(half, 64, 64) for half in w13.split(d_ff)),
        *(_described(half, 128, 64) for half in joined.split(d_ff, dim=1)),
        _described(hidden, 128, 64),
    ]
    _launch(_forward, tensors, (rows // TILE, triton.cdiv(d_ff, 64), d // DEEP), programs)
    return joined, hidden


def gated_product_back(dy: Tensor, w2: Tensor, joined: Tensor, programs: int = 0) -> Tensor:
    """Return the gradient of [a | b], where that of W2 h is `dy`."""
    (rows, d), d_ff = dy.shape, w2.shape[1]
    dy, w2, joined = dy.contiguous(), w2.contiguous(), joined.contiguous()
    out = torch.empty_like(joined)
    tensors = [
        _described(dy, 128, 64),
        _described(w2, 64, 128),
        *(_described(half, 128, 64) for half in joined.split(d_ff, dim=1)),
        *(_described(half, 128, 64) for half in out.split(d_ff, dim=1)),
    ]
    _launch(_back, tensors, (rows // TILE, triton.cdiv(d_ff, TILE), d // DEEP), programs)
    return out


# As torch sees them: whole operations, which a compiler does not open. The first is all of SwiGLU,
# and has its gradient from torch.library: so a compiler, too, computes it again where it is told to
# keep nothing (of an autograd.Function torch 2.11 keeps everything).


@torch.library.custom_op("scratchlm::swiglu", mutates_args=(), device_types="cuda")
def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return W2 h of rows x, and what is kept for the backward pass: [a | b] and h."""
    joined, hidden = gated_product(x, w13)
    return hidden @ w2.t(), joined, hidden


@torch.library.custom_op("scratchlm::gated_product_back", mutates_args=(), device_types="cuda")
def through_gate(dy: Tensor, w2: Tensor, joined: Tensor) -> Tensor:
    """Return the gradient of [a | b]."""
    return gated_product_back(dy, w2, joined)


@swiglu.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    joined, hidden = x.new_empty(len(x), len(w13)), x.new_empty(len(x), len(w13) // 2)
    return x.new_empty(len(x), len(w2)), joined, hidden


@through_gate.register_fake
def _(dy: Tensor, w2: Tensor, joined: Tensor) -> Tensor:
    return joined.new_empty(joined.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _slopes(ctx: Any, slope: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    x, w13, w2, joined, hidden = ctx.saved_tensors
    for_x, for_13, for_2 = ctx.needs_input_grad
    of_x: Tensor | None = None
    of_13: Tensor | None = None
    if for_x or for_13:
        of_joined = through_gate(slope, w2, joined)
        of_x = of_joined @ w13 if for_x else None
        of_13 = of_joined.t() @ x if for_13 else None
    return of_x, of_13, slope.t() @ hidden if for_2 else None


swiglu.register_autograd(_slopes, setup_context=_keep)
