"""The tables of fields, one for each route that takes a body."""

from __future__ import annotations

from types import NoneType
from typing import Any

from scratchlm.config import ModelConfig
from scratchlm.serve import fields as f
from scratchlm.serve.chat_prompts import read_messages
from scratchlm.serve.settings import ServeSettings

LONGEST_TEXT = 1 << 26  # the body's limit is far below


def tables(config: ModelConfig, settings: ServeSettings) -> dict[str, f.Table]:
    """Return the fields of each route, with the limits of a model and a server."""
    return {
        "/v1/completions": _completions(config, settings),
        "/v1/chat/completions": _chat(config, settings),
        "/v1/embeddings": _embeddings(config, settings),
        "/tokenize": _tokenize(settings),
        "/detokenize": _detokenize(config),
    }


def _sampling(config: ModelConfig, settings: ServeSettings) -> dict[str, f.Field]:
    """What both ways of generating have."""
    return {
        "model": f.text(256),
        "n": f.integer(1, settings.max_choices, 1),
        "stream": f.boolean(),
        "stream_options": _stream_options(),
        "stop": f.stop_strings(settings.max_stops, settings.max_stop_length),
        "stop_token_ids": f.token_ids(config.vocab_size, settings.max_stops),
        "ignore_eos": f.boolean(),
        "seed": f.integer(-f.INT64, f.INT64),
        "temperature": f.number(0, 2, 1.0),
        "top_p": f.number(0, 1, 1.0, open_low=True),
        "top_k": f.integer(-1, f.INT64),
        "min_p": f.number(0, 1, 0.0),
        "typical_p": f.number(0, 1, 1.0, open_low=True),
        "presence_penalty": f.number(-2, 2, 0.0),
        "frequency_penalty": f.number(-2, 2, 0.0),
        "repetition_penalty": f.number(0.01, 10, 1.0),
        "logit_bias": f.biases(settings.max_biases, config.vocab_size),
        "user": f.text(256),
        "return_token_ids": f.boolean(),
    }


def _completions(config: ModelConfig, settings: ServeSettings) -> dict[str, f.Field]:
    return {
        "prompt": f.required(_prompts(config, settings.max_choices)),
        "max_tokens": f.integer(0, config.context_length, 16),
        "logprobs": f.integer(0, settings.max_logprobs),
        "echo": f.boolean(),
        "add_special_tokens": f.boolean(True),
        "best_of": f.integer(1, settings.max_choices),
        "suffix": f.only(""),
        **_sampling(config, settings),
    }


def _chat(config: ModelConfig, settings: ServeSettings) -> dict[str, f.Field]:
    not_here = {
        "tools": f.only([]),
        "tool_choice": f.only("none", "auto"),
        "parallel_tool_calls": f.only(False, True),  # of no tools
        "response_format": f.only({"type": "text"}),
        "modalities": f.only(["text"]),
        "service_tier": f.only("auto", "default"),
        "store": f.only(False),
        "metadata": f.only({}),
    }
    unknown_to_us = ("functions", "function_call", "audio", "prediction", "reasoning_effort")
    return {
        "messages": f.required(_messages(settings.max_messages)),
        "max_tokens": f.integer(1, config.context_length),
        "max_completion_tokens": f.integer(1, config.context_length),
        "logprobs": f.boolean(),
        "top_logprobs": f.integer(0, settings.max_logprobs),
        "chat_template_kwargs": f.Field(_object, {"type": "object"}, {}),
        **not_here,
        **{name: f.refused() for name in unknown_to_us},
        **_sampling(config, settings),
    }


def _embeddings(config: ModelConfig, settings: ServeSettings) -> dict[str, f.Field]:
    return {
        "input": f.required(_prompts(config, settings.max_choices)),
        "model": f.text(256),
        "encoding_format": f.Field(
            _one_of("float", "base64"), {"enum": ["float", "base64"]}, "float"
        ),
        "dimensions": f.only(config.d_model),
        "user": f.text(256),
    }


def _tokenize(settings: ServeSettings) -> dict[str, f.Field]:
    return {
        "model": f.text(256),
        "prompt": f.text(LONGEST_TEXT),
        "messages": _messages(settings.max_messages),
        "add_special_tokens": f.boolean(None),  # true for a prompt
        "add_generation_prompt": f.boolean(True),
        "return_token_strs": f.boolean(),
    }


def _detokenize(config: ModelConfig) -> dict[str, f.Field]:
    return {
        "model": f.text(256),
        "tokens": f.required(f.token_ids(config.vocab_size, LONGEST_TEXT)),
    }


def _prompts(config: ModelConfig, most: int) -> f.Field:
    """A text, token ids, or several of one of them."""
    vocab_size, longest = config.vocab_size, config.context_length
    rule = f"must be a text, token ids, or 1 to {most} of them"

    def read(value: Any) -> list[str | list[int]]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError(f"{rule}; got {value!r:.60}")
        if not isinstance(value[0], str | list):
            return [f.check_ids(value, vocab_size, longest)]
        if len(value) > most:
            raise ValueError(f"{rule}; got {len(value)}")
        texts = isinstance(value[0], str)
        for one in value:
            if texts != isinstance(one, str) or not isinstance(one, str | list) or one == []:
                raise ValueError(f"{rule}; got {one!r:.60} among them")
            if not texts:
                f.check_ids(one, vocab_size, longest)
        return value

    text = {"type": "string"}
    ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
        "minItems": 1,
        "maxItems": longest,
    }
    several = [{"type": "array", "items": i, "minItems": 1, "maxItems": most} for i in (text, ids)]
    return f.Field(read, {"anyOf": [text, ids, *several]})


def _messages(most: int) -> f.Field:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    roles = ["system", "developer", "user", "assistant"]
    message = {
        "type": "object",
        "properties": {"role": {"enum": roles}, "content": content, "name": {"type": "string"}},
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": message, "minItems": 1, "maxItems": most}
    return f.Field(lambda value: read_messages(value, most), schema)


def _stream_options() -> f.Field:
    def read(value: Any) -> dict[str, bool]:
        if not isinstance(value, dict) or set(value) - {"include_usage"}:
            raise ValueError(f"may hold include_usage only; got {value!r:.60}")
        if not isinstance(value.get("include_usage"), (bool, NoneType)):
            raise ValueError(f"include_usage must be true or false; got {value!r:.60}")
        return value

    usage = {"include_usage": {"type": ["boolean", "null"]}}
    schema = {"type": "object", "properties": usage, "additionalProperties": False}
    return f.Field(read, schema)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object; got {value!r:.60}")
    return value


def _one_of(*values: str) -> Any:
    def read(value: Any) -> str:
        if value not in values:
            raise ValueError(f"must be one of {', '.join(values)}; got {value!r:.60}")
        return str(value)

    return read
