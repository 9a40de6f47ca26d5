"""Rotary positions in config.json, in both of its formats.

Before transformers 5: `rope_theta` at the top and `rope_scaling` beside it. Since: both inside
`rope_parameters`. The scaling's kind is `rope_type`, once `type`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, assert_never

from scratchlm.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)

# The required and optional keys of each kind, besides rope_theta.
_REQUIRED = {
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
_OPTIONAL = {
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
    parameters = _parameters(table)
    theta = parameters.pop("rope_theta", default_theta)
    kinds = {
        parameters.pop(key) for key in ("rope_type", "type") if parameters.get(key) is not None
    }
    if len(kinds) > 1:
        raise ValueError(f"rope_type and type must agree; got {sorted(map(str, kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in _REQUIRED:
        raise ValueError(f"rope_type must be one of {', '.join(_REQUIRED)}; got {kind!r:.80}")
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor must be 1: every channel is rotated")
    unknown = parameters.keys() - _REQUIRED[kind] - _OPTIONAL.get(kind, set())
    if unknown:
        raise ValueError(f"unknown key for rope_type {kind}: {', '.join(sorted(unknown))}")
    missing = _REQUIRED[kind] - parameters.keys()
    if missing:
        raise ValueError(f"rope_type {kind} needs {', '.join(sorted(missing))}")
    return Rotary(_number("rope_theta", theta), "half", _scaling(kind, parameters, context_length))


def _parameters(table: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the RoPE parameters from the places they may be in, which must agree."""
    parameters: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        inner = table.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict) or any(isinstance(v, (dict, list)) for v in inner.values()):
            raise ValueError(f"{key} must be one flat table for all layers; got {inner!r:.80}")
        inner = {key: value for key, value in inner.items() if value is not None}
        if parameters and {**inner, **parameters} != {**parameters, **inner}:
            raise ValueError("rope_parameters and rope_scaling must agree")
        parameters |= inner
    top = table.get("rope_theta")
    if top is not None and parameters.setdefault("rope_theta", top) != top:
        raise ValueError(
            "rope_theta must be the same at the top and inside; "
            f"got {top} and {parameters['rope_theta']}"
        )
    return parameters


def _scaling(kind: str, parameters: dict[str, Any], context_length: int) -> RopeScaling | None:
    numbers = {key: value for key, value in parameters.items() if key != "truncate"}
    numbers = {key: _number(key, value) for key, value in numbers.items()}
    original = parameters.get("original_max_position_embeddings", context_length)
    match kind:
        case "linear":
            return LinearScaling(numbers["factor"])
        case "llama3":
            return Llama3Scaling(
                numbers["factor"], original, numbers["low_freq_factor"], numbers["high_freq_factor"]
            )
        case "yarn":
            return YarnScaling(
                numbers["factor"],
                original,
                numbers.get("beta_fast") or 32.0,
                numbers.get("beta_slow") or 1.0,
                _attention_factor(numbers),
                parameters.get("truncate", True),
            )
        case "dynamic" if original != context_length:
            raise ValueError(
                "rope_type dynamic is read for sequences within max_position_embeddings; got "
                f"original_max_position_embeddings={original}, {context_length} positions"
            )
    # `dynamic` changes nothing up to max_position_embeddings, where our context ends.
    return None


def _attention_factor(numbers: Mapping[str, float]) -> float | None:
    """Return YaRN's attention factor if given, directly or through two mscales."""
    if "attention_factor" in numbers:
        return numbers["attention_factor"]
    mscale, mscale_all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if not mscale or not mscale_all_dim:
        return None
    log = math.log(numbers["factor"]) if numbers["factor"] > 1 else 0.0
    return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {name}={value!r:.80}")
    if not abs(value) < 1e30:
        raise ValueError(f"{name} must be a number of a plausible size; got {name}={value!r:.80}")
    return float(value)


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Write rotary positions in both formats, for old and new tools."""
    parameters = _rope_parameters(config)
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
    }


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    positions = config.positions
    assert isinstance(positions, Rotary)
    parameters: dict[str, Any] = {"rope_theta": float(positions.theta), "rope_type": "default"}
    match positions.scaling:
        case LinearScaling(factor=factor):
            parameters |= {"rope_type": "linear", "factor": float(factor)}
        case NTKScaling(factor=factor):  # only a larger base: no key of its own
            parameters["rope_theta"] *= factor ** (config.d_head / (config.d_head - 2))
        case Llama3Scaling() as llama3:
            parameters |= {
                "rope_type": "llama3",
                "factor": float(llama3.factor),
                "low_freq_factor": float(llama3.low_freq_factor),
                "high_freq_factor": float(llama3.high_freq_factor),
                "original_max_position_embeddings": llama3.original_context_length,
            }
        case YarnScaling() as yarn:
            parameters |= {
                "rope_type": "yarn",
                "factor": float(yarn.factor),
                "original_max_position_embeddings": yarn.original_context_length,
                "beta_fast": float(yarn.beta_fast),
                "beta_slow": float(yarn.beta_slow),
                "truncate": yarn.truncate,
            }
            if yarn.attention_factor is not None:
                parameters["attention_factor"] = float(yarn.attention_factor)
        case None:
            pass
        case _:
            assert_never(positions.scaling)
    return parameters
