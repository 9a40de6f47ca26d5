"""A probabilistic grammar with memory: its notation, its states and their transitions.

Notation of a sentence:

    sat          the word itself
    $pet         the value of a variable; sampled and remembered at its first mention
    $who.she     a form of that value: its pronoun, the verb that agrees with it
    ~size        a word sampled anew each time and not remembered
    @search      one of a list of sentences
    @sign:mood   one of a list that depends on a variable, which may stay latent

A state is the remaining symbols and the remembered variables. Each transition from a state has a
probability and emits one word or none. The first list is "story"; after a story's last word
comes END, and then the next story begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

END = "<|endoftext|>"

Distribution = dict[str, float]  # value -> probability


@dataclass(frozen=True)
class Variable:
    """The distribution of a variable, or one for each value of the variable it depends on."""

    distribution: Distribution = field(default_factory=dict)
    depends_on: str = ""
    distributions: Mapping[str, Distribution] = field(default_factory=dict)
    other_than: str = ""  # a variable whose value is excluded

    def given(self, memory: Mapping[str, str]) -> Distribution:
        """Return the distribution, given the remembered variables."""
        distribution = (
            self.distributions[memory[self.depends_on]] if self.depends_on else self.distribution
        )
        if self.other_than not in memory:
            return distribution
        remaining = {
            value: p for value, p in distribution.items() if value != memory[self.other_than]
        }
        total = math.fsum(remaining.values())
        return {value: p / total for value, p in remaining.items()}


@dataclass(frozen=True, order=True)
class State:
    """The remaining symbols, and the remembered variables sorted by name."""

    remaining: tuple[str, ...]
    memory: tuple[tuple[str, str], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Cached: states are looked up far more often than made, and `remaining` may be long.
        object.__setattr__(self, "_hash", hash((self.remaining, self.memory)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Transition:
    """With this probability, emit a word (None: nothing) and go to a state."""

    probability: float
    word: str | None
    to: State


START = State(("@story",))


@dataclass(frozen=True, eq=False)
class Grammar:
    """A world: lists of sentences, variables, independent words, inflected forms of values."""

    sentences: Mapping[str, Distribution]
    variables: Mapping[str, Variable] = field(default_factory=dict)
    independent: Mapping[str, Distribution] = field(default_factory=dict)
    forms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _transitions: dict[State, tuple[Transition, ...]] = field(default_factory=dict, repr=False)
    _needs: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        distributions = {**self.sentences, **self.independent}
        for name, variable in self.variables.items():
            distributions |= {
                f"{name} {value}".strip(): distribution
                for value, distribution in variable.distributions.items()
            }
            if not variable.depends_on:
                distributions[name] = variable.distribution
        for name, distribution in distributions.items():
            if not math.isclose(math.fsum(distribution.values()), 1.0, abs_tol=1e-12):
                raise ValueError(
                    f"probabilities must sum to 1; those of {name!r} do not: {distribution}"
                )

    def transitions(self, state: State) -> tuple[Transition, ...]:
        """List the transitions from a state."""
        if state not in self._transitions:
            self._transitions[state] = tuple(self._list_transitions(state))
        return self._transitions[state]

    def _list_transitions(self, state: State) -> list[Transition]:
        if not state.remaining:
            return [Transition(1.0, END, START)]
        symbol, rest, memory = state.remaining[0], state.remaining[1:], dict(state.memory)
        name, _, detail = symbol[1:].replace(":", ".").partition(".")
        if symbol[0] == "@":
            if detail and detail not in memory:
                return self._draw(detail, None, state.remaining, memory)
            chosen = self.sentences[f"{name}:{memory[detail]}" if detail else name]
            return [
                Transition(p, None, self._state((*sentence.split(), *rest), memory))
                for sentence, p in chosen.items()
            ]
        if symbol[0] == "~":
            return [
                Transition(p, word, self._state(rest, memory))
                for word, p in self.independent[name].items()
            ]
        if symbol[0] != "$":
            return [Transition(1.0, symbol, self._state(rest, memory))]
        if name not in memory:
            return self._draw(name, detail, rest, memory)
        return [Transition(1.0, self._inflect(memory[name], detail), self._state(rest, memory))]

    def _draw(
        self, name: str, form: str | None, remaining: tuple[str, ...], memory: dict[str, str]
    ) -> list[Transition]:
        """Sample a variable and emit it in a form; form None: it stays latent."""
        return [
            Transition(
                p,
                None if form is None else self._inflect(value, form),
                self._state(remaining, memory | {name: value}),
            )
            for value, p in self.variables[name].given(memory).items()
        ]

    def _inflect(self, value: str, form: str) -> str:
        return self.forms[form][value] if form else value

    def _state(self, remaining: tuple[str, ...], memory: dict[str, str]) -> State:
        """Make a state that remembers only the variables its remaining symbols depend on."""
        if remaining not in self._needs:
            self._needs[remaining] = frozenset().union(*(self._symbol_needs[s] for s in remaining))
        needed = self._needs[remaining]
        return State(remaining, tuple(sorted(item for item in memory.items() if item[0] in needed)))

    @cached_property
    def _symbol_needs(self) -> dict[str, frozenset[str]]:
        """For each symbol, the variables that its expansions refer to."""
        lists = {
            name: " ".join(distribution).split() for name, distribution in self.sentences.items()
        }
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
