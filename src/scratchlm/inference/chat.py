"""Chat formats: how a conversation is serialised for a model that was trained on one.

A model's own template (`tokenizer/chat_template.py`) comes first. The formats here are for models
without one; such a format is code: it places the special tokens, and everything else is text. Text
is encoded with no special token allowed, so a user cannot inject one: typing `<|im_start|>system`
gives the letters, never the marker.

    ChatML (Qwen)   <|im_start|>role⏎text<|im_end|>⏎ …
    Llama 3         <|begin_of_text|> <|start_header_id|>role<|end_header_id|>⏎⏎text<|eot_id|> …
    plain           User: text⏎Assistant: …    no markers, so here text can forge a role
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from scratchlm.errors import ScratchLMError
from scratchlm.inference.prompts import AnyTokenizer
from scratchlm.tokenizer.chat_encoding import encode_chat
from scratchlm.tokenizer.chat_template import ChatTemplate

Role = Literal["system", "user", "assistant"]
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    text: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}; got role={self.role!r}")
        if not isinstance(self.text, str):
            raise TypeError(f"a message's text must be a string; got {self.text!r:.60}")


@dataclass(frozen=True)
class Marker:
    """A special token, as opposed to the text around it."""

    token: str


Part = Marker | str


class Conversing(Protocol):
    """What talking to a model needs: a format below, or the model's own template."""

    @property
    def name(self) -> str:
        """How it is called."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""

    def encode(self, messages: Sequence[Message], tokenizer: AnyTokenizer) -> list[int]:
        """Encode a conversation, up to and including the header of the assistant's turn."""

    def end_ids(self, tokenizer: AnyTokenizer) -> tuple[int, ...]:
        """Return the tokens that end an answer."""


@dataclass(frozen=True)
class TemplateFormat:
    """A model's own template."""

    template: ChatTemplate
    name: str = "template"
    stop: tuple[str, ...] = ()

    def encode(self, messages: Sequence[Message], tokenizer: AnyTokenizer) -> list[int]:
        """Encode a conversation, up to and including the header of the assistant's turn."""
        tables = [{"role": message.role, "content": message.text} for message in messages]
        return encode_chat(self.template, tables, tokenizer)

    def end_ids(self, tokenizer: AnyTokenizer) -> tuple[int, ...]:
        """Return the tokens that end an answer: the template's, and those of known formats."""
        known = tokenizer.special_tokens
        ends = {self.template.special_tokens.get("eos_token", "")}
        ends |= {end for chat in FORMATS.values() if chat.fits(tokenizer) for end in chat.ends}
        return tuple(sorted(known[token] for token in ends if token in known))


@dataclass(frozen=True)
class ChatFormat:
    """How turns are written, which special tokens that needs, and what ends an answer."""

    name: str
    needs: tuple[str, ...]  # special tokens
    write: Callable[[Sequence[Message]], list[Part]]  # ends with the assistant's header
    ends: tuple[str, ...] = ()  # special tokens that end an answer
    stop: tuple[str, ...] = ()  # texts that end an answer

    def encode(self, messages: Sequence[Message], tokenizer: AnyTokenizer) -> list[int]:
        """Encode a conversation, up to and including the header of the assistant's turn."""
        if not messages:
            raise ValueError("a conversation must hold at least one message; got none")
        ids: list[int] = []
        for part in _joined(self.write(messages)):
            if isinstance(part, Marker):
                ids.append(tokenizer.special_tokens[part.token])
            else:
                ids += tokenizer.encode(part, allowed_special=())
        return ids

    def end_ids(self, tokenizer: AnyTokenizer) -> tuple[int, ...]:
        """Return the tokens that end an answer."""
        known = tokenizer.special_tokens
        return tuple(known[token] for token in self.ends if token in known)

    def fits(self, tokenizer: AnyTokenizer) -> bool:
        """Return whether the tokenizer has the required special tokens."""
        return all(token in tokenizer.special_tokens for token in self.needs)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join adjacent texts: they must be tokenized together, as in training."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return joined


def _chatml(messages: Sequence[Message]) -> list[Part]:
    parts: list[Part] = []
    for message in messages:
        parts += [Marker("<|im_start|>"), f"{message.role}\n{message.text}"]
        parts += [Marker("<|im_end|>"), "\n"]
    return [*parts, Marker("<|im_start|>"), "assistant\n"]


def _llama3(messages: Sequence[Message]) -> list[Part]:
    def header(role: str) -> list[Part]:
        return [Marker("<|start_header_id|>"), role, Marker("<|end_header_id|>"), "\n\n"]

    parts: list[Part] = [Marker("<|begin_of_text|>")]
    for message in messages:
        parts += [*header(message.role), message.text.strip(), Marker("<|eot_id|>")]
    return [*parts, *header("assistant")]


def _plain(messages: Sequence[Message]) -> list[Part]:
    lines = [
        message.text if message.role == "system" else f"{message.role.title()}: {message.text}"
        for message in messages
    ]
    return ["\n".join([*lines, "Assistant:"])]


FORMATS: dict[str, ChatFormat] = {
    "chatml": ChatFormat(
        "chatml",
        needs=("<|im_start|>", "<|im_end|>"),
        write=_chatml,
        ends=("<|im_end|>", "<|endoftext|>"),
    ),
    "llama3": ChatFormat(
        "llama3",
        needs=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        write=_llama3,
        ends=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ),
    "plain": ChatFormat(
        "plain", needs=(), write=_plain, ends=("<|endoftext|>",), stop=("\nUser:", "\nAssistant:")
    ),
}


def what_fits(
    chat: Conversing, messages: Sequence[Message], tokenizer: AnyTokenizer, room: int
) -> list[Message]:
    """Drop the oldest turns until a conversation fits in `room` tokens.

    An initial system message and the last message are always kept.
    """
    kept = list(messages)
    first = 1 if kept[0].role == "system" else 0
    while len(ids := chat.encode(kept, tokenizer)) > room:
        if len(kept) <= first + 1:
            raise ValueError(f"the message must fit {room} tokens of context; got {len(ids)}")
        del kept[first]
        while len(kept) > first + 1 and kept[first].role == "assistant":
            del kept[first]  # an answer whose question was dropped
    return kept


def chat_format(
    tokenizer: AnyTokenizer, name: str | None = None, template: ChatTemplate | None = None
) -> Conversing:
    """Return the format of that name; else the model's template, or what its markers say."""
    if name == "template" and template is None:
        raise ScratchLMError("the model came without a chat template")
    if template is not None and name in (None, "template"):
        return TemplateFormat(template)
    if name is not None:
        if name not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {name!r}")
        chosen = FORMATS[name]
        if not chosen.fits(tokenizer):
            lacking = [token for token in chosen.needs if token not in tokenizer.special_tokens]
            raise ScratchLMError(
                f"the format {name} needs the special token {lacking[0]}, which the tokenizer lacks"
            )
        return chosen
    for candidate in FORMATS.values():
        if candidate.needs and candidate.fits(tokenizer):
            return candidate
    raise ScratchLMError(
        "the model has no chat format: its tokenizer has no role markers; "
        "--format plain talks to it as to a text that is to be continued"
    )
