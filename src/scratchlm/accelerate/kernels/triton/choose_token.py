"""Choose the next token of every row on the device: argmax, or a draw after temperature, k and p.

    w_i = exp((x_i − max x) / T)       over the k largest, of these the first with mass below p
    token = the first i, by id, with w_0 + … + w_i > u · Σ w

A row's tokens have one order: by logit, then by id, the lower first. It is that of one integer per
token, `(logit as an ordered integer, −id)`. The k largest are found without sorting them all, by
three kernels, the first two with several programs to a row:

    group_maxima    deals the vocabulary out to GROUPS groups and takes the maximum of each
    collect         the k-th largest maximum has at least k tokens at or above it, and rarely many
                    more: these are the candidates
    draw            compares candidates each with each, and draws among those within k and p

(Should candidates be too many, the k-th largest is found by bisection.) Without a limit k, the
first kernel sums the mass of slices, and the last looks into one of them. Masses are float64.
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_K = 128  # `acceleration.MAX_FUSED_K`
_GROUPS, _PARTS, _BLOCK = 256, 16, 2048  # _PARTS: programs to a row
_LEAST = tl.constexpr(-(2**63))
_NOTHING = tl.constexpr(-1)  # in place of a token: there is none to choose


@triton.jit
def _key_of(x, i):
    """Return an integer that orders tokens by logit, then by id, the lower first."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def _logit_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _load(logits, i, end):
    """Return the logits of some ids, −∞ from `end` on; −0 is 0, NaN is +∞."""
    x = tl.load(logits + i, mask=i < end, other=float("-inf")).to(tl.float32)
    return tl.where(x == 0.0, 0.0, tl.where(x == x, x, float("inf")))


@triton.jit
def _keys(logits, i, end):
    """Return the keys of some ids, the least from `end` on."""
    return tl.where(i < end, _key_of(_load(logits, i, end), i), _LEAST)


@triton.jit
def _is_finite(x):
    return (x < float("inf")) & (x > float("-inf"))


@triton.jit
def _kth_largest(logits, k, low, high, VOCAB, BLOCK: tl.constexpr):
    """Return the k-th largest key by bisection: at least k keys are ≥ low, fewer are > high."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up; their sum may overflow
        count = 0
        for start in range(0, VOCAB, BLOCK):
            keys = _keys(logits, start + tl.arange(0, BLOCK), VOCAB)
            count += tl.sum((keys >= middle).to(tl.int32), 0)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _slice_of(part, VOCAB, PARTS: tl.constexpr):
    """Return the ids of a part where masses are summed: consecutive ones."""
    size = tl.cdiv(VOCAB, PARTS)
    return part * size, tl.minimum((part + 1) * size, VOCAB)


@triton.jit
def _draw_from_slices(
    logits, maxima, masses, peak, scale, number, VOCAB,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Invert the CDF of softmax(x · scale) over the whole vocabulary: a slice, then within it."""
    p = tl.arange(0, PARTS)
    tops = _logit_of(tl.load(maxima + p * WIDTH)).to(tl.float64)
    mass = tl.load(masses + p)
    mass = tl.where(mass > 0.0, mass * tl.exp((tops - peak) * scale), 0.0)
    cdf = tl.cumsum(mass, 0)
    target = number * tl.sum(mass, 0)
    latest = tl.max(tl.where(mass > 0.0, p, 0), 0)  # rounding must not lead past the last
    part = tl.minimum(tl.min(tl.where((cdf > target) & (mass > 0.0), p, PARTS), 0), latest)
    before = tl.sum(tl.where(p < part, mass, 0.0), 0)
    begin, end = _slice_of(part, VOCAB, PARTS)
    token, latest_id = VOCAB, begin
    for start in range(begin, end, BLOCK):
        if token == VOCAB:
            i = start + tl.arange(0, BLOCK)
            here = tl.exp((_load(logits, i, end).to(tl.float64) - peak) * scale)
            latest_id = tl.maximum(latest_id, tl.max(tl.where(here > 0.0, i, 0), 0))
            is_beyond = (before + tl.cumsum(here, 0) > target) & (here > 0.0)
            token = tl.min(tl.where(is_beyond, i, VOCAB), 0)
            before += tl.sum(here, 0)
    return tl.where(token == VOCAB, latest_id, token)


@triton.jit
def _draw_from_candidates(
    candidates, masses, count, k, p, peak, scale, number, CANDIDATES: tl.constexpr
):
    """Invert the CDF, by id, of the candidates within k and p; `masses` is memory for theirs.

    A thread has a candidate or two, and all look at one after the other: nothing is reduced.
    """
    c = tl.arange(0, CANDIDATES)
    keys = tl.load(candidates + c)
    rank = tl.zeros((CANDIDATES,), tl.int32)
    for j in range(count):
        rank += (tl.load(candidates + j) > keys).to(tl.int32)
    mass = tl.exp((_logit_of(keys).to(tl.float64) - peak) * scale)
    mass = tl.where((rank < k) & (keys > _LEAST), mass, 0.0)
    tl.store(masses + c, mass)
    tl.debug_barrier()
    before = tl.zeros((CANDIDATES,), tl.float64)  # mass of the tokens ranked higher
    for j in range(count):
        before += tl.where(tl.load(candidates + j) > keys, tl.load(masses + j), 0.0)
    mass = tl.where((before < p * tl.sum(mass, 0)) | (rank == 0), mass, 0.0)
    tl.debug_barrier()
    tl.store(masses + c, mass)
    tl.debug_barrier()
    ids = tl.where(mass > 0.0, _id_of(keys), 0x7FFFFFFF)
    cdf = tl.zeros((CANDIDATES,), tl.float64)
    for j in range(count):
        cdf += tl.where(_id_of(tl.load(candidates + j)) <= ids, tl.load(masses + j), 0.0)
    is_beyond = (cdf > number * tl.sum(mass, 0)) & (mass > 0.0)
    token = tl.min(tl.where(is_beyond, ids, 0x7FFFFFFF), 0)
    latest = tl.max(tl.where(mass > 0.0, ids, 0), 0)
    return tl.where(token == 0x7FFFFFFF, latest, token).to(tl.int32)


@triton.jit
def _bound_of(maxima, k, GROUPS: tl.constexpr):
    """Return a key that at least k tokens are not below: that of the k-th largest maximum's logit.

    Found by bisection over its 32 bits.
    """
    ordered = tl.load(maxima + tl.arange(0, GROUPS)) >> 32
    low, high = tl.min(ordered, 0), tl.max(ordered, 0)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        if tl.sum((ordered >= middle).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle - 1
    return low << 32


@triton.jit
def _collect_part(
    logits, bound, candidates, counter, part, VOCAB,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the keys of one part that are not below the bound, in any order."""
    WIDTH: tl.constexpr = GROUPS // PARTS
    line, g = tl.arange(0, BLOCK // WIDTH), part * WIDTH + tl.arange(0, WIDTH)
    for start in range(0, VOCAB, BLOCK * PARTS):
        i = start + line[:, None] * GROUPS + g[None, :]
        keys = _keys(logits, i, VOCAB)
        is_candidate = (keys >= bound) & (i < VOCAB)
        ones = tl.full((BLOCK // WIDTH, WIDTH), 1, tl.int32)
        at = tl.atomic_add(counter + i * 0, ones, mask=is_candidate)
        tl.store(candidates + at, keys, mask=is_candidate & (at < GROUPS))


@triton.jit
def group_maxima(
    logits, temperature, top_k, slots, maxima, candidates, masses, counters, stride, VOCAB,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """maxima[row] = the largest key of each group; no candidates yet. Grid: (rows, PARTS).

    For a row that draws from all tokens a part is a slice: its largest key, and its mass.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(slots + row) >= 0:
        WIDTH: tl.constexpr = GROUPS // PARTS
        logits += row.to(tl.int64) * stride
        g = tl.arange(0, WIDTH)
        at = row * GROUPS + part * WIDTH + g
        from_all = False
        if DRAWS:
            tl.store(candidates + at, tl.full((WIDTH,), _LEAST, tl.int64))
            tl.store(counters + row, 0)
            warmth = tl.load(temperature + row)
            from_all = (warmth > 0.0) & (tl.load(top_k + row) >= VOCAB)
        if from_all:
            begin, end = _slice_of(part, VOCAB, PARTS)
            best = tl.full((BLOCK,), _LEAST, tl.int64)
            for start in range(begin, end, BLOCK):
                best = tl.maximum(best, _keys(logits, start + tl.arange(0, BLOCK), end))
            first = tl.max(best, 0)
            peak, mass = _logit_of(first), tl.zeros((), tl.float64)
            if (first > _LEAST) & _is_finite(peak):
                scale = 1.0 / tl.load(temperature + row)
                for start in range(begin, end, BLOCK):
                    x = _load(logits, start + tl.arange(0, BLOCK), end).to(tl.float64)
                    mass += tl.sum(tl.exp((x - peak.to(tl.float64)) * scale), 0)
            tl.store(masses + row * GROUPS + part, mass)
            tl.store(maxima + at, tl.where(g == 0, first, _LEAST))
        else:
            line = tl.arange(0, BLOCK // WIDTH)
            most = tl.full((BLOCK // WIDTH, WIDTH), _LEAST, tl.int64)
            for start in range(0, VOCAB, BLOCK * PARTS):
                i = start + line[:, None] * GROUPS + part * WIDTH + g[None, :]
                most = tl.maximum(most, _keys(logits, i, VOCAB))
            tl.store(maxima + at, tl.max(most, 0))


@triton.jit
def collect(
    logits, temperature, top_k, slots, maxima, candidates, counters, stride, VOCAB,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """candidates[row] = the keys that may be among the k largest. Grid: (rows, PARTS)."""
    row, part = tl.program_id(0), tl.program_id(1)
    k = tl.load(top_k + row)
    if (tl.load(slots + row) >= 0) & (tl.load(temperature + row) > 0.0) & (k < VOCAB):
        of_row = maxima + row * GROUPS
        if _is_finite(_logit_of(tl.max(tl.load(of_row + tl.arange(0, GROUPS)), 0))):
            bound = _bound_of(of_row, k, GROUPS)
            _collect_part(
                *(logits + row.to(tl.int64) * stride, bound, candidates + row * GROUPS),
                *(counters + row, part, VOCAB, BLOCK, GROUPS, PARTS),
            )


@triton.jit
def draw(
    logits, temperature, top_k, top_p, numbers, slots, last, tokens, maxima, candidates, masses,
    counters, stride, VOCAB,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """tokens[row], last[slots[row]] = the row's next token. Grid: (rows,).

    Temperature 0 is the argmax. k is at most MAX_K, or the vocabulary's size with p = 1. A slot of
    −1 is a row that is not there.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        logits += row.to(tl.int64) * stride
        of_row, own = maxima + row * GROUPS, candidates + row * GROUPS
        g = tl.arange(0, GROUPS)
        first = tl.max(tl.load(of_row + g), 0)
        top = _logit_of(first)
        token = _id_of(first).to(tl.int32)
        if DRAWS:
            warmth = tl.load(temperature + row)
            if _is_finite(top) & (warmth > 0.0):
                k, number = tl.load(top_k + row).to(tl.int32), tl.load(numbers + row)
                peak, scale = top.to(tl.float64), 1.0 / warmth
                if k >= VOCAB:
                    token = _draw_from_slices(
                        *(logits, of_row, masses + row * GROUPS, peak, scale, number, VOCAB),
                        *(BLOCK, GROUPS // PARTS, PARTS),
                    ).to(tl.int32)
                else:
                    count = tl.load(counters + row)
                    if count > GROUPS:
                        bound = _bound_of(of_row, k, GROUPS)
                        bound = _kth_largest(logits, k, bound, first, VOCAB, BLOCK)
                        tl.store(own + g, tl.full((GROUPS,), _LEAST, tl.int64))
                        tl.store(counters + row, 0)
                        tl.debug_barrier()
                        for part in range(PARTS):
                            _collect_part(
                                *(logits, bound, own, counters + row, part, VOCAB),
                                *(BLOCK, GROUPS, PARTS),
                            )
                        tl.debug_barrier()
                        count = k
                    token = _draw_from_candidates(
                        *(own, masses + row * GROUPS, count, k, tl.load(top_p + row)),
                        *(peak, scale, number, GROUPS),
                    )
        token = tl.where(_is_finite(top), token, _NOTHING)
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(last + slot, tl.maximum(token, 0).to(tl.int64))


@dataclass(frozen=True)
class ChooseBuffers:
    """Where the kernels leave what they find, for a number of rows."""

    tokens: Tensor  # (rows,) int64: the result
    maxima: Tensor  # (rows, GROUPS) int64
    candidates: Tensor  # (rows, GROUPS) int64
    masses: Tensor  # (rows, GROUPS) float64
    counters: Tensor  # (rows,) int32

    @classmethod
    def of(cls, rows: int, device: torch.device) -> ChooseBuffers:
        """Allocate them."""

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        return cls(
            *(empty(), empty(_GROUPS), empty(_GROUPS), empty(_GROUPS, dtype=torch.float64)),
            empty(dtype=torch.int32),
        )


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    numbers: Tensor | None,
    slots: Tensor,
    last: Tensor,
    buffers: ChooseBuffers | None = None,
) -> Tensor:
    """Return every row's next token, and write it to `last`; without numbers, the argmax."""
    rows, vocab_size = logits.shape
    b = ChooseBuffers.of(rows, logits.device) if buffers is None else buffers
    interpreted = not isinstance(draw, triton.JITFunction)  # in tests
    few: dict[str, int] = {} if interpreted else {"num_warps": 4}
    many: dict[str, int] = {} if interpreted else {"num_warps": 8}
    size, draws = (logits.stride(0), vocab_size), numbers is not None
    cut = _BLOCK, _GROUPS, _PARTS
    group_maxima[(rows, _PARTS)](
        *(logits, temperature, top_k, slots, b.maxima, b.candidates, b.masses, b.counters),
        *(*size, *cut, draws),
        **few,
    )
    if draws:
        collect[(rows, _PARTS)](
            *(logits, temperature, top_k, slots, b.maxima, b.candidates, b.counters),
            *(*size, *cut),
            **few,
        )
    draw[(rows,)](
        *(logits, temperature, top_k, top_p, numbers, slots, last, b.tokens),
        *(b.maxima, b.candidates, b.masses, b.counters),
        *(*size, *cut, draws),
        **many,
    )
    return b.tokens
