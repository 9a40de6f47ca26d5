"""Tasks as plain files: JSON Lines, one case a line, all of one kind, told by its keys.

    text      {"text": "…"}
    choice    {"context": "…", "choices": [" a", " b"], "answer": 0}
    answer    {"prompt": "…", "answer": "…", "stop": ["\\n"], "max_new_tokens": 64}
    next      {"context": "The cat sat on the", "next": " mat"}

`answer` of a prompt may be a list: any of them is right. A line that is none of these is refused
with its number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import brief, open_regular, parse_json, shown

MAX_LINE_BYTES = 16 << 20
MAX_NEW_TOKENS = 64
STOP = ("\n",)


@dataclass(frozen=True)
class Text:
    """A document: how well is it predicted?"""

    text: str


@dataclass(frozen=True)
class Choice:
    """A context with continuations, one of which is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Answer:
    """A prompt whose greedy continuation is compared with the right answers."""

    prompt: str
    answers: tuple[str, ...]
    stop: tuple[str, ...] = STOP
    max_new_tokens: int | None = None  # None: MAX_NEW_TOKENS, half the model's context at most


@dataclass(frozen=True)
class Next:
    """A context and the word that follows."""

    context: str
    word: str


Case = Text | Choice | Answer | Next
KINDS: dict[str, type] = {"text": Text, "choice": Choice, "answer": Answer, "next": Next}
# kind: the keys it must have, and those it may have
_KEYS = {
    "text": ({"text"}, set()),
    "choice": ({"context", "choices", "answer"}, set()),
    "answer": ({"prompt", "answer"}, {"stop", "max_new_tokens"}),
    "next": ({"context", "next"}, set()),
}


@dataclass(frozen=True)
class Task:
    """Cases of one kind, under a name."""

    name: str
    kind: str
    cases: tuple[Any, ...]


def read_task(path: str | os.PathLike[str]) -> Task:
    """Read a task's file; its name is the file's, without the ending."""
    path = Path(path)
    with open_regular(path) as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        return parse_task(lines, path.name.removesuffix(path.suffix), str(path))


def parse_task(lines: Iterable[bytes], name: str, where: str | None = None) -> Task:
    """Read a task's lines; `where` names them in errors."""
    where, cases, kind = where or name, list[Case](), ""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        at = f"{where}: line {number}"
        if len(line) >= MAX_LINE_BYTES:
            raise ScratchLMError(f"{at}: must not exceed {MAX_LINE_BYTES:,} bytes")
        table = parse_json(line, at)
        try:
            json.dumps(table, ensure_ascii=False).encode()
            found = _kind(table)
            if kind and found != kind:
                raise ValueError(f"a case of kind {found} among cases of kind {kind}")
            kind = found
            cases.append(_case(kind, table))
        except UnicodeEncodeError:
            raise ScratchLMError(f"{at}: it holds half a surrogate pair") from None
        except (TypeError, ValueError) as error:
            raise ScratchLMError(f"{at}: {brief(error)}") from None
    if not cases:
        raise ScratchLMError(f"{where}: holds no cases")
    return Task(name, kind, tuple(cases))


def _kind(table: Mapping[str, Any]) -> str:
    fitting = [kind for kind, (must, _) in _KEYS.items() if must <= table.keys()]
    if len(fitting) != 1:
        kinds = "; ".join(f"{kind}: {', '.join(sorted(_KEYS[kind][0]))}" for kind in _KEYS)
        raise ValueError(f"must have the keys of one kind ({kinds}); got {_names(table)}")
    must, may = _KEYS[fitting[0]]
    unknown = sorted(table.keys() - must - may)
    if unknown and fitting[0] != "text":  # a corpus has fields of its own
        raise ValueError(f"unknown key {shown(unknown[0])} in a case of kind {fitting[0]}")
    return fitting[0]


def _names(table: Mapping[str, Any]) -> str:
    return ", ".join(shown(name) for name in sorted(table)[:6]) or "none"


def _case(kind: str, table: Mapping[str, Any]) -> Case:
    match kind:
        case "text":
            return Text(_text(table, "text"))
        case "choice":
            return _choice(table)
        case "answer":
            return Answer(
                _text(table, "prompt"),
                _texts(table, "answer"),
                _texts(table, "stop") if "stop" in table else STOP,
                _limit(table["max_new_tokens"]) if "max_new_tokens" in table else None,
            )
        case _:
            return Next(_text(table, "context"), _text(table, "next"))


def _choice(table: Mapping[str, Any]) -> Choice:
    choices, answer = _texts(table, "choices"), table["answer"]
    context = table["context"]
    if not isinstance(context, str):
        raise TypeError(f"context must be a text; got {shown(context)}")
    if not isinstance(table["choices"], list) or len(choices) < 2:
        raise ValueError(f"choices must be two texts or more; got {shown(table['choices'])}")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"answer must be the number of a choice, from 0 to {len(choices) - 1}; "
            f"got {shown(answer)}"
        )
    return Choice(context, choices, answer)


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not value:
        raise TypeError(f"{key} must be a text that is not empty; got {shown(value)}")
    return value


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table[key]
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str) and one for one in values):
        raise TypeError(f"{key} must be texts that are not empty; got {shown(value)}")
    return tuple(values)


def _limit(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"max_new_tokens must be a whole number above 0; got {shown(value)}")
    return value
