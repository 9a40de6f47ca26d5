"""The application: its routes, and what stands before them.

make_app(loaded, settings)      → an ASGI application; its engine runs while it does
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from scratchlm.inference.engine import Engine
from scratchlm.inference.loading import Loaded
from scratchlm.serve import embeddings, metrics, openapi, token_routes
from scratchlm.serve.answering import answer
from scratchlm.serve.bodies import read_request
from scratchlm.serve.generation import Generate, chat_request, completion_request
from scratchlm.serve.guards import Guards
from scratchlm.serve.refusals import Refusal, json_response
from scratchlm.serve.service import Service
from scratchlm.serve.settings import ServeSettings
from scratchlm.serve.sizing import make_engine

log = logging.getLogger("scratchlm.serve")
FURTHER = ("scratchlm.serve.look_routes",)  # each has `routes(service)`


def make_app(
    loaded: Loaded, settings: ServeSettings | None = None, *, engine: Engine | None = None
) -> Starlette:
    """Make the application that serves a model; its `state.service` is what routes share."""
    service = Service(loaded, engine or make_engine(loaded), settings or ServeSettings())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        try:
            yield
        finally:
            await service.thread.close()

    app = Starlette(
        routes=[*routes(service), *further_routes(service)],
        lifespan=lifespan,
        middleware=_middleware(service.settings),
        exception_handlers={Refusal: _refused, HTTPException: _no_route, Exception: _bug},
    )
    app.state.service = service
    return app


def _middleware(settings: ServeSettings) -> list[Middleware]:
    found = [Middleware(Guards, settings=settings)]
    if settings.origins:
        methods, headers = ["GET", "POST"], ["Authorization", "Content-Type"]
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.origins),
                allow_methods=methods,
                allow_headers=headers,
            )
        )
    return found


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the API."""

    async def health(request: Request) -> Response:
        service.check_running()
        return json_response({"status": "ok"})

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [_card(service)]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return json_response(_card(service))

    async def completions(request: Request) -> Response:
        def make(values: dict[str, Any]) -> Generate:
            return completion_request(values, service.loaded, service.max_choices)

        return await answer(service, await read_request(service, request, make), request)

    async def chat_completions(request: Request) -> Response:
        def make(values: dict[str, Any]) -> Generate:
            return chat_request(values, service.loaded, service.chat, service.max_choices)

        return await answer(service, await read_request(service, request, make), request)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        *embeddings.routes(service),
        *token_routes.routes(service),
        *metrics.routes(service),
        *openapi.routes(service),
    ]


def further_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the page and of what it looks at, where they are installed."""
    found: list[BaseRoute] = []
    for name in FURTHER:
        if importlib.util.find_spec(name) is not None:
            found += importlib.import_module(name).routes(service)
    return found


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "scratchlm",
        "max_model_len": service.loaded.config.context_length,
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path:.100}: {error.detail}"
    return Refusal(error.status_code, message, headers=error.headers or {}).response()


async def _bug(request: Request, error: Exception) -> Response:
    return Refusal(500, "an error in the server; its log says which").response()
