"""Configs to and from plain values, TOML and JSON.

A composed field is a table with a `type`: `ffn = {type = "moe", num_experts = 8, …}`. Unknown and
missing keys are refused by name.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from scratchlm.config.model import ModelConfig
from scratchlm.config.parts import (
    MLP,
    Attention,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    MoE,
    NoNorm,
    NoPositions,
    NTKScaling,
    RMSNorm,
    Rotary,
    Sinusoidal,
    SwiGLU,
    YarnScaling,
)
from scratchlm.errors import ScratchLMError, check_keys
from scratchlm.untrusted import MAX_CONFIG_BYTES, read_json, read_toml

# The values of a table's `type`, for each field that holds a table.
_KINDS: dict[str, dict[str, type]] = {
    "positions": {
        "rotary": Rotary,
        "learned": Learned,
        "sinusoidal": Sinusoidal,
        "none": NoPositions,
    },
    "ffn": {"swiglu": SwiGLU, "mlp": MLP, "moe": MoE},
    "norm": {"rmsnorm": RMSNorm, "layernorm": LayerNorm, "none": NoNorm},
    "attention": {"attention": Attention},
    "scaling": {
        "linear": LinearScaling,
        "ntk": NTKScaling,
        "yarn": YarnScaling,
        "llama3": Llama3Scaling,
    },
}
_TYPE_NAMES = {kind: word for kinds in _KINDS.values() for word, kind in kinds.items()}


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Write a config as plain values; `from_dict` reads them back to an equal config."""
    table = _to_plain(config)
    del table["rope_theta"]  # a shorthand for positions.theta
    return table


def from_dict(values: Any) -> ModelConfig:
    """Read what `to_dict` wrote; unknown and missing keys are refused by name."""
    if not isinstance(values, dict):
        raise TypeError(f"a model config must be a table; got {type(values).__name__}")
    return _build(ModelConfig, values, "")


def to_json(config: ModelConfig) -> str:
    """Write a config as JSON text."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def to_toml(config: ModelConfig) -> str:
    """Write a config as TOML text."""
    return toml_text(to_dict(config))


def load_config(path: str | Path) -> ModelConfig:
    """Read a config from a `.toml` or `.json` file."""
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"a config file must end in .toml or .json; got {path}")
    try:
        if path.suffix == ".toml":
            table = read_toml(path)
        else:
            table = read_json(path, MAX_CONFIG_BYTES)
    except ScratchLMError as error:
        raise ValueError(str(error)) from None
    try:
        return from_dict(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def toml_text(table: dict[str, Any], prefix: str = "") -> str:
    """Write nested tables of plain values as TOML (the standard library only reads it)."""
    lines = [f"{key} = {_toml_value(v)}" for key, v in table.items() if not isinstance(v, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", toml_text(value, f"{prefix}{key}.").rstrip("\n")]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    raise TypeError(f"cannot write {value!r} as TOML")


def _to_plain(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    table = {
        field.name: _to_plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) is not None  # TOML has no null; None is the default
    }
    if isinstance(value, (ModelConfig, Attention)):  # the field has only one type
        return table
    return {"type": _TYPE_NAMES[type(value)], **table}


_T = TypeVar("_T")


def _build(cls: type[_T], values: dict[str, Any], prefix: str) -> _T:
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kinds = ["type"] * (cls in _TYPE_NAMES and cls is not Attention)
    check_keys(values, [*fields, *kinds], prefix)
    missing = [
        prefix + name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ValueError(f"missing config key: {', '.join(missing)}")
    return cls(**{key: _build_field(key, value, prefix) for key, value in values.items()})


def _build_field(key: str, value: Any, prefix: str) -> Any:
    if key not in _KINDS or value is None:
        return value
    if not isinstance(value, dict):
        raise TypeError(f"{prefix}{key} must be a table; got {value!r}")
    table = dict(value)
    kind = table.pop("type", "attention" if key == "attention" else None)
    if not isinstance(kind, str) or kind not in _KINDS[key]:
        words = ", ".join(_KINDS[key])
        raise ValueError(f"{prefix}{key}.type must be one of {words}; got {kind!r}")
    return _build(_KINDS[key][kind], table, f"{prefix}{key}.")
