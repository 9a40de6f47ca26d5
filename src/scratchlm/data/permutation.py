"""A stateless shuffle: the i-th element of a keyed pseudorandom permutation of 0 … n−1.

A Feistel network turns any keyed hash F into a bijection on pairs of b-bit halves:

    (L, R) → (R, L ⊕ F(k_r, R))        for rounds r = 0 … 7

so it permutes [0, 4^b). For another n, take the smallest 4^b ≥ n and cycle-walk: apply the
network again until the value falls below n. Values below n then map to values below n, one to
one, because each walk follows a cycle of a bijection and stops at the next element below n.
Less than four applications on average, no table, random access.

The hash is splitmix64's finaliser, written out here in 64-bit integer arithmetic: the order never
depends on the machine or on a library's random stream.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 8
_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Scatter the bits of a 64-bit integer (the finaliser of splitmix64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_key(*parts: int) -> int:
    """Fold integers such as (seed, epoch, purpose) into one 64-bit key; order matters."""
    key = 0
    for part in parts:
        key = mix((key + 0x9E3779B97F4A7C15 + part) & _MASK)
    return key


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return where the permutation of 0 … n−1 named by `key` sends each index."""
    if n < 1:
        raise ValueError(f"a permutation needs n >= 1; got n={n}")
    value = np.array(index, dtype=np.uint64, ndmin=1)
    if value.size and int(value.max()) >= n:
        raise ValueError(f"index must be below n; got index={int(value.max())}, n={n}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits: 4^half >= n
    round_keys = [derive_key(key, r) for r in range(ROUNDS)]
    value = _network(value, half, round_keys)
    outside = np.flatnonzero(value >= n)
    while outside.size:
        value[outside] = _network(value[outside], half, round_keys)
        outside = outside[value[outside] >= n]
    return value.astype(np.int64)


def _network(value: np.ndarray, half: int, round_keys: list[int]) -> np.ndarray:
    shift, low_bits = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & low_bits
    for round_key in round_keys:
        left, right = right, left ^ (_mix_array(right + np.uint64(round_key)) & low_bits)
    return (left << shift) | right


def _mix_array(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
