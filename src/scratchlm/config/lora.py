"""What a low-rank adapter is: which layers it joins, and how.

y = W x + s · B A x,  s = α / r, or α / √r with rsLoRA       arXiv:2106.09685, arXiv:2312.03732
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from scratchlm.errors import check_keys

MAX_RANK = 65_536  # wider than any layer it could be of use to


@dataclass(frozen=True)
class LoRA:
    """A low-rank adapter's settings."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0  # of the adapter's input, in training
    # Names of layers: the last word (q_proj), or a pattern of the whole (layers.0.*). Empty: every
    # Linear of the blocks.
    targets: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False  # a magnitude beside the direction, arXiv:2402.09353

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be a whole number >= 1; got rank={self.rank!r}")
        if self.rank > MAX_RANK:
            raise ValueError(f"rank must not exceed {MAX_RANK:,}; got rank={self.rank}")
        if not (isinstance(self.alpha, int | float) and 0 < self.alpha < math.inf):
            raise ValueError(f"alpha must be finite and above 0; got alpha={self.alpha!r}")
        if not (isinstance(self.dropout, int | float) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout must lie in [0, 1); got dropout={self.dropout!r}")
        if isinstance(self.targets, str) or not all(
            isinstance(word, str) and word for word in self.targets
        ):
            raise TypeError(f"targets must be names of layers; got targets={self.targets!r}")
        object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scale(self) -> float:
        """The factor s before B A x."""
        divisor = math.sqrt(self.rank) if self.rslora else self.rank
        return self.alpha / divisor

    def matches(self, name: str) -> bool:
        """Say whether the adapter joins the Linear of this name."""
        if not self.targets:
            return name.startswith("layers.") and not name.endswith(".router")
        return any(name.endswith(f".{word}") or fnmatchcase(name, word) for word in self.targets)

    def to_dict(self) -> dict[str, Any]:
        """Write as plain values."""
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_dict(cls, values: Any) -> LoRA:
        """Read plain values; unknown keys are refused by name."""
        if not isinstance(values, dict):
            raise TypeError(f"lora must be a table; got {type(values).__name__}")
        check_keys(values, [field.name for field in fields(cls)], "lora.")
        return cls(**{**values, "targets": tuple(values.get("targets", ()))})
