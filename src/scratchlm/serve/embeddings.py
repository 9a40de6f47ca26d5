"""`/v1/embeddings`: the mean of the last hidden states of a text's tokens.

A language model was not trained to embed texts: these vectors are what it has, no more.
"""

from __future__ import annotations

import base64
import struct
from functools import partial
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from scratchlm.model import TransformerLM
from scratchlm.serve.bodies import read_request
from scratchlm.serve.generation import encode_text
from scratchlm.serve.refusals import bad_field, json_response
from scratchlm.serve.service import Service, check_present


@torch.inference_mode()
def embed(model: TransformerLM, ids: list[int]) -> list[float]:
    """Return the mean of the last hidden states, which the LM head would read."""
    tokens = torch.tensor([ids], device=model.token_embeddings.weight.device)
    found: list[float] = model.hidden(tokens)[0].double().mean(dim=0).tolist()
    return found


def routes(service: Service) -> list[BaseRoute]:
    """Return the route of embeddings."""

    def make(values: dict[str, Any]) -> tuple[list[list[int]], bool]:
        context = service.loaded.config.context_length
        rows = []
        for one in values["input"]:
            ids = encode_text(service.loaded, one, "input") if isinstance(one, str) else one
            if not 1 <= len(ids) <= context:
                raise bad_field("input", f"must have 1 to {context} tokens; got {len(ids)}")
            rows.append(ids)
        return rows, values["encoding_format"] == "base64"

    async def embeddings(request: Request) -> Response:
        rows, as_base64 = await read_request(service, request, make)
        data = []
        async with service.turn(request):
            for index, ids in enumerate(rows):
                await check_present(request)
                vector = await service.call(partial(embed, service.loaded.model, ids))
                found = _base64(vector) if as_base64 else vector
                data.append({"object": "embedding", "index": index, "embedding": found})
        count = sum(map(len, rows))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response(
            {"object": "list", "data": data, "model": service.name, "usage": usage}
        )

    return [Route("/v1/embeddings", embeddings, methods=["POST"])]


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
