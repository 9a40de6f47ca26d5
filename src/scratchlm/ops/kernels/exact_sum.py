"""A sum that many programs add to at once, the same to the last bit in whatever order they come.

Sums of float32 depend on the order; sums of whole numbers do not. So a part is added, atomically,
as a number of steps of 2⁻³⁶ = 1.5e-11 in 64 bits. A part in float32 is a whole number of steps
from 2⁻¹³ on; of a smaller one less than a step is cut off. What does not fit must not come out as
a number:

    a part that fits     |part| ≤ 2¹⁸ / parts, so that all together stay within ±2⁵⁴ steps
    any other, and NaN   adds the marker, 2⁵⁶ steps: even 64 of them, with the rest, stay below 2⁶³
    the reader           gives NaN from 2⁵⁵ steps on: one marker less 2⁵⁴ is beyond, 2⁵⁴ is not

So up to 64 parts can be added (`tiles.MOST_HEADS`), each up to 4096 at least. Relaxed atomics are
enough: the end of the kernel stands between the last part and the first reader.

The reader takes a sum apart as high · 2³² + low, |low| ≤ 2³¹: two conversions of 32 bits cost less
than one of 64. high is exact in float32, and where it is not 0 it outweighs low's rounding.
"""

# mypy: disallow_untyped_defs=False
# Arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

_STEPS = tl.constexpr(2.0**36)
_LARGEST = tl.constexpr(2.0**18)
_MARKER = tl.constexpr(2**56)
_HIGH_MARKED = tl.constexpr(2**23)  # 2⁵⁵ steps, as the high word gives them
_HALF_WORD = tl.constexpr(2**31)


@triton.jit
def add_part(total, part, inside, PARTS: tl.constexpr):
    """Add one of PARTS parts, float32, to the totals it points to."""
    fits = tl.abs(part) <= _LARGEST / PARTS  # not so for NaN
    steps = (tl.where(fits, part, 0.0) * _STEPS).to(tl.int64)
    tl.atomic_add(total, tl.where(fits, steps, _MARKER), mask=inside, sem="relaxed")


@triton.jit
def read_total(total, inside):
    """Return sums in float32, 0 outside, NaN where a part did not fit."""
    steps = tl.load(total, mask=inside, other=0)
    high = ((steps + _HALF_WORD) >> 32).to(tl.int32)
    low = steps.to(tl.int32)
    value = high.to(tl.float32) * 2.0**-4 + low.to(tl.float32) * 2.0**-36
    return tl.where(high >= _HIGH_MARKED, float("nan"), value)
