"""Which matrices are stored in which format, and which stay wide: a rule on a config.

    matrices of the layers, and an embedding that is not the head     the format asked for
    the head, or the embedding it is tied to                          q6_k where that has 4 bits
    norms, biases, the router, learned positions                      wide

`q4_k_m` is q4_k with the values' and the feed-forward layer's second matrix of every third layer,
and of the first and last eighth, in q6_k: errors there are felt most. A matrix whose rows are not
whole blocks takes the next format that fits.

A base that stands still while an adapter learns beside it (arXiv:2305.14314) has the matrices of
its layers alone in few bits, in a format whose products leave the other factor as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from scratchlm.config import ModelConfig
from scratchlm.interop.shapes import Shape, parameter_shapes

# Weights of a block, its bytes. A block of a row (0) has a byte a weight, and these besides.
BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_k": (256, 144),
    "q6_k": (256, 210),
    "nf4": (64, 34),
    "int8": (0, 4),
    "fp8": (0, 4),
}
TARGETS = ("q8_0", "q6_k", "q4_k", "q4_k_m", "q4_0", "nf4", "int8", "fp8")
BASES = ("nf4", "int8")  # of what an adapter learns beside
# What comes next where rows are not whole blocks; None: the matrix stays wide.
_NEXT = {"q4_k": "q4_0", "q6_k": "q8_0"}
_FOUR_BITS = ("q4_0", "q4_k", "nf4")
_WIDE = ("ffn.router.weight", "position_embeddings.weight")


@dataclass(frozen=True)
class Choice:
    """What becomes of one tensor."""

    name: str
    shape: Shape
    format: str | None  # None: stays wide

    @property
    def weights(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def stored_name(self) -> str:
        """Its name in a file: the format is part of it."""
        return self.name if self.format is None else f"{self.name}_{self.format}"

    @property
    def stored_shape(self) -> Shape:
        """Its shape in a file: rows of bytes, where it is quantised."""
        if self.format is None:
            return self.shape
        return (*self.shape[:-1], bytes_per_row(self.format, self.shape[-1]))


def bytes_per_row(format: str, d_in: int) -> int:
    """Return what a row of `d_in` weights takes."""
    size, stored = BLOCKS[format]
    return d_in // size * stored if size else d_in + stored


def fits(format: str, d_in: int) -> bool:
    """Say whether rows of `d_in` weights are whole blocks."""
    size = BLOCKS[format][0]
    return size == 0 or d_in % size == 0


def choose(config: ModelConfig, to: str) -> list[Choice]:
    """Return what becomes of every tensor of a model that is quantised."""
    check_target(to)
    return [
        Choice(name, shape, _format(name, shape, config, to))
        for name, shape in parameter_shapes(config)
    ]


def choose_base(config: ModelConfig, to: str) -> list[Choice]:
    """Return what becomes of every tensor of a base that an adapter learns beside."""
    if to not in BASES:
        raise ValueError(f"an adapter learns beside {' or '.join(BASES)}; got {to!r}")
    choices = [
        choice if choice.name.startswith("layers.") else replace(choice, format=None)
        for choice in choose(config, to)
    ]
    if not any(choice.format for choice in choices):
        raise ValueError(f"{to} takes rows of whole blocks of {BLOCKS[to][0]}: no matrix has them")
    return choices


def alternatives(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of bytes under which a file may hold a matrix."""
    for format in BLOCKS if len(shape) > 1 and not name.endswith(_WIDE) else ():
        if fits(format, shape[-1]):
            choice = Choice(name, shape, format)
            yield choice.stored_name, choice.stored_shape


def stored_choices(config: ModelConfig, names: Mapping[str, str]) -> list[Choice]:
    """Return the choices that a file has made, from the name each tensor is stored under."""
    return [
        Choice(name, shape, names[name].removeprefix(name)[1:] or None)
        for name, shape in parameter_shapes(config)
    ]


def check_target(to: str) -> None:
    """Refuse a format there is not."""
    if to not in TARGETS:
        raise ValueError(f"quantize to one of {', '.join(TARGETS)}; got {to!r}")


def _format(name: str, shape: Shape, config: ModelConfig, to: str) -> str | None:
    if len(shape) < 2 or name.endswith(_WIDE):
        return None
    wanted: str | None = "q4_k" if to == "q4_k_m" else to
    head = "token_embeddings.weight" if config.tie_embeddings else "lm_head.weight"
    if (name == head and wanted in _FOUR_BITS) or (to == "q4_k_m" and _more_bits(name, config)):
        wanted = "q6_k"
    while wanted is not None and not fits(wanted, shape[-1]):
        wanted = _NEXT.get(wanted)
    return wanted


def _more_bits(name: str, config: ModelConfig) -> bool:
    if not name.endswith(("attn.v_proj.weight", "ffn.w2.weight")):
        return False
    layer, eighth = int(name.split(".")[1]), config.num_layers // 8
    at_an_end = layer < eighth or layer >= 7 * config.num_layers // 8
    return at_an_end or (layer - eighth) % 3 == 2


def stored_bytes(choices: list[Choice]) -> int:
    """Return the bytes of all tensors, those that are not quantised in float32."""
    return sum(
        prod(choice.stored_shape) * (4 if choice.format is None else 1) for choice in choices
    )


def described(choices: list[Choice]) -> Iterator[str]:
    """Say in a few lines which matrices take which format, and which stay wide."""
    formats = {choice.format: "" for choice in choices}
    for format in sorted(formats, key=lambda f: (f is None, f)):
        of = [choice for choice in choices if choice.format == format]
        names = ", ".join(dict.fromkeys(_short(choice.name) for choice in of))
        weights = sum(choice.weights for choice in of)
        yield f"{format or 'wide':6} {weights:>14,} weights: {names}"


def _short(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return ".".join(parts[2:] if parts[0] == "layers" else parts)
