"""Rotary positions as config.json says them, in both of the ways it has said them.

Before transformers 5: `rope_theta` at the top and `rope_scaling` beside it. Since: both inside
`rope_parameters`. The scaling's kind is `rope_type`, once `type`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scratchlm.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)

# What each kind must say, and what it may say besides rope_theta.
_MUST = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {"factor"},
}
_MAY = {
    "dynamic": {"original_max_position_embeddings"},
    "yarn": {
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_rope(table: Mapping[str, Any], context_length: int, default_theta: float) -> Rotary:
    """Read the rotary positions of a config; always in the half layout, which files have."""
    says = _parameters(table)
    theta = says.pop("rope_theta", default_theta)
    kinds = {says.pop(key) for key in ("rope_type", "type") if says.get(key) is not None}
    if len(kinds) > 1:
        raise ValueError(f"rope_type and type must agree; got {sorted(map(str, kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in _MUST:
        raise ValueError(f"rope_type must be one of {', '.join(_MUST)}; got {kind!r:.80}")
    if says.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor must be 1: every channel is rotated")
    unknown = says.keys() - _MUST[kind] - _MAY.get(kind, set())
    if unknown:
        raise ValueError(f"unknown key for rope_type {kind}: {', '.join(sorted(unknown))}")
    missing = _MUST[kind] - says.keys()
    if missing:
        raise ValueError(f"rope_type {kind} needs {', '.join(sorted(missing))}")
    return Rotary(_number("rope_theta", theta), "half", _scaling(kind, says, context_length))


def _parameters(table: Mapping[str, Any]) -> dict[str, Any]:
    """Gather what the config says of rotation, wherever it says it; places must agree."""
    says: dict[str, Any] = {}
    for place in ("rope_parameters", "rope_scaling"):
        inner = table.get(place)
        if inner is None:
            continue
        if not isinstance(inner, dict) or any(isinstance(v, (dict, list)) for v in inner.values()):
            raise ValueError(f"{place} must be one flat table for all layers; got {inner!r:.80}")
        inner = {key: value for key, value in inner.items() if value is not None}
        if says and {**inner, **says} != {**says, **inner}:
            raise ValueError("rope_parameters and rope_scaling must agree")
        says |= inner
    top = table.get("rope_theta")
    if top is not None and says.setdefault("rope_theta", top) != top:
        raise ValueError(
            f"rope_theta must be the same at the top and inside; got {top} and {says['rope_theta']}"
        )
    return says


def _scaling(kind: str, says: dict[str, Any], context_length: int) -> RopeScaling | None:
    number = {key: value for key, value in says.items() if key != "truncate"}
    number = {key: _number(key, value) for key, value in number.items()}
    original = says.get("original_max_position_embeddings", context_length)
    match kind:
        case "linear":
            return LinearScaling(number["factor"])
        case "llama3":
            return Llama3Scaling(
                number["factor"], original, number["low_freq_factor"], number["high_freq_factor"]
            )
        case "yarn":
            return YarnScaling(
                number["factor"],
                original,
                number.get("beta_fast") or 32.0,
                number.get("beta_slow") or 1.0,
                _attention_factor(number),
                says.get("truncate", True),
            )
        case "dynamic" if original != context_length:
            raise ValueError(
                "rope_type dynamic is read for sequences within max_position_embeddings; got "
                f"original_max_position_embeddings={original}, {context_length} positions"
            )
    # `dynamic` changes nothing up to max_position_embeddings, where our context ends.
    return None


def _attention_factor(number: Mapping[str, float]) -> float | None:
    """Return YaRN's factor where it is said outright or through two mscales."""
    if "attention_factor" in number:
        return number["attention_factor"]
    above, below = number.get("mscale"), number.get("mscale_all_dim")
    if not above or not below:
        return None
    log = math.log(number["factor"]) if number["factor"] > 1 else 0.0
    return (0.1 * above * log + 1.0) / (0.1 * below * log + 1.0)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {name}={value!r:.80}")
    if not abs(value) < 1e30:
        raise ValueError(f"{name} must be a number of a credible size; got {name}={value!r:.80}")
    return float(value)


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Write rotary positions in both ways: tools of either age read them."""
    says = _rope_parameters(config)
    scaling = {key: value for key, value in says.items() if key != "rope_theta"}
    return {
        "rope_parameters": says,
        "rope_theta": says["rope_theta"],
        "rope_scaling": None if says["rope_type"] == "default" else scaling,
    }


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    positions = config.positions
    assert isinstance(positions, Rotary)
    says: dict[str, Any] = {"rope_theta": float(positions.theta), "rope_type": "default"}
    match positions.scaling:
        case LinearScaling(factor=factor):
            says |= {"rope_type": "linear", "factor": float(factor)}
        case NTKScaling(factor=factor):  # a larger base is all it is, and no file has a word for it
            says["rope_theta"] *= factor ** (config.d_head / (config.d_head - 2))
        case Llama3Scaling() as llama3:
            says |= {
                "rope_type": "llama3",
                "factor": float(llama3.factor),
                "low_freq_factor": float(llama3.low_freq_factor),
                "high_freq_factor": float(llama3.high_freq_factor),
                "original_max_position_embeddings": llama3.original_context_length,
            }
        case YarnScaling() as yarn:
            says |= {
                "rope_type": "yarn",
                "factor": float(yarn.factor),
                "original_max_position_embeddings": yarn.original_context_length,
                "beta_fast": float(yarn.beta_fast),
                "beta_slow": float(yarn.beta_slow),
                "truncate": yarn.truncate,
            }
            if yarn.attention_factor is not None:
                says["attention_factor"] = float(yarn.attention_factor)
    return says
