"""`ModelConfig`: the sizes of a model and the parts it is composed of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scratchlm.config.parts import (
    Attention,
    FeedForward,
    Norm,
    NTKScaling,
    Positions,
    RMSNorm,
    Rotary,
    Sinusoidal,
    SwiGLU,
    check_choice,
    check_flag,
    check_number,
    check_size,
)
from scratchlm.errors import check_keys

# Default of a field that is derived from others: None as an argument, a size once constructed.
_DERIVED: Any = None

_PARTS: dict[str, Any] = {
    "positions": Positions,
    "ffn": FeedForward,
    "norm": Norm,
    "attention": Attention,
}


def default_d_ff(d_model: int) -> int:
    """Return 8/3 · d_model, rounded up to a multiple of 64."""
    return -(-8 * d_model // (3 * 64)) * 64


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer language model, fully specified."""

    vocab_size: int
    context_length: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int = _DERIVED  # None: 8/3 · d_model, rounded up to a multiple of 64
    rope_theta: float = 10_000.0  # shorthand for positions=Rotary(theta=…)
    num_kv_heads: int = _DERIVED  # None: num_heads
    d_head: int = _DERIVED  # None: d_model / num_heads
    positions: Positions = _DERIVED  # None: Rotary(rope_theta)
    ffn: FeedForward = SwiGLU()
    norm: Norm = RMSNorm()
    attention: Attention = Attention()
    norm_placement: Literal["pre", "post"] = "pre"
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "d_model", "num_layers", "num_heads"):
            check_size(name, getattr(self, name))
        self._resolve_sizes()
        self._resolve_positions()
        for name, union in _PARTS.items():
            kinds = get_args(union) or (union,)
            if not isinstance(getattr(self, name), kinds):
                names = ", ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name} must be one of {names}; got {getattr(self, name)!r}")
        check_choice("norm_placement", self.norm_placement, ("pre", "post"))
        check_flag("tie_embeddings", self.tie_embeddings)

    def _resolve_sizes(self) -> None:
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", default_d_ff(self.d_model))
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.d_head is None:
            if self.d_model % self.num_heads:
                raise ValueError(
                    "d_model must be divisible by num_heads; got "
                    f"d_model={self.d_model}, num_heads={self.num_heads}"
                )
            object.__setattr__(self, "d_head", self.d_model // self.num_heads)
        for name in ("d_ff", "num_kv_heads", "d_head"):
            check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be divisible by num_kv_heads; got "
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )

    def _resolve_positions(self) -> None:
        check_number("rope_theta", self.rope_theta, above=0)
        if self.positions is None:
            object.__setattr__(self, "positions", Rotary(theta=self.rope_theta))
        elif isinstance(self.positions, Rotary) and self.positions.theta != self.rope_theta:
            if self.rope_theta != 10_000.0:
                raise ValueError(
                    "rope_theta and positions.theta must agree; got "
                    f"rope_theta={self.rope_theta}, positions.theta={self.positions.theta}"
                )
            object.__setattr__(self, "rope_theta", self.positions.theta)
        elif not isinstance(self.positions, Rotary) and self.rope_theta != 10_000.0:
            kind = type(self.positions).__name__
            raise ValueError(f"rope_theta is for Rotary positions, not for {kind}")
        if isinstance(self.positions, Rotary) and self.d_head % 2:
            raise ValueError(
                f"d_head must be even to rotate pairs of channels; got d_head={self.d_head}"
            )
        scaling = self.positions.scaling if isinstance(self.positions, Rotary) else None
        if isinstance(scaling, NTKScaling) and self.d_head == 2:
            raise ValueError(
                "d_head must be greater than 2 with NTK scaling, whose exponent is "
                f"d_head / (d_head - 2); got d_head={self.d_head}"
            )
        if isinstance(self.positions, Sinusoidal) and self.d_model % 2:
            raise ValueError(
                f"d_model must be even for sinusoidal positions; got d_model={self.d_model}"
            )

    def replace(self, **changes: Any) -> ModelConfig:
        """Copy with changes; derived sizes left at their default are derived again.

        `dataclasses.replace` would keep the old d_ff and d_head when d_model changes.
        """
        if self.d_ff == default_d_ff(self.d_model):
            changes.setdefault("d_ff", None)
        if self.num_kv_heads == self.num_heads:
            changes.setdefault("num_kv_heads", None)
        if self.d_head * self.num_heads == self.d_model:
            changes.setdefault("d_head", None)
        if "rope_theta" in changes and isinstance(self.positions, Rotary):
            changes.setdefault(
                "positions", dataclasses.replace(self.positions, theta=changes["rope_theta"])
            )
        elif "positions" in changes:
            changes.setdefault("rope_theta", 10_000.0)
        check_keys(changes, [f.name for f in dataclasses.fields(self)])
        return dataclasses.replace(self, **changes)
