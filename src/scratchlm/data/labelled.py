"""Records with an answer for a task head: a text and its label; a question, a context, a span.

    {"text": "I liked it", "label": "good"}
    {"question": "Who was it?", "context": "It was Ann.", "answer": "Ann"}

A label is a text or a whole number. An answer is a part of its context: where it stands twice,
"answer_start" says which is meant, in characters. An encoded text ends with the number of its
label, which is no token of it; of an encoded context, the tokens of the answer are marked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scratchlm.data.conversations import AnyTokenizer, Example
from scratchlm.data.records import check_text, need_fields, read_records
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer.task_inputs import question_ids, text_ids


def find_labels(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the labels that occur in a file, sorted."""
    found = {label for _, label in _each(path, label_of)}
    if len(found) < 2:
        raise ScratchLMError(f"{os.fspath(path)}: two labels at least must occur; got {len(found)}")
    return tuple(sorted(found, key=lambda label: (len(label) if label.isdecimal() else 0, label)))


def label_of(record: Mapping[str, Any]) -> str:
    """Return a record's label."""
    need_fields(record, "text", "label")
    label = record["label"]
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise ValueError(f"label must be a text or a whole number; got {label!r:.40}")
    return str(label)


def read_classified(
    path: str | os.PathLike[str], tokenizer: AnyTokenizer, labels: Sequence[str], longest: int
) -> list[Example]:
    """Encode every text of a file, its label's number behind it."""
    numbers = {label: number for number, label in enumerate(labels)}

    def encode(record: Mapping[str, Any]) -> Example:
        label = label_of(record)
        if label not in numbers:
            raise ValueError(f"label {label!r:.40} does not occur in the training data")
        ids = _fitting(text_ids(tokenizer, check_text(record, "text")), longest)
        return Example([*ids, numbers[label]], [False] * (len(ids) + 1))

    return [example for _, example in _each(path, encode)]


def read_answered(
    path: str | os.PathLike[str], tokenizer: AnyTokenizer, longest: int
) -> list[Example]:
    """Encode every question and context of a file, the answer's tokens marked."""

    def encode(record: Mapping[str, Any]) -> Example:
        context, answer, start = answer_in(record)
        asked = question_ids(tokenizer, check_text(record, "question"), context)
        ids = _fitting(asked.ids, longest)
        first, last = asked.tokens_of(start, start + len(answer))
        return Example(ids, [first <= i <= last for i in range(len(ids))])

    return [example for _, example in _each(path, encode)]


def answer_in(record: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return a record's context, its answer, and where in the context that begins."""
    need_fields(record, "context", "question", "answer")
    context, answer = check_text(record, "context"), check_text(record, "answer")
    start = record.get("answer_start")
    if not answer.strip():
        raise ValueError("answer must not be empty")
    if start is None:
        start = context.find(answer)
        if context.find(answer, start + 1) > start:
            raise ValueError("the answer stands in the context twice: answer_start says which")
    if type(start) is not int or start < 0 or context[start : start + len(answer)] != answer:
        raise ValueError(f"the answer {answer!r:.40} is no part of the context there")
    return context, answer, start


def _fitting(ids: list[int], longest: int) -> list[int]:
    if len(ids) > longest:
        raise ValueError(f"{len(ids):,} tokens do not fit in rows of {longest:,}")
    return ids


def _each(
    path: str | os.PathLike[str], work: Callable[[Mapping[str, Any]], Any]
) -> Iterator[tuple[str, Any]]:
    """Do something for every record; what is wrong is said with its place."""
    for place, record in read_records(path):
        try:
            yield place, work(record)
        except (TypeError, ValueError) as error:
            raise ScratchLMError(f"{place}: {error}") from None
