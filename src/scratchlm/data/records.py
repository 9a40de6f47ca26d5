"""Records to fine-tune on, line by line: JSON Lines or Parquet; an error names the line.

{"messages": [{"role": "user", "content": "…"}, …]}       a chat; the assistant's part is learnt
{"prompt": "…", "completion": "…"}                         a pair; the completion is learnt
{"text": "…"}                                              plain text; all of it is learnt
{"prompt": …, "chosen": …, "rejected": …}                  a preference; texts or messages
"""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from typing import Any

from scratchlm.data.reading import open_parquet
from scratchlm.data.sources import Source, find_sources
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import open_regular, parse_json, shown

Record = dict[str, Any]
MAX_LINE_BYTES = 64 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMS = {
    "chat": ("messages",),
    "preference": ("chosen", "rejected"),
    "pair": ("prompt", "completion"),
    "text": ("text",),
}


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[str, Record]]:
    """Yield every record of a file with its place: "FILE: line 3"."""
    sources = find_sources([path])
    for source in sources:
        if source.kind == "parquet":
            yield from _parquet_rows(source)
        elif source.kind == "jsonl" and not source.gzipped:
            yield from _json_lines(source)
        else:
            raise ScratchLMError(f"{source.name}: records are read from .jsonl or .parquet files")


def _json_lines(source: Source) -> Iterator[tuple[str, Record]]:
    with open_regular(source.path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            place = f"{source.name}: line {number:,}"
            if len(line) == MAX_LINE_BYTES:
                raise ScratchLMError(f"{place}: must be shorter than {MAX_LINE_BYTES:,} bytes")
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            if text.strip():
                record = parse_json(text, place)
                _check_surrogates(record, place)
                yield place, record


def _parquet_rows(source: Source) -> Iterator[tuple[str, Record]]:
    import pyarrow

    with open_parquet(source) as file:
        number = 0
        try:
            for batch in file.iter_batches(256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{source.name}: row {number:,}", _without_nulls(row)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            why = " ".join(str(error).split())[:120]
            raise ScratchLMError(f"{source.name}: not a Parquet file, or damaged ({why})") from None


def _without_nulls(value: Any) -> Any:
    """Leave out what Parquet writes as null: a field that other rows have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _check_surrogates(record: Record, place: str) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ScratchLMError(f"{place}: it holds half a surrogate pair") from None


def form_of(record: Mapping[str, Any]) -> str:
    """Name a record's form by its fields."""
    for form, fields in FORMS.items():
        if all(field in record for field in fields):
            return form
    got = ", ".join(shown(name) for name in list(record)[:8]) or "none"
    raise ValueError(
        f"a record has messages; prompt and completion; text; or chosen and rejected; it has {got}"
    )


def need_fields(record: Mapping[str, Any], *names: str) -> None:
    """Refuse a record that lacks a field."""
    for name in names:
        if name not in record:
            raise ValueError(f"a record must have {', '.join(names)}; {name} is missing")


def check_messages(messages: Any, what: str = "messages") -> list[dict[str, Any]]:
    """Refuse what is not a conversation."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{what} must be a list with at least one message")
    for index, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"{what}: message {index} must be an object; got {shown(message)}")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{what}: the role of message {index} must be one of {', '.join(ROLES)}; "
                f"got {shown(message.get('role'))}"
            )
        content = message.get("content")
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise ValueError(f"{what}: the content of message {index} must be text")
        if message.get("weight", 1) != 1:  # OpenAI's way to leave an answer out
            raise ValueError(
                f"{what}: the weight of message {index} must be 1, as every answer is learnt; "
                f"got {shown(message['weight'])}"
            )
    return messages


def check_text(record: Mapping[str, Any], field: str) -> str:
    """Return a field that must be text."""
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(f"{field} must be text; got {type(value).__name__}")
    return value
