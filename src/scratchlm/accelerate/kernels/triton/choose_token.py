"""Choose the next token of every row in one kernel: argmax, or a draw after temperature, k and p.

    w_i = exp((x_i − max x) / T)       over the k largest, of these the first with mass below p
    token = the first i, by id, with w_0 + … + w_i > u · Σ w

A row's tokens have one order: by logit, then by id, the lower first. It is that of one integer per
token, `(logit as an ordered integer, −id)`. The k largest are found without sorting them all: the
vocabulary is dealt out to GROUPS groups; the k-th largest of the groups' maxima has at least k
tokens at or above it, and rarely many more. These candidates are collected and compared each with
each. (Should they be too many, the k-th largest is found by bisection.) Masses are float64.
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_K = 128  # `acceleration.MAX_FUSED_K`
_GROUPS, _BLOCK, _CHUNK = 256, 16_384, 64
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
def _load(logits, start, VOCAB, BLOCK: tl.constexpr):
    """Return BLOCK logits, their ids, and which are there."""
    i = start + tl.arange(0, BLOCK)
    x = tl.load(logits + i, mask=i < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x == 0.0, 0.0, x), i, i < VOCAB  # −0 is 0


@triton.jit
def _kth_largest(logits, k, low, high, VOCAB, BLOCK: tl.constexpr):
    """Return the k-th largest key by bisection: at least k keys are ≥ low, fewer are > high."""
    while low < high:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        count = 0
        for start in range(0, VOCAB, BLOCK):
            x, i, there = _load(logits, start, VOCAB, BLOCK)
            count += tl.sum(((_key_of(x, i) >= middle) & there).to(tl.int32), 0)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _draw_from_all(logits, top, scale, number, VOCAB, BLOCK: tl.constexpr):
    """Invert the CDF of softmax(x · scale) over the whole vocabulary."""
    total = tl.zeros((), tl.float64)
    for start in range(0, VOCAB, BLOCK):
        x, i, there = _load(logits, start, VOCAB, BLOCK)
        total += tl.sum(tl.where(there, tl.exp((x.to(tl.float64) - top) * scale), 0.0), 0)
    target, before = number * total, tl.zeros((), tl.float64)
    token, latest = VOCAB, 0  # the first beyond the target; the last that has any mass
    for start in range(0, VOCAB, BLOCK):
        if token == VOCAB:
            x, i, there = _load(logits, start, VOCAB, BLOCK)
            mass = tl.where(there, tl.exp((x.to(tl.float64) - top) * scale), 0.0)
            here = tl.sum(mass, 0)
            latest = tl.maximum(latest, tl.max(tl.where(mass > 0.0, i, 0), 0))
            if before + here > target:
                is_beyond = (before + tl.cumsum(mass, 0) > target) & (mass > 0.0)
                token = tl.min(tl.where(is_beyond, i, VOCAB), 0)
            before += here
    return tl.where(token == VOCAB, latest, token)


@triton.jit
def _count_above(keys, others, OTHERS: tl.constexpr, CHUNK: tl.constexpr):
    """Return for each key how many of the others, in memory, are larger."""
    above = tl.zeros(keys.shape, tl.int32)
    for start in range(0, OTHERS, CHUNK):
        line = tl.load(others + start + tl.arange(0, CHUNK), cache_modifier=".cg")
        above += tl.sum((line[None, :] > keys[:, None]).to(tl.int32), 1)
    return above


@triton.jit
def _mass_of(keys, least, top, scale):
    """Return exp((x − top) · scale) of the keys that are not below `least`."""
    mass = tl.exp((_logit_of(keys).to(tl.float64) - top) * scale)
    return tl.where((keys >= least) & (keys > _LEAST), mass, 0.0)


@triton.jit
def _draw_from_candidates(
    scratch, masses, k, p, top, scale, number, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr
):
    """Invert the CDF, by id, of the candidates within k and p; `masses` is memory for theirs."""
    c = tl.arange(0, CANDIDATES)
    keys = tl.load(scratch + c, cache_modifier=".cg")
    rank = _count_above(keys, scratch, CANDIDATES, CHUNK)
    mass = tl.exp((_logit_of(keys).to(tl.float64) - top) * scale)
    mass = tl.where((rank < k) & (keys > _LEAST), mass, 0.0)
    tl.store(masses + c, mass)
    tl.debug_barrier()
    before = tl.zeros(keys.shape, tl.float64)  # mass of the tokens ranked higher
    for start in range(0, CANDIDATES, CHUNK):
        j = start + tl.arange(0, CHUNK)
        line = tl.load(scratch + j, cache_modifier=".cg")
        part = tl.load(masses + j, cache_modifier=".cg")
        before += tl.sum(tl.where(line[None, :] > keys[:, None], part[None, :], 0.0), 1)
    mass = tl.where((before < p * tl.sum(mass, 0)) | (rank == 0), mass, 0.0)
    tl.debug_barrier()
    tl.store(masses + c, mass)
    tl.debug_barrier()
    ids = tl.where(mass > 0.0, _id_of(keys), 0x7FFFFFFF)
    cdf = tl.zeros(keys.shape, tl.float64)
    for start in range(0, CANDIDATES, CHUNK):
        j = start + tl.arange(0, CHUNK)
        line = tl.load(scratch + j, cache_modifier=".cg")
        part = tl.load(masses + j, cache_modifier=".cg")
        cdf += tl.sum(tl.where(_id_of(line)[None, :] <= ids[:, None], part[None, :], 0.0), 1)
    is_beyond = (cdf > number * tl.sum(mass, 0)) & (mass > 0.0)
    token = tl.min(tl.where(is_beyond, ids, 0x7FFFFFFF), 0)
    latest = tl.max(tl.where(mass > 0.0, ids, 0), 0)
    return tl.where(token == 0x7FFFFFFF, latest, token).to(tl.int32)


@triton.jit
def _collect(logits, bound, scratch, counter, VOCAB, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr):
    """Write the keys that are not below the bound, in any order; return how many there are."""
    tl.store(scratch + tl.arange(0, CANDIDATES), tl.full((CANDIDATES,), _LEAST, tl.int64))
    tl.store(counter, 0)
    tl.debug_barrier()
    for start in range(0, VOCAB, BLOCK):
        x, i, there = _load(logits, start, VOCAB, BLOCK)
        key = _key_of(x, i)
        is_candidate = (key >= bound) & there
        ones = tl.full((BLOCK,), 1, tl.int32)
        at = tl.atomic_add(counter + i * 0, ones, mask=is_candidate)
        tl.store(scratch + at, key, mask=is_candidate & (at < CANDIDATES))
    tl.debug_barrier()
    return tl.load(counter, volatile=True)


@triton.jit
def choose_token(
    logits,
    temperature,
    top_k,
    top_p,
    numbers,
    slots,
    last,
    tokens,
    scratch,
    masses,
    counters,
    stride,
    VOCAB,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """tokens[row], last[slots[row]] = the row's next token. Grid: (rows,).

    Temperature 0 is the argmax. k is at most MAX_K, or the vocabulary's size with p = 1. Memory to
    work in: `scratch` (rows, GROUPS) int64, `masses` the same in float64, `counters` (rows).
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    best = tl.full((BLOCK,), _LEAST, tl.int64)
    is_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB, BLOCK):
        x, i, there = _load(logits, start, VOCAB, BLOCK)
        is_nan |= (x != x).to(tl.int32)
        best = tl.maximum(best, tl.where(there, _key_of(x, i), _LEAST))
    first = tl.max(best, 0)
    top = _logit_of(first)
    can_choose = (tl.max(is_nan, 0) == 0) & (top < float("inf")) & (top > float("-inf"))
    token = _id_of(first).to(tl.int32)
    if DRAWS:
        warmth = tl.load(temperature + row)
        if can_choose & (warmth > 0.0):
            k, number = tl.load(top_k + row), tl.load(numbers + row)
            peak, scale = top.to(tl.float64), 1.0 / warmth
            if k >= VOCAB:
                token = _draw_from_all(logits, peak, scale, number, VOCAB, BLOCK)
            else:
                of_row, g = scratch + row * GROUPS, tl.arange(0, GROUPS)
                maxima = tl.max(tl.reshape(best, (BLOCK // GROUPS, GROUPS)), 0)
                tl.store(of_row + g, maxima)
                tl.debug_barrier()
                above = _count_above(maxima, of_row, GROUPS, CHUNK)
                bound = tl.max(tl.where(above == k - 1, maxima, _LEAST), 0)
                tl.debug_barrier()
                count = _collect(logits, bound, of_row, counters + row, VOCAB, BLOCK, GROUPS)
                if count > GROUPS:
                    bound = _kth_largest(logits, k, bound, first, VOCAB, BLOCK)
                    _collect(logits, bound, of_row, counters + row, VOCAB, BLOCK, GROUPS)
                token = _draw_from_candidates(
                    *(of_row, masses + row * GROUPS, k, tl.load(top_p + row)),
                    *(peak, scale, number, GROUPS, CHUNK),
                )
    token = tl.where(can_choose, token, _NOTHING)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(last + tl.load(slots + row), tl.maximum(token, 0).to(tl.int64))


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    numbers: Tensor | None,
    slots: Tensor,
    last: Tensor,
) -> Tensor:
    """Return every row's next token, and write it to `last`; without numbers, the argmax."""
    (rows, vocab_size), device = logits.shape, logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    scratch = masses = counters = None
    if numbers is not None:
        scratch = torch.empty(rows, _GROUPS, dtype=torch.int64, device=device)
        masses = torch.empty(rows, _GROUPS, dtype=torch.float64, device=device)
        counters = torch.empty(rows, dtype=torch.int32, device=device)
    interpreted = not isinstance(choose_token, triton.JITFunction)  # in tests
    block = min(_BLOCK, max(_GROUPS, triton.next_power_of_2(vocab_size)))
    choose_token[(rows,)](
        *(logits, temperature, top_k, top_p, numbers, slots, last, tokens),
        *(scratch, masses, counters, logits.stride(0), vocab_size),
        *(block, _GROUPS, _CHUNK, numbers is not None),
        **({} if interpreted else {"num_warps": 16 if block >= 8192 else 8}),
    )
    return tokens
