"""Trees of formulas (`Node`), and the trees of numbers they become (`Item`).

A node's value is its formula, or the sum of its parts, times how often it occurs:

    group("layers", [leaf("Q projection", 2*B*S*d*H*d_h), …], times=L)

A node may have both: then the formula is the closed form of the sum, which is checked.

The tree of nodes depends on what the model is made of (an MoE has a router), never on sizes: the
same tree, evaluated with other numbers, answers for another batch, context or width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scratchlm.accounting.expr import Env, Expr, Num, Number, lift, number_text, total

_ONE = Num(1)


@dataclass(frozen=True)
class Node:
    """One line of an account: a formula, or parts to be summed, `times` over."""

    name: str
    formula: Expr | None = None
    parts: tuple[Node, ...] = ()
    unit: str = ""
    times: Expr = _ONE
    note: str = ""
    where: tuple[tuple[str, Expr], ...] = ()  # symbols defined for this node and its parts

    @property
    def expr(self) -> Expr:
        """The whole node as one formula (symbols of `where` stay symbols)."""
        inner = total([p.expr for p in self.parts]) if self.formula is None else self.formula
        return self.times * inner

    def bind(self, env: Env) -> Env:
        """Add what `where` defines."""
        for name, formula in self.where:
            env = {**env, name: formula.value(env)}
        return env

    def value(self, env: Env) -> Number:
        """Evaluate without building items: for searches and sweeps, which call it very often."""
        env = self.bind(env)
        if self.formula is None:
            return self.times.value(env) * sum(part.value(env) for part in self.parts)
        return self.times.value(env) * self.formula.value(env)

    def scaled(self, factor: Number, name: str | None = None) -> Node:
        """Return the tree with every leaf multiplied, e.g. a backward pass as 2 × the forward."""
        return Node(
            name or self.name,
            None if self.formula is None else factor * self.formula,
            tuple(part.scaled(factor) for part in self.parts),
            self.unit,
            self.times,
            self.note,
            self.where,
        )


@dataclass(frozen=True)
class Item:
    """One line of a result."""

    name: str
    symbols: str
    numbers: str
    value: Number
    unit: str
    share: float  # of the item it is part of; of the whole, 1
    times: int  # the children are counted this often in the value
    children: tuple[Item, ...] = ()
    note: str = ""

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Item]]:
        """Yield (depth, item) from the top down."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def __getitem__(self, name: str) -> Item:
        """Find the first item below with this name."""
        for _, item in self.walk():
            if item is not self and item.name == name:
                return item
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """Write as plain values, for JSON."""
        return {
            "name": self.name,
            "symbols": self.symbols,
            "numbers": self.numbers,
            "value": self.value,
            "unit": self.unit,
            "share": self.share,
            "times": self.times,
            **({"note": self.note} if self.note else {}),
            **({"children": [c.as_dict() for c in self.children]} if self.children else {}),
        }


def leaf(name: str, formula: Expr | Number, unit: str = "", note: str = "") -> Node:
    """Make a line with a formula."""
    return Node(name, lift(formula), unit=unit, note=note)


def group(
    name: str,
    parts: Sequence[Node],
    unit: str = "",
    times: Expr | Number = 1,
    closed: Expr | None = None,
    where: tuple[tuple[str, Expr], ...] = (),
) -> Node:
    """Make a line that sums its parts, `times` over; `closed` is the sum as one formula."""
    return Node(name, closed, tuple(parts), unit, lift(times), where=where)


def evaluate(node: Node, env: Env, whole: Number | None = None, unit: str = "") -> Item:
    """Evaluate a tree of formulas."""
    unit = node.unit or unit
    env = node.bind(env)
    value = node.value(env)
    times = node.times.value(env)
    children = tuple(evaluate(part, env, _per_time(value, times), unit) for part in node.parts)
    if children:
        assert value == times * sum(c.value for c in children), f"{node.name} is not its parts' sum"
    if node.formula is not None:
        numbers = (node.times * node.formula).numbers(env)
    else:
        numbers = _sum_text(node, " × ", [number_text(c.value) for c in children], env)
    return Item(
        name=node.name,
        symbols=_symbols(node),
        numbers=numbers,
        value=value,
        unit=unit,
        share=1.0 if whole is None else (value / whole if whole else 0.0),
        times=int(times),
        children=children,
        note=_note(node, env),
    )


def _note(node: Node, env: Env) -> str:
    defined = [
        f"{name} = {formula.symbols()} = {number_text(env[name])}" for name, formula in node.where
    ]
    return "; ".join(([node.note] if node.note else []) + defined)


def _per_time(value: Number, times: Number) -> Number:
    return value / times if times else 0


def _symbols(node: Node) -> str:
    if node.formula is not None:
        return (node.times * node.formula).symbols()
    return _sum_text(node, "·", [part.name for part in node.parts], None)


def _sum_text(node: Node, sign: str, terms: list[str], env: Env | None) -> str:
    text = " + ".join(terms) or "0"
    if node.times == _ONE:
        return text
    times = node.times.symbols() if env is None else node.times.numbers(env)
    return f"{times}{sign}({text})"
