"""The fields of every request: what each may be, in one table, read here and shown in OpenAPI.

A field is honoured, or the request is refused with 400 that names it. A field of OpenAI's that
asks for what is not here is in the table with its neutral values only. `null` is as left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scratchlm.serve.refusals import Refusal, bad_field

Schema = dict[str, Any]
INT64 = 2**63 - 1


@dataclass(frozen=True)
class Field:
    """What a field may be: a reader that raises ValueError with the rule, and its JSON schema."""

    read: Callable[[Any], Any]
    schema: Schema
    default: Any = None
    required: bool = field(default=False, kw_only=True)


def boolean(default: bool | None = False) -> Field:
    """A truth value."""
    return Field(_of_type(bool, "true or false"), {"type": "boolean"}, default)


def integer(low: int, high: int, default: int | None = None) -> Field:
    """A whole number within limits."""

    def read(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number in [{low}, {high}]; got {value!r:.60}")
        return value

    return Field(read, {"type": "integer", "minimum": low, "maximum": high}, default)


def number(
    low: float, high: float, default: float | None = None, *, open_low: bool = False
) -> Field:
    """A number within limits."""
    name = "exclusiveMinimum" if open_low else "minimum"

    def read(value: Any) -> float:
        ok = not isinstance(value, bool) and isinstance(value, int | float)
        if not ok or not (low < value if open_low else low <= value) or not value <= high:
            left = "(" if open_low else "["
            raise ValueError(f"must be a number in {left}{low:g}, {high:g}]; got {value!r:.60}")
        return float(value)

    return Field(read, {"type": "number", name: low, "maximum": high}, default)


def text(most: int, default: str | None = None) -> Field:
    """A text of bounded length."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"must be a text of at most {most} characters; got {value!r:.60}")
        return value

    return Field(read, {"type": "string", "maxLength": most}, default)


def only(*values: Any) -> Field:
    """A field of which only these neutral values can be honoured."""

    def read(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in values):
            allowed = " or ".join(json.dumps(one) for one in values)
            raise ValueError(f"is not supported beyond {allowed}; got {value!r:.60}")
        return value

    return Field(read, {"enum": list(values)})


def refused() -> Field:
    """A field that is known and cannot be honoured."""

    def read(value: Any) -> Any:
        raise ValueError(f"is not supported; got {value!r:.60}")

    return Field(read, {"type": "null"})


def stop_strings(most: int, longest: int) -> Field:
    """A stop string, or several."""
    one = {"type": "string", "minLength": 1, "maxLength": longest}

    def read(value: Any) -> list[str]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > most:
            raise ValueError(f"must be a text or at most {most} of them; got {value!r:.60}")
        for string in listed:
            if not isinstance(string, str) or not 1 <= len(string) <= longest:
                raise ValueError(f"must be texts of 1 to {longest} characters; got {string!r:.60}")
        return listed

    return Field(read, {"anyOf": [one, {"type": "array", "items": one, "maxItems": most}]}, ())


def biases(most: int, vocab_size: int) -> Field:
    """What is added to the logits of some tokens, by token id."""

    def read(value: Any) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > most:
            raise ValueError(f"must be an object of at most {most} token ids; got {value!r:.60}")
        found = {}
        for key, bias in value.items():
            is_id = key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size
            if not is_id:
                raise ValueError(f"must name token ids in [0, {vocab_size}); got {key!r:.60}")
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise ValueError(f"must hold numbers in [-100, 100]; got {bias!r:.60}")
            if not -100 <= bias <= 100:
                raise ValueError(f"must hold numbers in [-100, 100]; got {bias!r:.60}")
            if int(key) in found:
                raise ValueError(f"must name a token once; got {key!r} again")
            found[int(key)] = float(bias)
        return found

    values = {"type": "number", "minimum": -100, "maximum": 100}
    schema = {"type": "object", "additionalProperties": values, "maxProperties": most}
    return Field(read, {**schema, "propertyNames": {"pattern": "^[0-9]+$"}}, {})


def token_ids(vocab_size: int, most: int) -> Field:
    """A list of token ids."""
    item = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    schema = {"type": "array", "items": item, "maxItems": most}
    return Field(lambda value: check_ids(value, vocab_size, most), schema, ())


def check_ids(value: Any, vocab_size: int, most: int) -> list[int]:
    """Return a list of token ids, or raise the rule."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"must be at most {most} token ids; got {value!r:.60}")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab_size:
        return value  # as below, at the speed of C
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"must hold token ids in [0, {vocab_size}); got {token!r:.60}")
    return value


def required(one: Field) -> Field:
    """Make a field one that must be there."""
    return Field(one.read, one.schema, one.default, required=True)


def _of_type(kind: type, name: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"must be {name}; got {value!r:.60}")
        return value

    return read


Table = Mapping[str, Field]


def read_fields(body: Any, table: Table) -> dict[str, Any]:
    """Return every field's value, its default where it is left out; refuse what is not known."""
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object; got {body!r:.60}")
    for name in body:
        if name not in table:
            raise Refusal(400, f"unknown field {name!r:.60}", field=name[:60], code="unknown_field")
    values = {}
    for name, one in table.items():
        value = body.get(name)
        if value is None:
            if one.required:
                raise bad_field(name, "is required; got none")
            values[name] = one.default
            continue
        try:
            values[name] = one.read(value)
        except ValueError as error:
            raise bad_field(name, str(error)) from None
    return values


def parse_json(data: bytes, max_depth: int) -> Any:
    """Parse a body in UTF-8; refuse names given twice, NaN, ∞ and deep nesting."""
    try:
        text = data.decode("utf-8-sig")  # `json` would let UTF-16 in, and surrogates as bytes
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise Refusal(400, f"the body must not nest deeper than {max_depth}") from None
    except ValueError as error:
        raise Refusal(400, f"the body must be JSON: {error}"[:200]) from None
    if _is_deeper(value, max_depth):
        raise Refusal(400, f"the body must not nest deeper than {max_depth}")
    if isinstance(value, dict) and b"\\u" in data:
        _check_unicode(value)
    return value


def _check_unicode(body: dict[str, Any]) -> None:
    """Refuse half a surrogate pair, which no text in UTF-8 can hold."""
    for name, value in body.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            field = name.encode(errors="replace").decode()[:60]
            raise bad_field(field, "must be Unicode text; got half a surrogate pair") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r:.60} stands there twice")
        found[name] = value
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value] if type(value) in _NESTS else []
    for _ in range(depth):
        level = [inner for outer in level for inner in _nested(outer)]
    return bool(level)


def _nested(outer: dict[str, Any] | list[Any]) -> list[Any]:
    """Return the objects and arrays in one; a long array of numbers is passed over quickly."""
    values = outer.values() if isinstance(outer, dict) else outer
    if _NESTS.isdisjoint(map(type, values)):
        return []
    return [inner for inner in values if type(inner) in _NESTS]


_NESTS = frozenset({dict, list})
