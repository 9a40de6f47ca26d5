"""Rotary positions in GGUF: keys for linear and YaRN scaling, a tensor for Llama 3's.

`rope_freqs.weight` holds what each frequency is divided by. GGUF has no keys for Llama 3's
parameters: we write some of our own, and find them from the divisors in a file that has none. What
does not give these divisors back is refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from scratchlm.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from scratchlm.errors import ScratchLMError
from scratchlm.interop.gguf_types import FLOAT32, STRING, UINT32

if TYPE_CHECKING:
    from scratchlm.interop.gguf_config import KeyReader, Keys

_LOW, _HIGH = 1.0, 4.0  # of every Llama 3 there is
_OWN_KEYS = tuple(f"scratchlm.rope.{key}" for key in ("factor", "low_freq", "high_freq"))
_CLOSE = 1e-5  # how near a fit must come: the divisors are float32


# Reading


def read_rope(
    reader: KeyReader, context_length: int, d_head: int, rope_freqs: list[float] | None
) -> Rotary:
    """Read the rotary positions of a file; the layout is the architecture's."""
    theta = reader.number("rope.freq_base", 10_000.0)
    kind = reader.get("rope.scaling.type", "none")
    original = reader.whole("rope.scaling.original_context_length", context_length)
    reader.only("rope.scaling.yarn_log_multiplier", 0.0)
    reader.only("rope.scaling.yarn_ext_factor", 1.0)
    factor = reader.number("rope.scaling.factor", 1.0)
    temperature = reader.number("rope.scaling.attn_factor", 1.0)
    fast = reader.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = reader.number("rope.scaling.yarn_beta_slow", 1.0)
    scaling: RopeScaling | None = None
    if kind == "yarn":
        ours = None if temperature == 1 else temperature * _yarn_temperature(factor)
        scaling = YarnScaling(factor, original, fast, slow, ours)
    elif temperature != 1:
        raise ValueError(f"{reader.prefix}rope.scaling.attn_factor is for YaRN; got {temperature}")
    elif kind == "linear":
        scaling = LinearScaling(factor)
    elif kind != "none":
        raise ValueError(
            f"{reader.prefix}rope.scaling.type must be none, linear or yarn; got {kind!r:.60}"
        )
    if rope_freqs is not None:
        if scaling is not None or reader.prefix != "llama.":
            raise ValueError("rope_freqs.weight is for the llama architecture without scaling.type")
        own = [reader.metadata.get(key) for key in _OWN_KEYS]
        scaling = _llama3(rope_freqs, theta, d_head, original, own if None not in own else None)
    return Rotary(theta, "half", scaling)


def _yarn_temperature(factor: float) -> float:
    """Return what YaRN multiplies by unless told otherwise; GGUF's attn_factor multiplies that."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def llama3_divisors(scaling: Llama3Scaling, theta: float, d_head: int) -> list[float]:
    """Return what Llama 3's scaling divides each frequency by."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    divisors = []
    for cycles in _cycles(scaling.original_context_length, theta, d_head):
        kept = min(1.0, max(0.0, (cycles - low) / (high - low)))
        divisors.append(1 / (kept + (1 - kept) / scaling.factor))
    return divisors


def _cycles(length: int, theta: float, d_head: int) -> list[float]:
    """Return how often each pair of channels goes around within a context."""
    return [length * theta ** (-2 * i / d_head) / (2 * math.pi) for i in range(d_head // 2)]


def _llama3(
    divisors: list[float], theta: float, d_head: int, original: int, own: list[Any] | None
) -> Llama3Scaling:
    """Find a Llama 3 scaling with these divisors; several may have them, all the same model."""
    if len(divisors) != d_head // 2:
        raise ValueError(f"rope_freqs.weight must hold {d_head // 2} numbers; got {len(divisors)}")
    tried = [] if own is None else [Llama3Scaling(own[0], original, own[1], own[2])]
    factor = max(divisors)
    if not (math.isfinite(factor) and factor > 1 and min(divisors) > 0):
        raise ValueError("rope_freqs.weight must hold Llama 3's divisors, of which one exceeds 1")
    tried += [Llama3Scaling(factor, length, _LOW, _HIGH) for length in (original, 8192)]
    # On the ramp the share kept, k, is (cycles − low) / (high − low): a line through two points.
    ramp = [
        (cycles, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for cycles, divisor in zip(_cycles(original, theta, d_head), divisors, strict=True)
        if 1 + _CLOSE < divisor < factor * (1 - _CLOSE)
    ]
    if len(ramp) > 1 and ramp[0][1] != ramp[-1][1]:
        (x, k), (last_x, last_k) = ramp[0], ramp[-1]
        width = (x - last_x) / (k - last_k)  # high − low
        low = x - k * width
        if low > 0 and width > 0:
            tried.append(Llama3Scaling(factor, original, low, low + width))
    for scaling in tried:
        found = llama3_divisors(scaling, theta, d_head)
        if all(abs(a / b - 1) < _CLOSE for a, b in zip(found, divisors, strict=True)):
            return scaling
    raise ValueError("rope_freqs.weight holds divisors that are not Llama 3's")


# Writing


def write_rope(config: ModelConfig, architecture: str) -> Keys:
    """Write the rotary positions of a config."""
    if not isinstance(config.positions, Rotary):
        return {}
    theta, scaling = float(config.positions.theta), config.positions.scaling
    words: dict[str, tuple[int, Any]] = {}
    own: Keys = {}
    match scaling:
        case NTKScaling(factor=factor):  # only a larger base: no key of its own
            theta *= factor ** (config.d_head / (config.d_head - 2))
        case LinearScaling(factor=factor):
            words = {"type": (STRING, "linear"), "factor": (FLOAT32, factor)}
        case YarnScaling():
            words = _write_yarn(scaling)
        case Llama3Scaling() if architecture != "llama":
            raise ScratchLMError(
                f"GGUF cannot represent this model: its {architecture} has no Llama 3 scaling"
            )
        case Llama3Scaling():
            words = {"original_context_length": (UINT32, scaling.original_context_length)}
            numbers = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
            own = {key: (FLOAT32, number) for key, number in zip(_OWN_KEYS, numbers, strict=True)}
    keys = {f"{architecture}.rope.scaling.{key}": value for key, value in words.items()}
    return {f"{architecture}.rope.freq_base": (FLOAT32, theta), **keys, **own}


def _write_yarn(scaling: YarnScaling) -> dict[str, tuple[int, Any]]:
    if not scaling.truncate:
        raise ScratchLMError(
            "GGUF cannot represent this model: its YaRN always rounds the ends of the ramp"
        )
    words = {
        "type": (STRING, "yarn"),
        "factor": (FLOAT32, scaling.factor),
        "original_context_length": (UINT32, scaling.original_context_length),
        "yarn_beta_fast": (FLOAT32, scaling.beta_fast),
        "yarn_beta_slow": (FLOAT32, scaling.beta_slow),
    }
    if scaling.attention_factor is not None:
        relative = scaling.attention_factor / _yarn_temperature(scaling.factor)
        words["attn_factor"] = (FLOAT32, relative)
    return words
