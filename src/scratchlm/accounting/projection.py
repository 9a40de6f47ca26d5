"""A training step on several GPUs, projected from its arithmetic and its communication.

    arithmetic            t_c = m·(F_step + F_again) / (G_t·u·F_peak)
    communication         t_d = X_d / W_d among data-parallel ranks, t_t = X_t / W_t among
                          tensor-parallel ones; with hsdp also t_n = X_n / W_n between nodes
    nothing overlaps      t_c + t_d + t_n + t_t
    all that can overlaps max(t_c, t_d + t_n) + t_t: a layer waits for its tensor-parallel sums;
                          weights and gradients can travel behind the arithmetic of other layers
    tokens/s              G_d·m·B·S / seconds

u is the MFU that one GPU reaches alone, measured there or assumed. Where it holds, a real step lies
between the two times; latency, stragglers and what communication takes from arithmetic are not in
them. It is a projection, not a measurement.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from scratchlm.accounting.collectives import Collective, collectives, communication_tree
from scratchlm.accounting.expr import Expr, Number, largest
from scratchlm.accounting.fits import peak_bytes
from scratchlm.accounting.flops import Execution, flops_tree
from scratchlm.accounting.items import Item, Node, evaluate, group, leaf
from scratchlm.accounting.machines import NODE, Machine, ring_rate
from scratchlm.accounting.memory import memory_bindings
from scratchlm.accounting.ranks import DIVIDED
from scratchlm.accounting.setup import Setup, bindings
from scratchlm.accounting.symbols import (
    B,
    F_again,
    F_peak,
    F_step,
    G_d,
    G_t,
    S,
    W_d,
    W_n,
    W_t,
    X_d,
    X_n,
    X_t,
    m,
    t_c,
    t_d,
    t_n,
    t_t,
    u,
)
from scratchlm.config import ModelConfig

MAX_LINK = 1e18  # bytes/s
GPU_COUNTS = tuple(8 * 2**n for n in range(8))  # 8 … 1,024
SECONDS: dict[str, Expr] = {
    "t_c": m * (F_step + F_again) / (G_t * u * F_peak),
    "t_d": X_d / W_d,
    "t_n": X_n / W_n,
    "t_t": X_t / W_t,
}
STEP: Node = group(
    "nothing overlaps",
    [
        leaf("arithmetic", SECONDS["t_c"]),
        leaf("data-parallel communication", SECONDS["t_d"]),
        leaf("communication between nodes", SECONDS["t_n"]),
        leaf("tensor-parallel communication", SECONDS["t_t"]),
    ],
    "s",
)
APART = t_c + t_d + t_n + t_t  # seconds, nothing overlaps
TOGETHER = largest(t_c, t_d + t_n) + t_t
OVERLAPPED: Node = leaf("all that can overlaps", TOGETHER, "s")
TOKENS: Node = leaf("nothing overlaps", G_d * m * B * S / APART, "tokens/s")
TOKENS_OVERLAPPED: Node = leaf("all that can overlaps", G_d * m * B * S / TOGETHER, "tokens/s")


@dataclass(frozen=True)
class Projection:
    """What several GPUs send each other in a step, and its projected time."""

    machine: str
    gpus: int
    mfu: float  # of one GPU alone
    data_rate: float  # bytes/s in a ring of data-parallel ranks
    node_rate: float  # between nodes
    tensor_rate: float
    collectives: tuple[Collective, ...]
    sent: Item  # bytes of one GPU, by collective
    step: Item  # seconds, nothing overlapped
    overlapped: Item
    tokens: Item  # a second, of all GPUs, nothing overlapped
    tokens_overlapped: Item

    @property
    def share(self) -> float:
        """Communication's share of a step in which nothing overlaps."""
        return 1 - float(self.step.children[0].value) / float(self.step.value)


def project(
    config: ModelConfig, setup: Setup, machine: Machine, mfu: float, link: float | None = None
) -> Projection | None:
    """Project a training step; `link` (bytes/s) replaces what is known of the machine's links.

    None where no link is known.
    """
    if link is not None and not 1 <= link <= MAX_LINK:
        raise ValueError(
            f"link must be from 1e-09 to {MAX_LINK / 1e9:g} GB/s; got {link / 1e9:g} GB/s"
        )
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu must lie in (0, 1]; got {mfu}")
    known = machine.link if link is None else link
    if known is None:
        return None
    rates = (known,) * 3 if link is not None else _rates(known, setup)
    env = projection_bindings(config, setup)
    env |= {"u": mfu, "F_peak": machine.peak(setup.precision)}
    env |= dict(zip(("W_d", "W_n", "W_t"), rates, strict=True))
    found = tuple(collectives(config, setup))
    sent = evaluate(_communication(config, setup), env)
    parts = {"X_d": "to data-parallel ranks", "X_n": "to other nodes"}
    parts["X_t"] = "to tensor-parallel ranks"
    env |= {
        symbol: sum(child.value for child in sent.children if child.name.startswith(name))
        for symbol, name in parts.items()
    }
    env |= {name: formula.value(env) for name, formula in SECONDS.items()}
    steps = [evaluate(node, env) for node in (STEP, OVERLAPPED, TOKENS, TOKENS_OVERLAPPED)]
    return Projection(machine.name, setup.gpus, mfu, *rates, found, sent, *steps)


def _rates(link: float, setup: Setup) -> tuple[float, float, float]:
    """Return the bytes/s in a ring of data-parallel ranks, of nodes, and of tensor-parallel ranks.

    With hsdp every GPU of a node is in a ring of its own over the nodes, through its own adapter.
    """
    ranks = setup.tensor_ranks
    ring = setup.shards if setup.exchange == "hsdp" else setup.data_ranks
    data = ring_rate(link, ring, max(1, NODE // ranks))
    return data, ring_rate(link, 2, 1), ring_rate(link, ranks, NODE)


def _communication(config: ModelConfig, setup: Setup) -> Node:
    context = setup.context or config.context_length
    ranks = setup.tensor_ranks
    exchange = setup.exchange if setup.data_ranks > 1 else "none"
    return communication_tree(exchange, ranks > 1, context % ranks == 0)


def projection_bindings(config: ModelConfig, setup: Setup) -> dict[str, Number]:
    """Bind one rank's symbols, and the FLOPs of a micro-batch."""
    whole = bindings(config, setup)
    full, again = step_flops(config, setup.execution)
    flops = {"F_step": full.value(whole), "F_again": sum(n.value(whole) for n in again)}
    return {**memory_bindings(config, setup), **flops}


def step_flops(config: ModelConfig, execution: Execution) -> tuple[Node, tuple[Node, ...]]:
    """Return a micro-batch's FLOPs under `full`, and those that checkpointing repeats."""
    full = flops_tree(config, "training", "full")
    forward = {part.name: part for part in full.parts[0].parts[0].parts}
    repeated = {
        "attention": ("projections", "attention"),
        "ffn": ("feed-forward",),
        "block": ("projections", "attention", "feed-forward"),
    }.get(execution.checkpointing, ())
    parts = [forward[name] for name in repeated]
    layers = full.parts[0].parts[0].times
    return full, (group("repeated", parts, times=layers),) if parts else ()


# Plans


@dataclass(frozen=True)
class Plan:
    """One way to spread a model over so many GPUs, and what it comes to."""

    setup: Setup
    memory: int  # bytes of one GPU at its peak
    fits: bool
    projection: Projection

    @property
    def name(self) -> str:
        """How the GPUs share the work."""
        return plan_name(self.setup)


def plan_name(setup: Setup) -> str:
    """Name a way to share the work: zero1, fsdp × tp 8, tp 8."""
    tensor = f"tp {setup.tensor_ranks}" if setup.tensor_ranks > 1 else ""
    data = setup.exchange if setup.data_ranks > 1 else ""
    return " × ".join(word for word in (data, tensor) if word) or "none"


def plans(
    config: ModelConfig,
    setup: Setup,
    machine: Machine,
    mfu: float,
    link: float | None = None,
    counts: tuple[int, ...] = GPU_COUNTS,
) -> list[Plan]:
    """Return the ways to train on each number of GPUs, with `setup.batch` to a data-parallel rank.

    Layers are cut across `setup.tp` GPUs, or across as many of a node as divide them.
    """
    found = []
    tensor = setup.tp if setup.tp is not None and setup.tp > 1 else widest_cut(config)
    for gpus in counts:
        ways = [("zero1", 1), ("fsdp", 1), *([("hsdp", 1)] if gpus > NODE else [])]
        if tensor > 1 and gpus % tensor == 0:
            alone = gpus == tensor
            ways += [("tp", tensor)] if alone else [("zero1", tensor), ("fsdp", tensor)]
        for parallel, tp in ways:
            way = dataclasses.replace(setup, gpus=gpus, parallel=parallel, tp=tp)
            projection = project(config, way, machine, mfu, link)
            if projection is None:
                raise ValueError(f"no link speed is known of {machine.name}: give one")
            memory = peak_bytes(config, way)
            found.append(Plan(way, memory, memory <= machine.memory, projection))
    return found


def widest_cut(config: ModelConfig) -> int:
    """Return the most GPUs of a node that divide what tensor parallelism divides."""
    env = bindings(config, Setup())
    sizes = [env[name] for name in DIVIDED]
    return max(n for n in (1, 2, 4, NODE) if not any(size % n for size in sizes))
