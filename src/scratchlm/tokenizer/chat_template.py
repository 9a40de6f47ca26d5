"""Chat templates: the jinja program with which a model's authors write a conversation down.

It lies beside `tokenizer.json`, as `chat_template.jinja` or in `tokenizer_config.json`. Rendered
text equals that of transformers' `apply_chat_template`, byte for byte. A template is a program from
outside: it runs in a process of its own (`template_child.py`), and one that does not end, grows or
reaches for more than it is given is stopped with one line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import brief, inner_file, listed, read_json, read_text, shown

TEMPLATE, CONFIG, NAMED = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "additional_chat_templates",
)
_SPECIAL_MAP = "special_tokens_map.json"
_MAX_BYTES, _MAX_TEMPLATE_BYTES, _MAX_ANSWER = 16 << 20, 1 << 20, 64 << 20
_START_SECONDS = 120.0  # for an interpreter and jinja2, on a machine that has much else to do
_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
SPECIAL_TOKENS = tuple(f"{name}_token" for name in _TOKENS)
# A message's reasoning goes by several names; templates read the first, or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and where in it the assistant speaks, if the template marks that."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A model's templates by name, and the special tokens they may mention."""

    templates: Mapping[str, str]  # "default", and others such as "tool_use"
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token and so on
    seconds: float = 10.0  # the most a rendering may take

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ChatTemplate | None:
        """Read the template that lies with a model; None where there is none."""
        directory = Path(path)
        config = _table(directory, CONFIG)
        templates = _template_files(directory) or _config_templates(directory, config)
        if not templates:
            return None
        tokens = {**_special_tokens(_table(directory, _SPECIAL_MAP)), **_special_tokens(config)}
        return cls(templates, tokens)

    def to_config(self) -> dict[str, Any]:
        """Write as the entries of a tokenizer_config.json, which `from_directory` reads."""
        only = self.templates.get("default") if len(self.templates) == 1 else None
        named = [{"name": name, "template": text} for name, text in self.templates.items()]
        return {**self.special_tokens, "chat_template": named if only is None else only}

    def to_bytes(self) -> bytes:
        """Write as a tokenizer_config.json of its own."""
        return (json.dumps(self.to_config(), indent=2) + "\n").encode()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Write a conversation down, as `apply_chat_template(…, tokenize=False)` does."""
        return self.render_marked(
            messages, add_generation_prompt=add_generation_prompt, **variables
        ).text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Rendered:
        """Render, and say what lies inside the template's `{% generation %}` blocks."""
        if not messages:
            raise ValueError("a conversation must hold at least one message; got none")
        if not all(isinstance(message, Mapping) for message in messages):
            raise TypeError("a message must be a table with role and content")
        values = {
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **variables,
            "messages": [_normalized(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._source(with_tools=values["tools"] is not None)
        answer = _RENDERER.ask(source, values, self.seconds)
        return Rendered(answer["text"], tuple((a, b) for a, b in answer["spans"]))

    def variables(self) -> frozenset[str]:
        """Return the variables the template reads; any other would change nothing."""
        answer = _RENDERER.ask(self._source(with_tools=False), None, self.seconds)
        return frozenset(answer["variables"])

    def _source(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" not in self.templates:
            raise ScratchLMError(
                f"the model has chat templates, none of them the default: {listed(self.templates)}"
            )
        return self.templates["default"]


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what is null, its reasoning under the names templates read."""
    said = {name: value for name, value in message.items() if value is not None}
    reasoning = next((said[name] for name in _REASONING if name in said), None)
    if reasoning is None:
        return said
    return {"thinking": reasoning, **said, "reasoning_content": reasoning}


# Reading


def _table(directory: Path, name: str) -> dict[str, Any]:
    if not os.path.lexists(directory / name):
        return {}
    return read_json(inner_file(directory, name), _MAX_BYTES)


def _template_files(directory: Path) -> dict[str, str]:
    """Read chat_template.jinja and the named ones beside it."""
    templates = {}
    if os.path.lexists(directory / TEMPLATE):
        templates["default"] = read_text(inner_file(directory, TEMPLATE), _MAX_TEMPLATE_BYTES)
    folder = directory / NAMED
    if folder.is_dir():
        for file in sorted(folder.glob("*.jinja")):
            templates[file.stem] = read_text(inner_file(folder, file.name), _MAX_TEMPLATE_BYTES)
    return templates


def _config_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read `chat_template`: a text, or a list of named ones."""
    given = config.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        given = [{"name": "default", "template": given}]
    entries = given if isinstance(given, list) else [None]
    named = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    if len(named) != len(entries):
        raise ScratchLMError(
            f"{directory / CONFIG}: chat_template must be a text or a list of named ones; "
            f"got {shown(given)}"
        )
    if any(len(text) > _MAX_TEMPLATE_BYTES for text in named.values()):
        raise ScratchLMError(
            f"{directory / CONFIG}: a chat template must not exceed {_MAX_TEMPLATE_BYTES:,} bytes"
        )
    return named


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Read bos_token and its kin: texts, or tables with the text as content."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


# The process that renders


class _Renderer:
    """One child process, started at the first request and again after one that was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, source: str, values: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Render in the child, or with no values list the variables a template reads.

        What it refuses, or does not finish, is one line.
        """
        request = {"template": source, "variables": values, "seconds": seconds}
        try:
            line = json.dumps(request, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"a chat template takes plain JSON values: {brief(error, 120)}"
            ) from None
        with self._lock:
            if self._owner != os.getpid() or self._child is None:
                self._start()
            try:
                answer = json.loads(self._exchange(line, seconds))
            except BaseException:
                self.close()  # whatever it was doing, its next answer would be the wrong one
                raise
        if "error" in answer:
            raise ScratchLMError(f"the chat template failed: {brief(answer['error'])}")
        return answer

    def _start(self) -> None:
        """Start the child, and wait until it has imported jinja2."""
        script = Path(__file__).with_name("template_child.py")
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        self._owner = os.getpid()
        hello = json.dumps({"template": "", "variables": {}, "seconds": 1}).encode() + b"\n"
        try:
            self._exchange(hello, _START_SECONDS)
        except ScratchLMError:
            self.close()
            raise ScratchLMError(
                "chat templates need jinja2; install the extra: pip install 'scratchlm[finetune]'"
            ) from None

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        """Send a line and wait for the answer."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        end = time.monotonic() + seconds
        fd, answer = child.stdout.fileno(), bytearray()
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading says so
            child.stdin.write(line)
            child.stdin.flush()
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise ScratchLMError(f"the chat template took longer than {seconds:g} s")
            piece = os.read(fd, 1 << 20)
            answer += piece
            if not piece or len(answer) > _MAX_ANSWER:
                raise ScratchLMError("the chat template failed: it needs too much memory")
        return bytes(answer)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)
