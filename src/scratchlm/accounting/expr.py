"""Symbolic formulas: evaluate, print, and serialise to plain data.

    S, d = Sym("S"), Sym("d")
    f = 8 * S * d**2
    f.value({"S": 1024, "d": 1600})     20971520000
    f.symbols()                         8·S·d²
    f.numbers({"S": 1024, "d": 1600})   8 × 1,024 × 1,600²
    f.data()                            ["*", 8, "S", ["^", "d", 2]]

Whole numbers stay whole and exact at any size. `a / b` is whole where b divides a, a float
otherwise. An interpreter of `data()` (the page has one, in the browser) needs eight
operators: + − * / ^ min max ceildiv.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Number = int | float
Env = Mapping[str, Number]

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
# A quotient inside a product gets parentheses: 2·(S·(S + 1) / 2) cannot be misread.
_BINDING = {"+": 1, "-": 1, "/": 2, "*": 3, "^": 4, "min": 9, "max": 9, "ceildiv": 9}


class Expr:
    """A number, a symbol, or an operator with its arguments."""

    def value(self, env: Env) -> Number:
        """Evaluate with every symbol bound by `env`."""
        raise NotImplementedError

    def data(self) -> Any:
        """Write as plain values: a number, a symbol's name, or [operator, argument, …]."""
        raise NotImplementedError

    def render(self, leaf: Callable[[Expr], str], times: str, outer: int = 0) -> str:
        """Print with `leaf` for numbers and symbols and `times` between factors."""
        raise NotImplementedError

    def symbols(self) -> str:
        """Print the formula with its symbols."""
        return self.render(_leaf_symbol, "·")

    def numbers(self, env: Env) -> str:
        """Print the formula with the numbers in."""
        return self.render(lambda leaf: number_text(leaf.value(env)), " × ")

    def names(self) -> set[str]:
        """Return the symbols it uses."""
        raise NotImplementedError

    def __add__(self, other: Expr | Number) -> Expr:
        return _flat("+", self, lift(other))

    def __radd__(self, other: Expr | Number) -> Expr:
        return _flat("+", lift(other), self)

    def __sub__(self, other: Expr | Number) -> Expr:
        return self if lift(other) == Num(0) else Op("-", (self, lift(other)))

    def __rsub__(self, other: Expr | Number) -> Expr:
        return Op("-", (lift(other), self))

    def __mul__(self, other: Expr | Number) -> Expr:
        return _flat("*", self, lift(other))

    def __rmul__(self, other: Expr | Number) -> Expr:
        return _flat("*", lift(other), self)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return self if lift(other) == Num(1) else Op("/", (self, lift(other)))

    def __rtruediv__(self, other: Expr | Number) -> Expr:
        return Op("/", (lift(other), self))

    def __pow__(self, power: int) -> Expr:
        return Op("^", (self, Num(power)))


@dataclass(frozen=True)
class Num(Expr):
    """A constant of a formula."""

    number: Number

    def value(self, env: Env) -> Number:
        """Return the constant."""
        return self.number

    def data(self) -> Any:
        """Write as a number."""
        return self.number

    def render(self, leaf: Callable[[Expr], str], times: str, outer: int = 0) -> str:
        """Print the constant."""
        return leaf(self)

    def names(self) -> set[str]:
        """Return no symbol."""
        return set()


@dataclass(frozen=True)
class Sym(Expr):
    """A named quantity; `SYMBOLS` in symbols.py says what each one is."""

    name: str

    def value(self, env: Env) -> Number:
        """Look the symbol up."""
        return env[self.name]

    def data(self) -> Any:
        """Write as its name."""
        return self.name

    def render(self, leaf: Callable[[Expr], str], times: str, outer: int = 0) -> str:
        """Print the symbol or its number."""
        return leaf(self)

    def names(self) -> set[str]:
        """Return its own name."""
        return {self.name}


@dataclass(frozen=True)
class Op(Expr):
    """An operator and its arguments."""

    op: str
    args: tuple[Expr, ...]

    def value(self, env: Env) -> Number:
        """Evaluate the arguments, then the operator."""
        return _EVALUATE[self.op]([arg.value(env) for arg in self.args])

    def data(self) -> Any:
        """Write as [operator, argument, …]."""
        return [self.op, *(arg.data() for arg in self.args)]

    def names(self) -> set[str]:
        """Return the symbols of the arguments."""
        return set().union(*(arg.names() for arg in self.args))

    def render(self, leaf: Callable[[Expr], str], times: str, outer: int = 0) -> str:
        """Print, in parentheses where the surrounding operator binds more tightly."""
        mine = _BINDING[self.op]
        if self.op in ("min", "max"):
            return f"{self.op}({', '.join(arg.render(leaf, times) for arg in self.args)})"
        if self.op == "ceildiv":
            a, b = (arg.render(leaf, times, 4) for arg in self.args)
            return f"⌈{a} / {b}⌉"
        if self.op == "^":
            base, power = self.args
            return base.render(leaf, times, 5) + leaf(power).translate(_SUPERSCRIPTS)
        right = {"-": 2, "/": 4}.get(self.op, mine)  # a − (b − c), a / (b·c)
        first, *others = self.args
        terms = [first.render(leaf, times, mine), *(a.render(leaf, times, right) for a in others)]
        sign = {"*": times, "/": " / ", "+": " + ", "-": " − "}[self.op]
        text = sign.join(terms)
        return f"({text})" if mine < outer else text


def _divide(args: list[Number]) -> Number:
    a, b = args
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


_EVALUATE: dict[str, Callable[[list[Number]], Number]] = {
    "+": sum,
    "-": lambda a: a[0] - a[1],
    "*": math.prod,
    "/": _divide,
    "^": lambda a: a[0] ** a[1],
    "min": min,
    "max": max,
    "ceildiv": lambda a: -(-a[0] // a[1]),
}


def lift(value: Expr | Number) -> Expr:
    """Make a constant of a plain number."""
    return value if isinstance(value, Expr) else Num(value)


def least(*args: Expr | Number) -> Expr:
    """Return the smallest argument, as a formula."""
    return Op("min", tuple(lift(a) for a in args))


def largest(*args: Expr | Number) -> Expr:
    """Return the largest argument, as a formula."""
    return Op("max", tuple(lift(a) for a in args))


def ceil_div(a: Expr | Number, b: Expr | Number) -> Expr:
    """Return a / b rounded up, as a formula."""
    return Op("ceildiv", (lift(a), lift(b)))


def total(args: list[Expr]) -> Expr:
    """Return the sum of formulas; of none, 0."""
    result: Expr = Num(0)
    for arg in args:
        result = result + arg
    return result


def number_text(value: Number) -> str:
    """Format a number inside a formula: 1,600 or 0.5 or 9.89e14."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _leaf_symbol(leaf: Expr) -> str:
    return leaf.name if isinstance(leaf, Sym) else number_text(leaf.value({}))


def _flat(op: str, left: Expr, right: Expr) -> Expr:
    """Join into one n-ary sum or product, its constants folded into one.

    So 2·(2·B·S·d) reads 4·B·S·d, and x + 0 and 1·x read x.
    """
    args = [*_terms(op, left), *_terms(op, right)]
    constant = _EVALUATE[op]([a.number for a in args if isinstance(a, Num)])
    rest = [a for a in args if not isinstance(a, Num)]
    if op == "*" and constant == 0:
        return Num(0)
    if constant != (1 if op == "*" else 0) or not rest:
        rest.insert(0 if op == "*" else len(rest), Num(constant))
    return rest[0] if len(rest) == 1 else Op(op, tuple(rest))


def _terms(op: str, expr: Expr) -> tuple[Expr, ...]:
    return expr.args if isinstance(expr, Op) and expr.op == op else (expr,)
