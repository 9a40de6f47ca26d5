"""A grammar of stories with memory: how a world is written down, and the moves it allows.

Notation of a sentence:

    sat          the word itself
    $pet         the value of a variable; drawn, remembered and said at its first mention
    $who.she     a form of that value: its pronoun, the verb that agrees with it
    ~size        a word drawn anew each time and forgotten
    @search      one of a list of sentences
    @sign:mood   one of a list that depends on a variable, which need never be said

A state is what is left to say and what is remembered. From a state there are moves, each with its
probability; a move says one word or none. The first list is "story"; after a story's last word
comes END, and then the next story begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

END = "<|endoftext|>"

Law = dict[str, float]  # what there is to choose from, with probabilities


@dataclass(frozen=True)
class Variable:
    """What a variable may be: one law, or one for each value of the variable it depends on."""

    law: Law = field(default_factory=dict)
    depends_on: str = ""
    laws: Mapping[str, Law] = field(default_factory=dict)
    other_than: str = ""  # a variable whose value is taken

    def given(self, memory: Mapping[str, str]) -> Law:
        """Return the law, given what is remembered."""
        law = self.laws[memory[self.depends_on]] if self.depends_on else self.law
        if self.other_than not in memory:
            return law
        left = {value: p for value, p in law.items() if value != memory[self.other_than]}
        total = math.fsum(left.values())
        return {value: p / total for value, p in left.items()}


@dataclass(frozen=True, order=True)
class State:
    """What is left to say, and the variables that are remembered, in order of their names."""

    left: tuple[str, ...]
    memory: tuple[tuple[str, str], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Kept: states are looked up far more often than made, and what is left may be long.
        object.__setattr__(self, "_hash", hash((self.left, self.memory)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Move:
    """With this probability, say a word (None: say nothing) and go on to a state."""

    probability: float
    word: str | None
    to: State


START = State(("@story",))


@dataclass(frozen=True, eq=False)
class Grammar:
    """A world: lists of sentences, variables, words drawn freely, and the forms of values."""

    sentences: Mapping[str, Law]
    variables: Mapping[str, Variable] = field(default_factory=dict)
    freely: Mapping[str, Law] = field(default_factory=dict)
    forms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _moves: dict[State, tuple[Move, ...]] = field(default_factory=dict, repr=False)
    _needs: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        laws = {**self.sentences, **self.freely}
        for name, variable in self.variables.items():
            laws |= {f"{name} {value}".strip(): law for value, law in variable.laws.items()}
            if not variable.depends_on:
                laws[name] = variable.law
        for name, law in laws.items():
            if not math.isclose(math.fsum(law.values()), 1.0, abs_tol=1e-12):
                raise ValueError(f"probabilities must sum to 1; those of {name!r} do not: {law}")

    def moves(self, state: State) -> tuple[Move, ...]:
        """List what may happen next in a state."""
        if state not in self._moves:
            self._moves[state] = tuple(self._list_moves(state))
        return self._moves[state]

    def _list_moves(self, state: State) -> list[Move]:
        if not state.left:
            return [Move(1.0, END, START)]
        symbol, rest, memory = state.left[0], state.left[1:], dict(state.memory)
        name, _, detail = symbol[1:].replace(":", ".").partition(".")
        if symbol[0] == "@":
            if detail and detail not in memory:
                return self._draw(detail, None, state.left, memory)
            chosen = self.sentences[f"{name}:{memory[detail]}" if detail else name]
            return [
                Move(p, None, self._state((*sentence.split(), *rest), memory))
                for sentence, p in chosen.items()
            ]
        if symbol[0] == "~":
            return [
                Move(p, word, self._state(rest, memory)) for word, p in self.freely[name].items()
            ]
        if symbol[0] != "$":
            return [Move(1.0, symbol, self._state(rest, memory))]
        if name not in memory:
            return self._draw(name, detail, rest, memory)
        return [Move(1.0, self._said(memory[name], detail), self._state(rest, memory))]

    def _draw(
        self, name: str, form: str | None, left: tuple[str, ...], memory: dict[str, str]
    ) -> list[Move]:
        """Draw a variable and say it in a form; form None: keep it to oneself."""
        return [
            Move(
                p,
                None if form is None else self._said(value, form),
                self._state(left, memory | {name: value}),
            )
            for value, p in self.variables[name].given(memory).items()
        ]

    def _said(self, value: str, form: str) -> str:
        return self.forms[form][value] if form else value

    def _state(self, left: tuple[str, ...], memory: dict[str, str]) -> State:
        """Make a state that remembers only what the words still to come depend on."""
        if left not in self._needs:
            self._needs[left] = frozenset().union(*(self._symbol_needs[s] for s in left))
        needed = self._needs[left]
        return State(left, tuple(sorted(item for item in memory.items() if item[0] in needed)))

    @cached_property
    def _symbol_needs(self) -> dict[str, frozenset[str]]:
        """For each symbol, the variables that what it may come to say refers to."""
        lists = {name: " ".join(law).split() for name, law in self.sentences.items()}
        needs: dict[str, frozenset[str]] = {}

        def find(symbol: str) -> frozenset[str]:
            if symbol not in needs:
                needs[symbol] = frozenset()
                name, _, detail = symbol[1:].replace(":", ".").partition(".")
                if symbol[0] == "$":
                    variable = self.variables[name]
                    needs[symbol] = frozenset({name, variable.depends_on, variable.other_than})
                elif symbol[0] == "@":
                    mine = [n for n in lists if n == name or (detail and n.startswith(f"{name}:"))]
                    words = (word for n in mine for word in lists[n])
                    needs[symbol] = frozenset({detail}).union(*map(find, words))
            return needs[symbol]

        for symbol in ("@story", *(word for words in lists.values() for word in words)):
            find(symbol)
        return needs
