"""Answers as OpenAI's clients read them: whole, and as server-sent events."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from scratchlm.inference.prompts import AnyTokenizer
from scratchlm.inference.rows import Generation, Piece, TokenLogprob
from scratchlm.serve.generation import Generate

PromptLogprobs = list[TokenLogprob | None]  # a prompt's first token has none
DONE = b"data: [DONE]\n\n"
FINISH = {"end": "stop", "stop": "stop", "length": "length", None: None}


def event(value: Any) -> bytes:
    """Write one server-sent event."""
    return b"data: " + _json(value).encode() + b"\n\n"


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


# Tokens as text


def token_text(tokenizer: AnyTokenizer | None, token: int) -> str:
    """Return a token as text that tells it from others: bytes of no character are written out."""
    data = token_bytes(tokenizer, token)
    if data is None:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: AnyTokenizer | None, token: int) -> bytes | None:
    """Return a token's bytes; a model's vocabulary may be padded beyond its tokenizer's."""
    if tokenizer is None:
        return None
    try:
        return tokenizer.token_bytes(token)
    except ValueError:
        return None


def chat_logprobs(
    tokenizer: AnyTokenizer | None, found: Sequence[TokenLogprob]
) -> dict[str, list[Any]]:
    """Return log-probabilities as chat completions give them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(tokenizer, token)
        return {
            "token": token_text(tokenizer, token),
            "logprob": _finite(logprob),
            "bytes": None if data is None else list(data),
        }

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*best) for best in one.best]}
        for one in found
    ]
    return {"content": content}


def completion_logprobs(
    tokenizer: AnyTokenizer | None,
    found: Sequence[tuple[int, TokenLogprob | None]],
    offsets_of: TextOffsets,
) -> dict[str, list[Any]]:
    """Return log-probabilities as completions give them; a text's first token has none."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, one in found:
        text = token_text(tokenizer, token)
        tokens.append(text)
        offsets.append(offsets_of.push(token_bytes(tokenizer, token) or b""))
        if one is None:
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(_finite(one.logprob))
        best = {token_text(tokenizer, i): _finite(value) for i, value in one.best}
        best.setdefault(text, _finite(one.logprob))
        tops.append(best)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


class TextOffsets:
    """Where each token begins in the text of all, in characters.

    The first `unseen` bytes are of tokens that are not in the text, as a begin-of-text is not.
    """

    def __init__(self, unseen: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length, self._unseen = 0, unseen

    def push(self, data: bytes) -> int:
        """Take the next token's bytes; return where it begins."""
        begin = self._length
        self._length += len(self._decoder.decode(data[self._unseen :]))
        self._unseen = max(self._unseen - len(data), 0)
        return begin


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # −∞ is no number of JSON


# Whole answers


class Answer:
    """Writes the answer to one request."""

    def __init__(
        self,
        request: Generate,
        name: str,
        tokenizer: AnyTokenizer | None,
        prompt_logprobs: Sequence[PromptLogprobs] | None = None,
    ) -> None:
        self.request, self.name, self.tokenizer = request, name, tokenizer
        self.prompt_logprobs = prompt_logprobs  # of each choice, where they are echoed
        self.id = ("chatcmpl-" if request.is_chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        self.num_generated = 0

    def usage(self) -> dict[str, int]:
        """Count the tokens."""
        read, written = self.request.num_prompt_tokens, self.num_generated
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the answer of a request that does not stream."""
        self.num_generated = sum(len(one.token_ids) for one in generations)
        write = self._chat_choice if self.request.is_chat else self._text_choice
        choices = []
        for index, one in enumerate(generations):
            choice = {"index": index, **write(index, one)}
            if self.request.return_token_ids:
                choice["token_ids"] = one.token_ids
                choice["prompt_token_ids"] = self.request.prompts[index]
            choices.append(choice)
        kind = "chat.completion" if self.request.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name}

    def _chat_choice(self, index: int, one: Generation) -> dict[str, Any]:
        logprobs = None
        if self.request.num_logprobs is not None:
            logprobs = chat_logprobs(self.tokenizer, one.logprobs or [])
        return {
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": FINISH[one.finish_reason],
        }

    def _text_choice(self, index: int, one: Generation) -> dict[str, Any]:
        text, logprobs = one.text, None
        if self.request.echo:
            text = self._prompt_text(index) + text
        if self.request.num_logprobs is not None:
            found = self._prompt_entries(index)
            found += [(entry.token_id, entry) for entry in one.logprobs or []]
            logprobs = completion_logprobs(self.tokenizer, found, self._offsets_of(index))
        finish = FINISH[one.finish_reason] if self.request.rows else "length"
        return {"text": text, "logprobs": logprobs, "finish_reason": finish}

    def _prompt_entries(self, index: int) -> list[tuple[int, TokenLogprob | None]]:
        """Return the tokens of an echoed prompt with their log-probabilities."""
        if self.prompt_logprobs is None:
            return []
        return list(zip(self.request.prompts[index], self.prompt_logprobs[index], strict=True))

    def _prompt_text(self, index: int) -> str:
        text = self.request.texts[index]
        return self._prompt_bytes(index).decode("utf-8", "replace") if text is None else text

    def _prompt_bytes(self, index: int) -> bytes:
        data = (token_bytes(self.tokenizer, token) for token in self.request.prompts[index])
        return b"".join(one or b"" for one in data)

    def _offsets_of(self, index: int) -> TextOffsets:
        text = self.request.texts[index]
        if text is None or not self.request.echo:
            return TextOffsets()
        return TextOffsets(len(self._prompt_bytes(index)) - len(text.encode()))


# Streams


class AnswerStream(Answer):
    """Writes the answer to one request as events."""

    def __init__(
        self,
        request: Generate,
        name: str,
        tokenizer: AnyTokenizer | None,
        prompt_logprobs: Sequence[PromptLogprobs] | None = None,
    ) -> None:
        super().__init__(request, name, tokenizer, prompt_logprobs)
        kind = "chat.completion.chunk" if request.is_chat else "text_completion"
        head = _json(self._head(kind))
        self._before = f'data: {head[:-1]},"choices":['
        self._after = ',"usage":null}\n\n' if request.include_usage else "}\n\n"
        self._offsets = [self._offsets_of(index) for index in range(len(request.prompts))]

    def first(self) -> bytes:
        """Write what comes before any answer, for every choice: the role, or the prompt's echo."""
        written = b""
        for index, ids in enumerate(self.request.prompts):
            more = {"prompt_token_ids": ids} if self.request.return_token_ids else {}
            if self.request.is_chat:
                body: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
            elif self.request.echo:
                body = {"text": self._prompt_text(index)}
            elif more:
                body = {"text": ""}
            else:
                continue
            found, logprobs = self._prompt_entries(index), None
            if found:
                logprobs = completion_logprobs(self.tokenizer, found, self._offsets[index])
            written += self._event(self._choice(index, body, logprobs, more=more))
            if not self.request.rows:  # and nothing is to be generated
                written += self._event(self._choice(index, {"text": ""}, finish="length"))
        return written

    def pieces(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """Write what has come for one choice, in one event and at most one more for its end."""
        self.num_generated += len(pieces)
        text = "".join([piece.text for piece in pieces])
        ids = [piece.token_id for piece in pieces]
        wanted = self.request.num_logprobs is not None
        logprobs = self._logprobs(index, pieces) if wanted and pieces else None
        finish = FINISH[pieces[-1].finish_reason] if pieces else None
        written = b""
        if text or logprobs is not None or (self.request.return_token_ids and ids):
            body = {"delta": {"content": text}} if self.request.is_chat else {"text": text}
            more = {"token_ids": ids} if self.request.return_token_ids else {}
            written = self._event(self._choice(index, body, logprobs, more=more))
        if finish is not None:
            end: dict[str, Any] = {"delta": {}} if self.request.is_chat else {"text": ""}
            written += self._event(self._choice(index, end, finish=finish))
        return written

    def last(self) -> bytes:
        """Write what ends the stream."""
        if not self.request.include_usage:
            return DONE
        kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
        return event({**self._head(kind), "choices": [], "usage": self.usage()}) + DONE

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, list[Any]]:
        found = [piece.logprob for piece in pieces if piece.logprob is not None]
        if self.request.is_chat:
            return chat_logprobs(self.tokenizer, found)
        entries = [(one.token_id, one) for one in found]
        return completion_logprobs(self.tokenizer, entries, self._offsets[index])

    def _choice(
        self,
        index: int,
        body: dict[str, Any],
        logprobs: dict[str, list[Any]] | None = None,
        finish: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}
        return {**choice, **(more or {})}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return f"{self._before}{_json(choice)}]{self._after}".encode()
