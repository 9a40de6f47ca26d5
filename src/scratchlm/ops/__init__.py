"""The seam between readable and fast.

A model holds one set of ops, chosen when it is built. `OPS["reference"]` is the definition,
`OPS["fast"]` the same ops at speed, and anybody may bring their own:

    model = TransformerLM(config, ops=OPS["fast"].replace(rms_norm=my_rms_norm))
"""

from __future__ import annotations

from scratchlm.ops.fast import FastOps
from scratchlm.ops.masks import CausalMask
from scratchlm.ops.reference import OP_NAMES, ReferenceOps
from scratchlm.ops.routing import Routed, load_balancing_loss

Ops = ReferenceOps  # the base of every set of ops

OPS: dict[str, Ops] = {"reference": ReferenceOps(), "fast": FastOps()}


def get_ops(ops: str | Ops) -> Ops:
    """Return the set of ops of that name, or the one handed in."""
    if isinstance(ops, Ops):
        return ops
    if ops not in OPS:
        raise ValueError(f"ops must be a set of ops or one of {', '.join(OPS)}; got {ops!r}")
    return OPS[ops]


__all__ = [
    "OPS",
    "OP_NAMES",
    "CausalMask",
    "FastOps",
    "Ops",
    "ReferenceOps",
    "Routed",
    "get_ops",
    "load_balancing_loss",
]
