"""The process in which chat templates are rendered: jinja2's sandbox, with little memory and time.

A template is a program from outside. It runs here and never beside the model: it sees plain values
only, may call the methods of text, lists and tables and nothing else, has half a gigabyte, and is
killed when its seconds are over, by the parent's clock or by the system's. Run as a script: it
imports nothing of ours, reads one JSON line per request and writes one per answer.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 << 20  # bytes of address space, the interpreter's own included
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_PLAIN: tuple[type, ...] = (str, bytes, dict, list, tuple, int, float, range, *_VIEWS)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=…)` works
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have the name {name!r}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: what the assistant says, with its place noted."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Turn the tag into a call that is given what is inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_note")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        environment: Any = self.environment
        environment.spans.append((environment.written, environment.written + len(text)))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox: attributes of plain values and of jinja's own objects, nothing else."""

    spans: list[tuple[int, int]]
    written: int  # characters of the answer so far

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow public attributes of the types a template is given or makes."""
        return isinstance(obj, _ALLOWED) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once: an undefined value would be written as nothing."""
        kind = type(obj).__name__
        raise jinja2.exceptions.SecurityError(f"attribute {attribute!r} of a {kind} is unsafe")


class _Dict:
    """`dict(…)` and `dict.fromkeys(…)`, and no other attribute of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Make a table in which all keys have one value."""
        return dict.fromkeys(*args)


_OWN = (jinja2.runtime.LoopContext, jinja2.runtime.Macro, jinja2.utils.Namespace)
_ALLOWED = (*_PLAIN, *_OWN, jinja2.utils.Cycler, _Dict)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own writes HTML's characters as escapes.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def render(source: str, variables: dict[str, Any]) -> dict[str, Any]:
    """Render a template; return its text and the spans of its generation blocks."""
    template = _compiled(source)
    environment: Any = template.environment
    environment.spans, environment.written = [], 0
    pieces = []
    for piece in template.generate(variables):
        pieces.append(piece)
        environment.written += len(piece)
    return {"text": "".join(pieces), "spans": environment.spans}


def variables_of(source: str) -> list[str]:
    """Return the variables a template reads."""
    return sorted(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


def _answer(line: str) -> dict[str, Any]:
    request = json.loads(line)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + request["seconds"]) + 2
    # An orphan, whose parent no longer watches the clock, is ended by the system.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    try:
        if request["variables"] is None:
            return {"variables": variables_of(request["template"])}
        return render(request["template"], request["variables"])
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        line_number = getattr(error, "lineno", None)
        where = f" (line {line_number} of the template)" if line_number else ""
        return {"error": f"{' '.join(str(error).split())[:300] or type(error).__name__}{where}"}


def main() -> None:
    """Answer requests until the parent is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        answer = _answer(line)
        try:
            text = json.dumps(answer)
        except MemoryError:
            text = json.dumps({"error": "it needs too much memory"})
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
