"""What one of several GPUs holds of a model and its training state.

    ddp    everything, and buckets of gradients being reduced
    zero1  the weights as products read them and the gradients, whole; of float32 weights and
           moments one of R shares, and that share of the reduced gradients at the update
    fsdp   of weights, gradients and moments one of R shares; two blocks gathered at a time
    hsdp   the same, R being the ranks of one node
    tp     heads, d_ff and vocabulary divided by G_t, and the sequence of norms and
           residuals where it divides: the same formulas with smaller numbers

tp goes with each of the others.
"""

from __future__ import annotations

from dataclasses import replace

from scratchlm.accounting.expr import Expr, Num, ceil_div, least
from scratchlm.accounting.items import Node, group, leaf
from scratchlm.accounting.setup import Setup
from scratchlm.accounting.symbols import (
    G_t,
    H,
    H_kv,
    L,
    N_all,
    N_layer,
    N_wide,
    R,
    V,
    b_a,
    b_c,
    b_g,
    b_w,
    d_ff,
)

# What one of G_t ranks has, at most; of a mixture it has a part of every expert.
RANK_SHARE: dict[str, Expr] = {
    "H": H / G_t,
    "H_kv": H_kv / G_t,
    "d_ff": ceil_div(d_ff, G_t),
    "V": ceil_div(V, G_t),
}
DIVIDED = {"H": "num_heads", "H_kv": "num_kv_heads"}  # what tensor parallelism must divide
# The weights as ranks compute with them: what products alone read in the matmuls' dtype, and what
# begins or multiplies the residual stream as it is stored.
COMPUTE_COPY = b_a * (N_all - N_wide) + b_w * N_wide


def as_executed(setup: Setup) -> Setup:
    """Return the setup with what its products read their weights from."""
    how = {"zero1": "kept", "fsdp": "gathered", "hsdp": "gathered"}.get(setup.exchange)
    if how is None:
        return setup
    return replace(setup, execution=replace(setup.execution, weights=how))


def split(setup: Setup) -> Expr:
    """Return how many ranks weights and gradients are divided among."""
    return R if setup.exchange in ("fsdp", "hsdp") else Num(1)


def weights(setup: Setup) -> Node:
    """Return the weights a rank holds all the time."""
    if setup.exchange != "zero1":
        return leaf("weights", b_w * N_all / split(setup))
    beside = least(b_w, 2 * b_c)  # float32 beside 16 bits; without 16 bits there is one kind
    parts = [
        leaf("for the products", COMPUTE_COPY, note="whole; norms, biases, embeddings as stored"),
        leaf("to update", beside * (N_all - N_wide) / R, note="this rank's share of the matrices"),
    ]
    return group("weights", parts)


def parallel_buffers(setup: Setup) -> list[Node]:
    """Return what is gathered, or being reduced, while a step runs."""
    if setup.exchange == "ddp":
        return [leaf("gradient buckets", b_g * N_all, note="DDP's copy, being reduced")]
    if setup.exchange in ("fsdp", "hsdp"):
        low = b_a  # blocks are gathered in the dtype they compute in
        return [
            leaf("gathered blocks", 2 * low * N_layer, note="this one and the next"),
            leaf("gathered ends", b_w * (N_all - L * N_layer), note="embedding and LM head"),
            leaf("block gradient to scatter", b_g * N_layer),
        ]
    return []
