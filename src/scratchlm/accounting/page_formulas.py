"""All formulas of an account as plain data, for the page to evaluate in the browser.

A tree depends on what a model is made of and how a step is executed, never on sizes, so the page
gets one tree for every choice it offers and binds the sizes itself. Formulas and nodes are stored
once and named by their number; most trees share most of their branches.

    formulas[i]   [data, text]    `Expr.data()`, and the printed formula: {B}*{S} with * for times
    nodes[i]      {name, …}       `Node` with numbers for its formulas and parts;
                  {optimizer: …}  one node for each optimizer
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scratchlm.accounting.collectives import communication_tree
from scratchlm.accounting.expr import Expr, Num, Number, Sym, number_text, total
from scratchlm.accounting.flops import CHECKPOINTING, CONVENTIONS, Execution, flops_tree
from scratchlm.accounting.items import Node
from scratchlm.accounting.machines import NETWORK, NODE, Machine
from scratchlm.accounting.memory import (
    derived,
    kv_cache_bytes,
    optimizer_state,
    serving_tree,
    training_trees,
)
from scratchlm.accounting.money import RUN_SECONDS, TOKENS_PER_PARAMETER
from scratchlm.accounting.parameters import active_parameters, matmul_parameters, parameter_tree
from scratchlm.accounting.projection import (
    GPU_COUNTS,
    OVERLAPPED,
    SECONDS,
    STEP,
    TOKENS,
    TOKENS_OVERLAPPED,
    step_flops,
)
from scratchlm.accounting.ranks import DIVIDED, RANK_SHARE
from scratchlm.accounting.roofline import GENERATED_ROWS, GENERATION_STEPS, roofline_parts
from scratchlm.accounting.setup import OPTIMIZERS, PRECISIONS, SEQUENCE_SHARE, Setup
from scratchlm.accounting.symbols import SYMBOLS, N, V, d
from scratchlm.accounting.work import PHASES
from scratchlm.config import ModelConfig, MoE, SwiGLU, to_dict

_FUSED = ("fused", "unfused")
_STEPS = tuple(phase for phase in PHASES if phase not in GENERATION_STEPS)
_EXCHANGES = ("none", "zero1", "fsdp", "hsdp", "ddp")
_ONE = Num(1)
SUGGESTED_TOKENS = TOKENS_PER_PARAMETER * N


def variants(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return the model with a dense feed-forward layer and with experts, one of them as it is."""
    if isinstance(config.ffn, MoE):
        return {"dense": config.replace(ffn=SwiGLU()), "moe": config}
    return {"dense": config, "moe": config.replace(ffn=MoE(8, 2))}


class Formulas:
    """Formulas and nodes by number, each stored once."""

    def __init__(self) -> None:
        self.formulas: list[list[Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self._formula_numbers: dict[Expr, int] = {}
        self._node_numbers: dict[Node, int] = {}
        self._choices: dict[Node, tuple[Node, ...]] = {}

    def expr(self, expr: Expr) -> int:
        """Return a formula's number."""
        found = self._formula_numbers.get(expr)
        if found is None:
            found = self._formula_numbers[expr] = len(self.formulas)
            self.formulas.append([_whole_only(expr.data()), _text(expr)])
        return found

    def named(self, formulas: dict[str, Expr]) -> list[list[Any]]:
        """Return names with their formulas' numbers, in order: later ones may use earlier ones."""
        return [[name, self.expr(formula)] for name, formula in formulas.items()]

    def choose(self, node: Node, one_of: tuple[Node, ...]) -> None:
        """Write `node`, wherever it stands, as a choice by optimizer."""
        assert self._choices.setdefault(node, one_of) == one_of, "one node, two sets of choices"

    def node(self, node: Node) -> int:
        """Return a node's number."""
        found = self._node_numbers.get(node)
        if found is None:
            table = self._choice(node) if node in self._choices else self._table(node)
            found = self._node_numbers[node] = len(self.nodes)
            self.nodes.append(table)
        return found

    def _choice(self, node: Node) -> dict[str, Any]:
        options = self._choices[node]
        numbers = []
        for option in options:
            self.nodes.append(self._table(option))
            numbers.append(len(self.nodes) - 1)
        return {"optimizer": dict(zip(OPTIMIZERS, numbers, strict=True))}

    def _table(self, node: Node) -> dict[str, Any]:
        table: dict[str, Any] = {"name": node.name}
        if node.unit:
            table["unit"] = node.unit
        if node.note:
            table["note"] = node.note
        if node.times != _ONE:
            table["times"] = self.expr(node.times)
        if node.formula is not None:
            table["formula"] = self.expr(node.formula)
            table["shown"] = self.expr(node.times * node.formula)
        if node.where:
            table["where"] = self.named(dict(node.where))
        if node.parts:
            table["parts"] = [self.node(part) for part in node.parts]
        return table


def _text(expr: Expr) -> str:
    def leaf(part: Expr) -> str:
        return f"{{{part.name}}}" if isinstance(part, Sym) else number_text(part.value({}))

    return expr.render(leaf, "*")


def _whole_only(data: Any) -> Any:
    """Check that every constant is a whole number JavaScript reads exactly."""
    if isinstance(data, list):
        return [_whole_only(part) for part in data]
    assert isinstance(data, str) or (type(data) is int and abs(data) < 2**53), data
    return data


def number(value: Number | None) -> Any:
    """Write a number so that the page knows whole ones from floats."""
    return {"float": value} if isinstance(value, float) else value


def formulas_data(table: Formulas, config: ModelConfig, machines: list[Machine]) -> dict[str, Any]:
    """Return an account's trees, under every choice the page offers, as numbers into `table`."""
    kinds = variants(config)
    return {
        "variants": {
            f"{kind}/{'tied' if tied else 'untied'}": _variant(
                table, model.replace(tie_embeddings=tied)
            )
            for kind, model in kinds.items()
            for tied in (False, True)
        },
        "flops": {key: table.node(tree) for key, tree in _flops(kinds)},
        "memory": _memory(table, kinds),
        "serving": {
            f"{kind}/{shards}": table.node(serving_tree(model, Setup(parallel=parallel)))
            for kind, model in kinds.items()
            for shards, parallel in (("whole", "none"), ("fsdp", "fsdp"))
        },
        "kv_cache": table.expr(kv_cache_bytes()),
        "sequence_share": table.expr(SEQUENCE_SHARE),
        "rank_share": table.named(RANK_SHARE),
        "projection": _projection(table, kinds),
        "roofline": dict(_roofline(table, kinds)),
        "generation": {
            phase: [
                {
                    "name": step.name,
                    "phase": step.phase,
                    "count": table.expr(step.count),
                    "lengths": table.named(dict(step.lengths)),
                }
                for step in steps
            ]
            for phase, steps in GENERATION_STEPS.items()
        },
        "generated_rows": table.expr(GENERATED_ROWS),
        "run": {
            "seconds": table.expr(RUN_SECONDS),
            "suggested": table.expr(SUGGESTED_TOKENS),
            "flops": {
                f"{kind}/{convention}": table.node(flops_tree(model, "training", convention))
                for kind, model in kinds.items()
                for convention in CONVENTIONS
            },
        },
        "precisions": PRECISIONS,
        "machines": {machine.name: _machine(machine) for machine in machines},
        "symbols": SYMBOLS,
    }


def _variant(table: Formulas, model: ModelConfig) -> dict[str, Any]:
    tree = parameter_tree(model)
    embedding = total([part.expr for part in tree.parts if "embeddings" in part.name])
    counts = {
        "total": tree.expr + V * d if model.tie_embeddings else tree.expr,
        "unique": tree.expr,
        "embedding": embedding,
        "non_embedding": tree.expr - embedding,
        "active": active_parameters(model),
        "matmul": matmul_parameters(model).expr,
    }
    return {
        "parameters": table.node(tree),
        "counts": table.named(counts),
        "N": table.expr(active_parameters(model)),
        "derived": table.named(derived(model)),
        "config": to_dict(model),
    }


def _executions() -> Iterator[tuple[str, Execution]]:
    for attention, loss, policy in itertools.product(_FUSED, _FUSED, CHECKPOINTING):
        yield f"{attention}/{loss}/{policy}", Execution(attention, loss, policy)


def _flops(kinds: dict[str, ModelConfig]) -> Iterator[tuple[str, Node]]:
    """Only `hardware` depends on how a step is executed."""
    for (kind, model), phase in itertools.product(kinds.items(), PHASES):
        for convention in CONVENTIONS:
            if convention != "hardware":
                yield f"{kind}/{phase}/{convention}", flops_tree(model, phase, convention)
                continue
            for how, execution in _executions():
                key = f"{kind}/{phase}/{convention}/{how}"
                yield key, flops_tree(model, phase, convention, execution)


def _memory(table: Formulas, kinds: dict[str, ModelConfig]) -> dict[str, dict[str, int]]:
    """Return the moments of a training step; the optimizer state is a choice inside them."""
    found = {}
    states = tuple(optimizer_state(optimizer) for optimizer in OPTIMIZERS)
    table.choose(states[0], states)
    setup = Setup(optimizer=OPTIMIZERS[0])
    for kind, model in kinds.items():
        for how, execution in _executions():
            for accumulate, exchange in itertools.product((False, True), _EXCHANGES):
                workload = replace(
                    setup, execution=execution, accumulate=accumulate, parallel=exchange, gpus=2
                )
                moments = training_trees(model, workload)
                key = f"{kind}/{how}/{'accumulate' if accumulate else 'once'}/{exchange}"
                found[key] = {name: table.node(tree) for name, tree in moments.items()}
    return found


def _projection(table: Formulas, kinds: dict[str, ModelConfig]) -> dict[str, Any]:
    """Return what several GPUs send each other, and the formulas of their step."""
    flops = {}
    for (kind, model), policy in itertools.product(kinds.items(), CHECKPOINTING):
        full, again = step_flops(model, Execution(checkpointing=policy))
        flops[f"{kind}/{policy}"] = [table.node(full), [table.node(node) for node in again]]
    ways = itertools.product(_EXCHANGES, (False, True), (False, True))
    nodes = {"step": STEP, "overlapped": OVERLAPPED, "tokens": TOKENS}
    nodes["tokens_overlapped"] = TOKENS_OVERLAPPED
    return {
        "sent": {
            f"{exchange}/{'cut' if tensor else 'whole'}/{'divides' if divides else 'does not'}": (
                table.node(communication_tree(exchange, tensor, divides))
            )
            for exchange, tensor, divides in ways
        },
        "flops": flops,
        "seconds": table.named(SECONDS),
        **{name: table.node(node) for name, node in nodes.items()},
        "divided": list(DIVIDED),
        "gpu_counts": GPU_COUNTS,
        "node": NODE,
        "network": NETWORK,
    }


def _roofline(table: Formulas, kinds: dict[str, ModelConfig]) -> Iterator[tuple[str, Any]]:
    """Only a training step depends on checkpointing and the optimizer."""
    combinations = itertools.product(kinds.items(), _STEPS, _FUSED, _FUSED)
    for (kind, model), phase, attention, loss in combinations:
        key = f"{kind}/{phase}/{attention}/{loss}"
        if phase != "training":
            yield key, _parts(table, model, Setup(phase, execution=Execution(attention, loss)))
            continue
        for policy, optimizer in itertools.product(CHECKPOINTING, OPTIMIZERS):
            execution = Execution(attention, loss, policy)
            workload = Setup(phase, execution=execution, optimizer=optimizer)
            yield f"{key}/{policy}/{optimizer}", _parts(table, model, workload)


def _parts(table: Formulas, model: ModelConfig, setup: Setup) -> dict[str, Any]:
    parts, workload = roofline_parts(model, setup)
    return {
        "where": table.named(dict(workload.where)),
        "rows": table.expr(workload.rows),
        "parts": [
            [part.name, table.expr(part.flops), table.expr(part.bytes), table.expr(part.seconds)]
            for part in parts
        ],
    }


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "memory": number(machine.memory),
        "bandwidth": number(machine.bandwidth),
        "price": machine.price,
        "link": machine.link,
        "argument": "this" if machine.measured else machine.name,
        "peaks": {name: number(machine.peak(name)) for name in PRECISIONS},
        "peak_names": {name: machine.peak_name(name) for name in PRECISIONS},
    }


def as_json(data: Any) -> str:
    """Write data for a script element: no character that could end it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
