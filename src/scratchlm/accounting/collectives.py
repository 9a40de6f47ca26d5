"""What GPUs send each other in a training step: every collective, its payload, and what it moves.

A ring of R ranks passes a payload around in R pieces, so that a rank sends

    all-gather, reduce-scatter    (R − 1) / R of the payload
    all-reduce                    twice that: a reduce-scatter, then an all-gather

Among data-parallel ranks (R = G_d):

    zero1   once an update: gradients reduced and scattered, the updated weights gathered
    ddp     once an update: gradients all-reduced
    fsdp    in every micro-batch: each block gathered going forward and going back, its gradients
            reduced and scattered; the ends (embedding, final norm, LM head) gathered once
    hsdp    the same among the R ranks of a node; what each then has is all-reduced over nodes

Among tensor-parallel ranks (R = G_t), in every micro-batch: each half of a layer gathers the
sequence for its products and scatters their sum; going back the same. Where the sequence does not
divide, norms are repeated and the sum is all-reduced instead.

A payload is counted before it is cut to pieces: what is padded to divide, and how it is cut into
buckets or slices, is not counted. Nor are the collectives named in `NOT_COUNTED`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scratchlm.accounting.expr import Expr, Num, lift
from scratchlm.accounting.items import Node, group, leaf
from scratchlm.accounting.memory import memory_bindings
from scratchlm.accounting.ranks import COMPUTE_COPY
from scratchlm.accounting.setup import Setup
from scratchlm.accounting.symbols import (
    B,
    G_c,
    G_d,
    G_t,
    L,
    N_all,
    N_layer,
    R,
    S,
    b_a,
    b_g,
    b_r,
    b_w,
    d,
    m,
)
from scratchlm.config import ModelConfig

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
NOT_COUNTED = {
    "scalars": "the loss, the number of targets and the gradient's norm are all-reduced",
    "norms' gradients under tp": "all-reduced, 2·L·d numbers; normed heads and routers too",
    "what checkpointing repeats under tp": "a recomputed layer gathers and scatters again",
    "latency": "a hop of a ring costs microseconds whatever its payload; times count bytes alone",
}
ACTIVATIONS = B * S * d


@dataclass(frozen=True)
class Exchange:
    """A collective as formulas: how often it runs in a step, and its payload each time."""

    name: str
    kind: str
    ranks: Expr
    count: Expr
    payload: Expr  # bytes

    @property
    def moved(self) -> Expr:
        """Return the bytes one rank sends in a step."""
        times = 2 if self.kind == ALL_REDUCE else 1
        return times * self.count * self.payload * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Collective:
    """A collective of a training step, as one rank sees it."""

    name: str
    kind: str  # all-gather, reduce-scatter or all-reduce
    ranks: int
    count: int  # in a step
    bytes: int  # the payload of all of them
    formula: str  # of these bytes
    moved: float  # bytes one rank sends


def collectives(config: ModelConfig, setup: Setup) -> list[Collective]:
    """Return every collective of one training step, of one rank."""
    env = memory_bindings(config, setup)
    return [
        Collective(
            part.name,
            part.kind,
            int(part.ranks.value(env)),
            int(part.count.value(env)),
            round((part.count * part.payload).value(env)),
            (part.count * part.payload).symbols(),
            float(part.moved.value(env)),
        )
        for part in exchanges(setup.exchange, setup.tensor_ranks > 1, _divides(config, setup))
        if part.ranks.value(env) > 1
    ]


def _divides(config: ModelConfig, setup: Setup) -> bool:
    return (setup.context or config.context_length) % setup.tensor_ranks == 0


def exchanges(exchange: str, tensor: bool, sequence: bool) -> list[Exchange]:
    """Return the formulas: among data-parallel ranks, then among tensor-parallel ones.

    `tensor`: layers are cut across GPUs; `sequence`: and the sequence of their norms divides.
    """
    return [*_among_data_ranks(exchange), *(_among_tensor_ranks(sequence) if tensor else [])]


def _among_data_ranks(exchange: str) -> list[Exchange]:
    def of(name: str, kind: str, count: Expr | int, payload: Expr) -> Exchange:
        return Exchange(name, kind, G_d, lift(count), payload)

    ends = N_all - L * N_layer
    if exchange == "zero1":
        return [
            of("gradients", REDUCE_SCATTER, 1, b_g * N_all),
            of("updated weights", ALL_GATHER, 1, COMPUTE_COPY),
        ]
    if exchange == "ddp":
        return [of("gradients", ALL_REDUCE, 1, b_g * N_all)]
    if exchange not in ("fsdp", "hsdp"):
        return []
    shared = [
        of("blocks, forward", ALL_GATHER, m * L, b_a * N_layer),
        of("ends", ALL_GATHER, m, b_w * ends),
        of("blocks, backward", ALL_GATHER, m * L, b_a * N_layer),
        of("block gradients", REDUCE_SCATTER, m * L, b_g * N_layer),
        of("end gradients", REDUCE_SCATTER, m, b_g * ends),
    ]
    if exchange == "fsdp":
        return shared
    return [
        *(replace(part, ranks=R) for part in shared),
        Exchange("block gradients, over nodes", ALL_REDUCE, G_c, m * L, b_g * N_layer / R),
        Exchange("end gradients, over nodes", ALL_REDUCE, G_c, lift(m), b_g * ends / R),
    ]


def _among_tensor_ranks(sequence: bool) -> list[Exchange]:
    def of(name: str, kind: str, count: Expr, payload: Expr) -> Exchange:
        return Exchange(name, kind, G_t, m * count, payload)

    activations = b_a * ACTIVATIONS
    loss = of("loss: maximum, sum, target", ALL_REDUCE, Num(3), 4 * B * S)
    if not sequence:
        return [
            of("embedding", ALL_REDUCE, Num(1), b_r * ACTIVATIONS),
            of("layers, forward", ALL_REDUCE, 2 * L, activations),
            loss,
            of("LM head's input, backward", ALL_REDUCE, Num(1), b_r * ACTIVATIONS),
            of("layers, backward", ALL_REDUCE, 2 * L, activations),
        ]
    return [
        of("embedding", ALL_REDUCE, Num(1), b_r * ACTIVATIONS),
        of("layers' inputs, forward", ALL_GATHER, 2 * L, activations),
        of("layers' sums, forward", REDUCE_SCATTER, 2 * L, activations),
        of("last layer's output", ALL_GATHER, Num(1), b_r * ACTIVATIONS),
        loss,
        of("LM head's input, backward", ALL_REDUCE, Num(1), b_r * ACTIVATIONS),
        of("layers' sums, backward", ALL_GATHER, 2 * L, activations),
        of("layers' inputs, backward", REDUCE_SCATTER, 2 * L, activations),
        of("first layer's input, backward", ALL_GATHER, Num(1), b_r * ACTIVATIONS),
    ]


def communication_tree(exchange: str, tensor: bool, sequence: bool) -> Node:
    """Return the bytes one GPU sends in a step, as a tree of formulas."""
    groups = []
    parts = exchanges(exchange, tensor, sequence)
    for name, ranks in (
        ("data-parallel ranks", G_d),
        ("data-parallel ranks of the node", R),
        ("other nodes", G_c),
        ("tensor-parallel ranks", G_t),
    ):
        among = [
            leaf(part.name, part.moved, note=f"{part.kind}, {part.count.symbols()} times")
            for part in parts
            if part.ranks == ranks
        ]
        if among:
            groups.append(group(f"to {name}", among))
    return group("sent", groups, "bytes")
