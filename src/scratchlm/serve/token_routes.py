"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from scratchlm.inference.prompts import END_OF_TEXT, AnyTokenizer
from scratchlm.serve.bodies import read_request
from scratchlm.serve.generation import encode_text
from scratchlm.serve.openai_format import token_text
from scratchlm.serve.refusals import Refusal, bad_field, json_response
from scratchlm.serve.service import Service


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the tokenizer."""

    async def tokenize(request: Request) -> Response:
        return json_response(await read_request(service, request, lambda v: encoded(service, v)))

    async def detokenize(request: Request) -> Response:
        return json_response(await read_request(service, request, lambda v: decoded(service, v)))

    async def tokenizer_info(request: Request) -> Response:
        return json_response(info(service))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]


def encoded(service: Service, values: dict[str, Any]) -> dict[str, Any]:
    """Encode a text, or a conversation."""
    prompt, messages = values["prompt"], values["messages"]
    if (prompt is None) == (messages is None):
        raise bad_field("prompt", "one of prompt and messages must be there")
    if messages is not None:
        if values["add_special_tokens"]:
            raise bad_field("add_special_tokens", "has no effect on messages")
        ids = service.chat.encode(messages, add_generation_prompt=values["add_generation_prompt"])
    elif not values["add_generation_prompt"]:
        raise bad_field("add_generation_prompt", "needs messages")
    else:
        ids = _encode(service, prompt, values["add_special_tokens"] is not False)
    found: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.loaded.config.context_length,
        "tokens": ids,
    }
    if values["return_token_strs"]:
        found["token_strs"] = [token_text(service.loaded.tokenizer, token) for token in ids]
    return found


def _encode(service: Service, prompt: str, special: bool) -> list[int]:
    if not prompt:  # continued, it would begin with end-of-text
        template = getattr(_tokenizer(service), "template", ((), ()))
        return list(template[0]) if special else []
    return encode_text(service.loaded, prompt, "prompt", special=special)


def decoded(service: Service, values: dict[str, Any]) -> dict[str, Any]:
    """Decode token ids."""
    try:
        return {"prompt": _tokenizer(service).decode(values["tokens"])}
    except ValueError as error:
        raise bad_field("tokens", str(error)) from None


def info(service: Service) -> dict[str, Any]:
    """Say what a client needs to know of the tokenizer."""
    tokenizer, template = _tokenizer(service), service.chat.template
    ends = [token_text(tokenizer, token) for token in service.loaded.eos_ids]
    begins = getattr(tokenizer, "template", ((), ()))[0]
    end = ends[0] if ends else (END_OF_TEXT if END_OF_TEXT in tokenizer.special_tokens else None)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.loaded.config.context_length,
        "eos_token": end,
        "bos_token": token_text(tokenizer, begins[0]) if begins else None,
        "pad_token": None,
        "special_tokens": dict(tokenizer.special_tokens),
        "chat_template": None if template is None else template.templates.get("default"),
    }


def _tokenizer(service: Service) -> AnyTokenizer:
    if service.loaded.tokenizer is None:
        raise Refusal(400, "the model has no tokenizer", code="no_tokenizer")
    return service.loaded.tokenizer
