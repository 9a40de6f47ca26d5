"""Records as token ids, and which of them are learnt: what the assistant says, nothing else.

A prompt is encoded by itself, as it is when the model is used, and so is each answer: where one
ends and the other begins is a border between tokens. Special tokens come from the template alone
(`tokenizer/chat_encoding.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scratchlm.data.records import check_messages, check_text, form_of, need_fields, read_records
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.chat_encoding import encode_rendered, guard
from scratchlm.tokenizer.chat_template import ChatTemplate
from scratchlm.tokenizer.files import AnyTokenizer
from scratchlm.untrusted import shown

Span = tuple[int, int]

# For models that came without a template: by the markers their tokenizer has.
_CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_LLAMA3 = """<|begin_of_text|>{% for message in messages %}\
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}\
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_PLAIN = """{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}
{% elif message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}
{% else %}{{ message.role | title }}: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
_MARKERS = {
    _CHATML: ("<|im_start|>", "<|im_end|>"),
    _LLAMA3: ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
_NO_ANSWER = (
    "the chat template does not write an answer after its generation prompt; "
    "{% generation %} blocks in it would say what is learnt"
)


def default_template(tokenizer: AnyTokenizer, eos_id: int) -> ChatTemplate:
    """Return a template for a model that came without one."""
    end = next(text for text, token in tokenizer.special_tokens.items() if token == eos_id)
    for source, markers in _MARKERS.items():
        if all(marker in tokenizer.special_tokens for marker in markers):
            return ChatTemplate({"default": source}, {"eos_token": markers[-1]})
    return ChatTemplate({"default": _PLAIN}, {"eos_token": end})


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether it is learnt."""

    ids: list[int]
    learns: list[bool]


@dataclass(frozen=True)
class Encoder:
    """What turns records into examples: a tokenizer, a template, and what ends a text."""

    tokenizer: AnyTokenizer
    template: ChatTemplate
    eos_id: int

    def read(
        self, path: str | os.PathLike[str], longest: int, preference: bool = False
    ) -> Iterator[Example]:
        """Yield the examples of a file; what is wrong, or too long, is refused by its line.

        With `preference` two for each record, the chosen and the rejected one.
        """
        for examples in self.records(path, longest, preference):
            yield from examples

    def records(
        self, path: str | os.PathLike[str], longest: int, preference: bool = False
    ) -> Iterator[list[Example]]:
        """Yield the examples of each record of a file."""
        for place, record in read_records(path):
            try:
                examples = self.encode(record, preference)
                for example in examples:
                    _check_example(example, longest)
            except (ValueError, TypeError, ScratchLMError) as error:
                raise ScratchLMError(f"{place}: {error}") from None
            yield examples

    def encode(self, record: Mapping[str, Any], preference: bool = False) -> list[Example]:
        """Encode one record."""
        if preference:
            return self._preference(record)
        form, tools = form_of(record), _tools(record)
        if form == "preference":
            raise ValueError("chosen and rejected are for --preference dpo, which was not given")
        if form == "chat":
            messages = check_messages(record["messages"])
            return self._with_tools(self.chat, messages, tools)
        if tools:
            raise ValueError("tools are for chats; the record is texts")
        if form == "pair":
            return [self.pair(check_text(record, "prompt"), check_text(record, "completion"))]
        if not (text := check_text(record, "text")):
            raise ValueError("text must not be empty")
        return [self.pair("", text)]

    def pair(self, prompt: str, completion: str) -> Example:
        """Encode a prompt and what is to follow it, up to the end of the text."""
        before = self.tokenizer.template[0] if isinstance(self.tokenizer, Tokenizer) else ()
        asked = [*before, *self.tokenizer.encode(prompt, allowed_special=())]
        if not asked:
            asked = [self.eos_id]  # a new text begins where another one has ended
        answer = [*self.tokenizer.encode(completion, allowed_special=()), self.eos_id]
        return Example(asked + answer, [False] * len(asked) + [True] * len(answer))

    def _preference(self, record: Mapping[str, Any]) -> list[Example]:
        """Encode the chosen and the rejected answer to one prompt."""
        need_fields(record, "chosen", "rejected")
        pair = [self._preferred(record, "chosen"), self._preferred(record, "rejected")]
        prompts = [one.ids[: [*one.learns, True].index(True)] for one in pair]
        if prompts[0] != prompts[1]:
            raise ValueError("chosen and rejected must answer the same prompt")
        return pair

    def _preferred(self, record: Mapping[str, Any], which: str) -> Example:
        value, prompt, tools = record[which], record.get("prompt"), _tools(record)
        if isinstance(value, str):
            if not isinstance(prompt, str):
                raise ValueError(f"prompt must be text, as {which} is")
            if tools:
                raise ValueError(f"tools are for chats; {which} is text")
            return self.pair(prompt, value)
        messages = _asked(prompt, check_messages(value, which))
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{which} must end with the assistant's answer")
        return self._with_tools(self._last_answer, messages, tools)[0]

    def _last_answer(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[Example]:
        guarded, mark = guard(messages, self.tokenizer)
        text, span = self._answer_span(guarded, mark, {"tools": tools})
        return [self._cut(text, [span], mark)]

    def _with_tools(
        self,
        encode: Callable[[Sequence[Mapping[str, Any]], Any], list[Example]],
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
    ) -> list[Example]:
        """Encode a conversation; refuse tools, or calls of them, that the template leaves out."""
        examples = encode(messages, tools)
        called = any(message.get("tool_calls") for message in messages)
        bare = [{k: v for k, v in message.items() if k != "tool_calls"} for message in messages]
        for what, stands, without in (
            ("tools", tools, (messages, None)),
            ("tool_calls", called, (bare, tools)),
        ):
            try:
                left_out = bool(stands) and encode(*without) == examples
            except (ValueError, ScratchLMError):  # the template needs them
                continue
            if left_out:
                raise ValueError(f"the model's chat template has no place for {what}")
        return examples

    # Chats

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[Example]:
        """Encode a conversation: as one example where the template writes it as it grows.

        A template that writes earlier turns otherwise once later ones follow (leaving out what the
        model thought) gives one example for each answer, each as the model will see it.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("messages must hold an answer of the assistant to learn from")
        guarded, mark = guard(messages, self.tokenizer)
        variables = {"tools": tools}
        whole = self.template.render_marked(guarded, **variables)
        if whole.spans:
            return [self._cut(whole.text, whole.spans, mark)]
        spans = [self._answer_span(guarded[: turn + 1], mark, variables) for turn in turns]
        if all(whole.text.startswith(text) for text, _ in spans):
            return [self._cut(whole.text, [span for _, span in spans], mark)]
        return [self._cut(text, [span], mark) for text, span in spans]

    def _answer_span(
        self, messages: Sequence[Mapping[str, Any]], mark: str, variables: Mapping[str, Any]
    ) -> tuple[str, Span]:
        """Render up to an answer; return the text and where the answer lies in it."""

        def render(said: Sequence[Mapping[str, Any]], asks: bool = False) -> str:
            return self.template.render(said, add_generation_prompt=asks, **variables)

        before, text = messages[:-1], render(messages)
        prompt = render(before, asks=True) if before else None
        if prompt is None or not text.startswith(prompt):
            # An answer, be it a call of a tool, begins where another one would.
            other = render([*before, {"role": "assistant", "content": mark}])
            header, found, _ = other.rpartition(mark)
            if found and not text.startswith(header):
                header = header.rstrip()  # the space before an answer is the answer's
            if not found or not text.startswith(header):
                raise ValueError(_NO_ANSWER)
            if prompt is None:
                prompt = header
            else:
                text = _asked_and_said(prompt, render(before), header, text)
        end = len(text.rstrip())  # what follows the token that ends an answer is not the model's
        specials = [token for token in self.tokenizer.special_tokens if text[:end].endswith(token)]
        return text, (len(prompt), end if specials and end > len(prompt) else len(text))

    def _cut(self, text: str, spans: Sequence[Span], mark: str) -> Example:
        ids: list[int] = []
        learns: list[bool] = []
        borders = [0, *(border for span in spans for border in span), len(text)]
        for index, (begin, end) in enumerate(pairwise(borders)):
            part = encode_rendered(text[begin:end], self.tokenizer, mark)
            ids += part
            learns += [index % 2 == 1] * len(part)
        return Example(ids, learns)


def _asked_and_said(prompt: str, before: str, header: str, text: str) -> str:
    """Return a prompt and its answer, where a template writes the prompt otherwise later.

    Mistral's leaves the system's words out once an answer follows; the model is asked with them.
    """
    if not prompt.endswith(header[len(header.rstrip()) :]):
        header = header.rstrip()  # the space before an answer is the answer's
    if not header.endswith(prompt.removeprefix(before) or prompt[-1]):
        raise ValueError(_NO_ANSWER)
    return prompt + text.removeprefix(header)


def _asked(prompt: Any, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the prompt before what follows it, unless that repeats it."""
    if prompt is None:
        return said
    if isinstance(prompt, str):
        asked = [{"role": "user", "content": prompt}]
        repeats = any((one["role"], one.get("content")) == ("user", prompt) for one in said)
    else:
        asked = check_messages(prompt, "prompt")
        repeats = said[: len(asked)] == asked
    return said if repeats else [*asked, *said]


def _tools(record: Mapping[str, Any]) -> Any:
    tools = record.get("tools")
    if not isinstance(tools, list | None) or not all(isinstance(one, dict) for one in tools or ()):
        raise ValueError(f"tools must be a list of objects; got {shown(tools)}")
    return tools


def _check_example(example: Example, longest: int) -> None:
    if not any(example.learns[1:]):
        raise ValueError("nothing is left to learn: the answer is empty")
    if len(example.ids) - 1 > longest:
        raise ValueError(f"{len(example.ids):,} tokens do not fit in rows of {longest:,}")
