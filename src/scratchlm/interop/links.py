"""How a tensor of ours maps to theirs: seven layouts, for reading and writing.

A `Link` says: ours[at] = theirs[box], transposed or not. Reading copies from the file's box to our
tensor, writing copies from our tensor to the box; there is one description for both.

    same             the same tensor
    transposed       GPT-2's Conv1D keeps (in, out) where a Linear keeps (out, in)
    third(k)         GPT-2's c_attn keeps query, key and value side by side
    third_of_rows(k) GGUF keeps them one below the other
    one_per_expert   a tensor for each expert, ours stacked: (experts, out, in)
    half(k)          all experts' gate and up projections in one: (experts, 2·d_ff, d_model)
    ones             not stored: the family's formula has no such factor, which is a factor of 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scratchlm.interop.shapes import Shape


@dataclass(frozen=True)
class Link:
    """ours[at] = theirs[box], transposed or not."""

    ours: str
    theirs: str
    their_shape: Shape
    box: tuple[tuple[int, int], ...]  # begin and end along each of their dimensions
    at: int | None = None  # which expert of ours; None: the whole tensor
    transposed: bool = False


# (our name, their name, our shape) -> the links
How = Callable[[str, str, Shape], Iterator[Link]]


def _whole(shape: Shape) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


def same(ours: str, theirs: str, shape: Shape) -> Iterator[Link]:
    """The same tensor under another name."""
    yield Link(ours, theirs, shape, _whole(shape))


def transposed(ours: str, theirs: str, shape: Shape) -> Iterator[Link]:
    """A matrix kept (in, out); a vector is the same either way."""
    yield Link(ours, theirs, shape[::-1], _whole(shape[::-1]), transposed=len(shape) == 2)


def third(k: int) -> How:
    """The k-th of three equal parts along the last dimension, kept (in, out)."""

    def how(ours: str, theirs: str, shape: Shape) -> Iterator[Link]:
        *d_in, d_out = shape[::-1]
        columns = (k * d_out, (k + 1) * d_out)
        box = (*_whole(tuple(d_in)), columns)
        yield Link(ours, theirs, (*d_in, 3 * d_out), box, transposed=len(shape) == 2)

    return how


def third_of_rows(k: int) -> How:
    """The k-th of three equal parts along the first dimension."""

    def how(ours: str, theirs: str, shape: Shape) -> Iterator[Link]:
        rows, *rest = shape
        box = ((k * rows, (k + 1) * rows), *_whole(tuple(rest)))
        yield Link(ours, theirs, (3 * rows, *rest), box)

    return how


def one_per_expert(ours: str, theirs: str, shape: Shape) -> Iterator[Link]:
    """A tensor for every expert; `{e}` in the name counts them."""
    for expert in range(shape[0]):
        name = theirs.replace("{e}", str(expert))
        yield Link(ours, name, shape[1:], _whole(shape[1:]), at=expert)


def half(k: int) -> How:
    """The k-th half of the second dimension, for every expert."""

    def how(ours: str, theirs: str, shape: Shape) -> Iterator[Link]:
        experts, d_ff, d_model = shape
        box = ((0, experts), (k * d_ff, (k + 1) * d_ff), (0, d_model))
        yield Link(ours, theirs, (experts, 2 * d_ff, d_model), box)

    return how


def ones(ours: str, theirs: str, shape: Shape) -> Iterator[Link]:
    """Nothing stored."""
    yield from ()
