"""`/openapi.json`: the routes and fields of this server, from the tables that read them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from scratchlm import __version__
from scratchlm.serve.fields import Table
from scratchlm.serve.refusals import json_response
from scratchlm.serve.service import Service

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
POSTS = {
    "/v1/completions": "Continue texts or token ids",
    "/v1/chat/completions": "Answer in a conversation",
    "/v1/embeddings": "The mean of the last hidden states of each text",
    "/tokenize": "Text to token ids",
    "/detokenize": "Token ids to text",
}
GETS = {
    "/health": "Whether requests are served",
    "/metrics": "Counts and times, in Prometheus' text format",
    "/v1/models": "The model that is served",
    "/tokenizer_info": "What a client needs to know of the tokenizer",
    "/openapi.json": "This document",
}
REFUSED = (400, 401, 403, 404, 408, 413, 415, 429, 431, 503)


def document(service: Service) -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    paths: dict[str, Any] = {}
    for path, summary in GETS.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        paths[path] = {"get": {"summary": summary, "responses": _responses(kind)}}
    for path, summary in POSTS.items():
        kinds = ["application/json"]
        if "stream" in service.fields[path]:
            kinds.append("text/event-stream")
        schema = body_schema(service.fields[path])
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": _responses(*kinds),
            }
        }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"scratchlm serves {service.name}", "version": __version__},
        "paths": paths,
    }
    if service.settings.api_key is not None:
        found["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"key": []}]
    return found


def body_schema(table: Table) -> dict[str, Any]:
    """Return the JSON schema of a body, from its table of fields."""
    properties = {
        name: field.schema if field.required else {"anyOf": [field.schema, {"type": "null"}]}
        for name, field in table.items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, field in table.items() if field.required],
        "additionalProperties": False,
    }


def _responses(*kinds: str) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": {}} for kind in kinds}
    found: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    refused = {"description": "Refused", "content": {"application/json": {"schema": ERROR}}}
    return found | {str(status): refused for status in REFUSED}


def routes(service: Service) -> list[BaseRoute]:
    """Return the route of the document."""

    async def openapi(request: Request) -> Response:
        return json_response(document(service))

    return [Route("/openapi.json", openapi, methods=["GET"])]
