"""95 % confidence intervals: how far a figure may lie from that of all cases one could have asked.

- a share k / n (accuracy, exact match): Wilson's score interval, which stays within [0, 1] and is
  right for few cases and for shares near 0 and 1 (E. B. Wilson, JASA 22, 1927);
- a ratio Σ yᵢ / Σ xᵢ over documents (nats per token, bits per byte): normal, with the variance of
  the ratio estimator by linearisation, rᵢ = yᵢ − R xᵢ, over n − 1 (W. G. Cochran, Sampling
  Techniques, 1977, eq. 6.13). The tokens of a document are not independent: documents count, not
  tokens. One document has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # of 95 %


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval, which is not known of a single document."""

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, change: Callable[[float], float]) -> Estimate:
        """Apply a rising function to the figure and to both ends."""
        ends = [None if end is None else change(end) for end in (self.low, self.high)]
        return Estimate(change(self.value), *ends)


def wilson_interval(hits: int, count: int) -> Estimate:
    """Estimate a share from so many hits of so many cases."""
    if not 0 <= hits <= count or not count:
        raise ValueError(f"hits must lie in [0, count], count above 0; got {hits} of {count}")
    share = hits / count
    centre = share + Z**2 / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    low = 0.0 if not hits else (centre - spread) / scale
    high = 1.0 if hits == count else (centre + spread) / scale
    return Estimate(share, low, high)


def ratio_interval(y: Sequence[float], x: Sequence[float]) -> Estimate:
    """Estimate Σ y / Σ x from pairs."""
    total, count = math.fsum(x), len(x)
    ratio = math.fsum(y) / total
    if count < 2:
        return Estimate(ratio)
    squares = math.fsum((b - ratio * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = Z * math.sqrt(squares * count / (count - 1)) / total
    return Estimate(ratio, ratio - spread, ratio + spread)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Estimate a mean."""
    return ratio_interval(values, [1.0] * len(values))
