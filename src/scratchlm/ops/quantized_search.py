"""Which scales to store: the search behind q4_k and q6_k.

A super-block has scales of its own and small whole scales of its sub-blocks. The best for each
sub-block is sought first, alone, by least squares over a row of candidates. These are
rounded to what the super-block can store; then three exact steps are repeated, each of which can
only lower the error Σ (x − x̂)²: the nearest q for given scales, whole scales one up or down, and
the super-block's own scales by least squares for given q and whole scales.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

ROUNDS = 3

Blocks = Float[Tensor, "blocks weights"]


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0.0, a / b)


def _as_stored(scale: Tensor) -> Tensor:
    return scale.half().float()


# q6_k: x ≈ d · s · (q − 32)


def search_q6_k(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Return d (n), s (n, 16) and q (n, 16, 16), as float32."""
    x = blocks.unflatten(1, (16, 16))
    best = _scale_alone(x)  # (n, 16)
    extreme = best.gather(1, best.abs().argmax(dim=1, keepdim=True))
    d = _as_stored(extreme / -128)  # (n, 1): the largest scale is stored as −128
    s = _divide(best, d).round().clamp(-128, 127)
    for _ in range(ROUNDS):
        s, _ = _best_of(partial(_error_q6_k, x, d), s, -128, 127)
        q = _nearest(x, d[..., None] * s[..., None], -32, 31)
        product = s[..., None] * q
        refit = _divide((x * product).sum((1, 2)), product.square().sum((1, 2)))
        new = _as_stored(refit[:, None])
        before, after = (_error_q6_k(x, by, s).sum(1, keepdim=True) for by in (d, new))
        d = torch.where(after < before, new, d)
    q = _nearest(x, d[..., None] * s[..., None], -32, 31)
    return d[:, 0], s, q + 32


def _scale_alone(x: Tensor) -> Tensor:
    """Return the scale of each sub-block that is best by itself, among some candidates."""
    extreme = x.gather(2, x.abs().argmax(dim=2, keepdim=True))
    best, best_gain = torch.zeros_like(x[..., 0]), torch.full_like(x[..., 0], -1.0)
    for k in range(-9, 10):
        q = (x * _divide(torch.tensor(-(32 + k / 10), device=x.device), extreme)).round()
        q = q.clamp(-32, 31)
        with_x, with_q = (x * q).sum(2), (q * q).sum(2)
        gain = _divide(with_x.square(), with_q)
        better = gain > best_gain
        best = torch.where(better, _divide(with_x, with_q), best)
        best_gain = torch.where(better, gain, best_gain)
    return best


def _nearest(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Return the nearest q for a scale that many weights share; 0 where it is 0."""
    return (x / scale.masked_fill(scale == 0, torch.inf)).round_().clamp_(low, high)


def _error_q6_k(x: Tensor, d: Tensor, s: Tensor) -> Tensor:
    scale = (d * s)[..., None]
    return _nearest(x, scale, -32, 31).mul_(scale).sub_(x).square_().sum(2)


# q4_k: x ≈ d · s · q − m · t


def search_q4_k(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return d (n), m (n), s (n, 8), t (n, 8) and q (n, 8, 32), as float32."""
    x = blocks.unflatten(1, (8, 32))
    scale, offset = _scale_and_offset_alone(x)  # (n, 8)
    d = _as_stored(scale.amax(dim=1, keepdim=True) / 63)
    m = _as_stored(offset.amax(dim=1, keepdim=True) / 63)
    s = _divide(scale, d).round().clamp(0, 63)
    t = _divide(offset, m).round().clamp(0, 63)
    for _ in range(ROUNDS):
        error = _error_q4_k(x, d, m, s, t)
        for ds in (-1, 0, 1):
            moved = (s + ds).clamp(0, 63)
            t_for, found = _best_of(partial(_error_q4_k, x, d, m, moved), t)
            better = found < error
            s, t = torch.where(better, moved, s), torch.where(better, t_for, t)
            error = torch.where(better, found, error)
        d, m = _refit_q4_k(x, d, m, s, t)
    q = _q_of_q4_k(x, d, m, s, t)
    by = _unshrunk(x, (d * s)[..., None] * q - (m * t)[..., None])
    return d[:, 0] * by, m[:, 0] * by, s, t, q


def _scale_and_offset_alone(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and offset of each sub-block that are best by themselves."""
    low = x.amin(dim=2, keepdim=True).clamp(max=0)
    width = x.amax(dim=2, keepdim=True) - low
    best, best_offset = (width / 15)[..., 0], -low[..., 0]
    best_error = torch.full_like(best, torch.inf)
    for k in range(0, 21, 2):
        q = ((x - low) * _divide(torch.tensor(14 + k / 10, device=x.device), width)).round()
        scale, offset = _line(x, q.clamp(0, 15))
        fitted = _nearest(x + offset[..., None], scale[..., None], 0, 15)
        fitted.mul_(scale[..., None]).sub_(offset[..., None])
        error = fitted.sub_(x).square_().sum(2)
        better = (error < best_error) & (scale > 0)
        best = torch.where(better, scale, best)
        best_offset = torch.where(better, offset, best_offset)
        best_error = torch.where(better, error, best_error)
    return best, best_offset


def _line(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset ≥ 0 of the line x ≈ scale · q − offset by least squares."""
    ones, by_q, by_qq = q.shape[2], q.sum(2), (q * q).sum(2)
    by_x, by_qx = x.sum(2), (q * x).sum(2)
    determinant = ones * by_qq - by_q.square()
    scale = _divide(ones * by_qx - by_q * by_x, determinant)
    offset = _divide(by_q * by_qx - by_qq * by_x, determinant)
    through_zero = offset < 0
    return torch.where(through_zero, _divide(by_qx, by_qq), scale), offset.clamp(min=0)


def _q_of_q4_k(x: Tensor, d: Tensor, m: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return _nearest(x + (m * t)[..., None], (d * s)[..., None], 0, 15)


def _error_q4_k(x: Tensor, d: Tensor, m: Tensor, s: Tensor, t: Tensor) -> Tensor:
    fitted = _q_of_q4_k(x, d, m, s, t).mul_((d * s)[..., None]).sub_((m * t)[..., None])
    return fitted.sub_(x).square_().sum(2)


def _refit_q4_k(x: Tensor, d: Tensor, m: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return d and m that are best for given q, s and t, where that lowers the error."""
    a = s[..., None] * _q_of_q4_k(x, d, m, s, t)
    b = t[..., None].expand_as(a)
    aa, ab, bb = ((u * v).sum((1, 2)) for u, v in ((a, a), (a, b), (b, b)))
    ax, bx = ((u * x).sum((1, 2)) for u in (a, b))
    determinant = aa * bb - ab.square()
    new_d = _as_stored(_divide(bb * ax - ab * bx, determinant))[:, None]
    new_m = _as_stored(_divide(ab * ax - aa * bx, determinant))[:, None]
    before = _error_q4_k(x, d, m, s, t).sum(1, keepdim=True)
    after = _error_q4_k(x, new_d, new_m, s, t).sum(1, keepdim=True)
    better = (after < before) & (new_d > 0) & (new_m >= 0)
    return torch.where(better, new_d, d), torch.where(better, new_m, m)


# Choosing


def _unshrunk(x: Tensor, fitted: Tensor) -> Tensor:
    """Return by what to multiply x̂ so that x · x̂ = x · x.

    Least squares makes x̂ too short, by the square of the relative error: little in one matrix, but
    the same in all of them, and what all layers do alike adds up.
    """
    along = (x * fitted).sum((1, 2))
    return torch.where(along > 0, x.square().sum((1, 2)) / along, 1.0).clamp(1.0, 1.05)


def _best_of(
    error: Callable[[Tensor], Tensor], whole: Tensor, low: int = 0, high: int = 63
) -> tuple[Tensor, Tensor]:
    """Move each whole scale to the neighbour with the lowest error; return that, too."""
    best, best_error = whole, error(whole)
    for move in (-1, 1):
        moved = (whole + move).clamp(low, high)
        found = error(moved)
        better = found < best_error
        best, best_error = torch.where(better, moved, best), torch.where(better, found, best_error)
    return best, best_error
