"""From the messages of a chat request to token ids: the model's own template, or a known format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from scratchlm.errors import ScratchLMError
from scratchlm.inference.chat import ROLES, Conversing, Message, TemplateFormat, chat_format
from scratchlm.inference.loading import Loaded
from scratchlm.inference.prompts import AnyTokenizer
from scratchlm.serve.refusals import Refusal, bad_field
from scratchlm.tokenizer.chat_encoding import encode_chat
from scratchlm.tokenizer.chat_template import ChatTemplate

# What clients send back of an answer they were given; empty, they ask for nothing.
EMPTY_PARTS = ("tool_calls", "function_call", "refusal", "audio", "annotations")


@dataclass(frozen=True)
class ChatPrompts:
    """How a model is spoken to, if it can be."""

    loaded: Loaded
    format: Conversing | None
    problem: str = ""

    @property
    def template(self) -> ChatTemplate | None:
        """The model's own template, where it is what is used."""
        return self.format.template if isinstance(self.format, TemplateFormat) else None

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return self.format.stop if self.format is not None else ()

    def end_ids(self) -> set[int]:
        """Return the tokens that end an answer."""
        found = set(self.loaded.eos_ids)
        if self.format is not None:
            found |= set(self.format.end_ids(self.loaded.need_tokenizer()))
        return found

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Encode a conversation, by default up to and including the assistant's header.

        A special token in a message is its letters, never the marker.
        """
        if self.format is None:
            raise Refusal(400, self.problem, field="messages", code="no_chat_format")
        tokenizer, template, given = self.loaded.need_tokenizer(), self.template, variables or {}
        check_length(self.loaded, sum(len(m["content"]) for m in messages), "messages")
        if template is None:
            self._check_plain(messages, given, add_generation_prompt)
        for name in ("messages", "add_generation_prompt", "template", "tokenizer"):
            if name in given:
                raise bad_field("chat_template_kwargs", f"must not set {name}")
        try:
            if template is None:
                plain = [Message(m["role"], m["content"]) for m in messages]
                return self.format.encode(plain, tokenizer)
            if unread := given.keys() - (template.variables() if given else ()):
                rule = f"the model's chat template does not read {min(unread)!r:.60}"
                raise bad_field("chat_template_kwargs", rule)
            encode = partial(
                encode_chat,
                template,
                tokenizer=tokenizer,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
            return _with_names_read(messages, encode)
        except (ScratchLMError, ValueError, TypeError, StopIteration) as error:
            raise bad_field("messages", f"{error}"[:300]) from None

    def _check_plain(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        add_generation_prompt: bool,
    ) -> None:
        """Refuse what only a template of the model's own can do."""
        for name, asked in (
            ("chat_template_kwargs", bool(variables)),
            ("add_generation_prompt", not add_generation_prompt),
            ("messages", any("name" in message for message in messages)),
        ):
            if asked:
                what = "a message's name" if name == "messages" else "this"
                raise bad_field(name, f"{what} needs a chat template of the model's own")


def _with_names_read(
    messages: Sequence[dict[str, Any]], encode: Callable[[Sequence[dict[str, Any]]], list[int]]
) -> list[int]:
    """Encode messages; refuse names of a role whose names change nothing."""
    ids = encode(messages)
    for role in {m["role"] for m in messages if "name" in m}:
        unnamed = [
            {key: value for key, value in m.items() if key != "name" or m["role"] != role}
            for m in messages
        ]
        if encode(unnamed) == ids:
            rule = f"the model's chat template does not read the name of a message of role {role}"
            raise bad_field("messages", rule)
    return ids


def find_chat_prompts(loaded: Loaded, name: str | None) -> ChatPrompts:
    """Return how a model is spoken to: by the format named, its own template, or its markers."""
    if loaded.tokenizer is None:
        return ChatPrompts(loaded, None, "chat needs a tokenizer, and the model has none")
    try:
        return ChatPrompts(loaded, chat_format(loaded.tokenizer, name, loaded.chat_template))
    except ScratchLMError:
        if name is not None:
            raise
        return ChatPrompts(
            loaded,
            None,
            "the model has no chat format: no template, and no role markers in its tokenizer; "
            "/v1/completions continues texts (serve --chat-format plain lets it chat all the same)",
        )


def read_messages(value: Any, most: int) -> list[dict[str, Any]]:
    """Return messages as role and text (and name), or raise the rule that is broken."""
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise ValueError(f"must be 1 to {most} messages; got {value!r:.60}")
    return [_read_message(message, f"[{at}]") for at, message in enumerate(value)]


def _read_message(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{at} must be an object; got {value!r:.60}")
    for name, given in value.items():
        if name in EMPTY_PARTS and not given:
            continue
        if name not in ("role", "content", "name"):
            raise ValueError(f"{at}.{name:.60} is not supported; got {given!r:.60}")
    role = value.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise ValueError(f"{at}.role must be one of {', '.join(ROLES)}; got {role!r:.60}")
    message = {"role": role, "content": _read_content(value.get("content"), at)}
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str) or len(name) > 256:
            raise ValueError(f"{at}.name must be a short text; got {name!r:.60}")
        message["name"] = name
    return message


def _read_content(value: Any, at: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{at}.content must be a text; got {value!r:.60}")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or len(part) != 2:
            raise ValueError(f"{at}.content may have parts of text only; got {part!r:.60}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{at}.content may have parts of text only; got {part!r:.60}")
        texts.append(part["text"])
    return "".join(texts)


def check_length(loaded: Loaded, characters: int, field: str) -> None:
    """Refuse a text that can only be longer than the context, before it is encoded."""
    tokenizer, context = loaded.need_tokenizer(), loaded.config.context_length
    if characters > context * longest_token(tokenizer):
        raise Refusal(
            400,
            f"{field}: must fit the context of {context} tokens; "
            f"got a text of {characters} characters",
            field=field,
            code="context_length_exceeded",
        )


@lru_cache(maxsize=4)
def longest_token(tokenizer: AnyTokenizer) -> int:
    """Return the bytes of the longest token: no token stands for more characters."""
    return max(map(len, tokenizer.vocab.values()), default=1)
