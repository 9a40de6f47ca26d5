"""The routes the page asks: `POST /look/NAME` with JSON, answered with JSON; and the page itself.

Each route reads its fields by a table, as the other routes do, and calls one function of
`look_tokens`, `look_inside`, `look_numbers` or `look_engine` in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from scratchlm.errors import ScratchLMError
from scratchlm.inference import Sampling
from scratchlm.serve import fields, look_engine, look_inside, look_numbers, look_tokens
from scratchlm.serve.fields import Field, parse_json, read_fields
from scratchlm.serve.page_files import page_response
from scratchlm.serve.refusals import Refusal, json_response
from scratchlm.serve.service import Service
from scratchlm.serve.subject import Subject

_EDITS = 64  # of one request
_NUMBERS = 1 << 29  # logits of a text, or weights of a layer, that a view may hold
_PATCHED = 1 << 20  # tokens that patching may run over


@dataclass(frozen=True)
class View:
    """One route: its fields, and the function that answers."""

    table: Mapping[str, Field]
    answer: Callable[..., dict[str, Any]]


def routes(service: Service) -> list[BaseRoute]:
    """Return the page, its files, and every view of the model."""
    subject = Subject.of(service.loaded.model, service.loaded.tokenizer, service.name)
    found: list[BaseRoute] = [
        Route("/", page_response, methods=["GET"]),
        Route("/page/{name}", page_response, methods=["GET"]),
    ]
    call = _in_a_thread(service, subject)
    for name, view in views(service, subject).items():
        found.append(Route(f"/look/{name}", _endpoint(service, view, call), methods=["POST"]))
    return found


def _endpoint(service: Service, view: View, call: Callable[..., Any]) -> Callable[[Request], Any]:
    def run(body: bytes) -> Response:
        values = read_fields(parse_json(body, service.settings.max_json_depth), view.table)
        try:
            return json_response(view.answer(**values))
        except (ValueError, TypeError, ScratchLMError) as error:
            raise Refusal(400, str(error)[:500]) from error

    async def endpoint(request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            raise Refusal(499, "the client has gone away") from None
        async with service.turn(request):
            response: Response = await call(partial(run, body))
        return response

    return endpoint


def _in_a_thread(service: Service, subject: Subject) -> Callable[..., Any]:
    """Return how a view is run: beside the engine, in a thread of its own.

    On a GPU it is run between two steps of the engine, which may be recording one.
    """
    if subject.device.type == "cuda":
        return service.call
    thread = ThreadPoolExecutor(1, "look")

    async def call(function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, function)

    return call


def views(service: Service, subject: Subject) -> dict[str, View]:
    """Return every view by its name, with the limits of this model."""
    config = subject.model.config
    vocab, context, layers = config.vocab_size, config.context_length, config.num_layers
    longest = min(context, _NUMBERS // vocab, math.isqrt(_NUMBERS // config.num_heads))
    ids = {"ids": fields.required(fields.token_ids(vocab, longest))}
    patched = fields.token_ids(vocab, min(longest, math.isqrt(_PATCHED // layers)))
    token = fields.integer(0, vocab - 1)
    place = fields.required(fields.integer(0, context))
    layer = fields.required(fields.integer(0, layers - 1))
    head = fields.required(fields.integer(0, config.num_heads - 1))
    best = {"best": fields.integer(1, min(100, vocab), min(10, vocab))}
    num_prompt = {"num_prompt": fields.integer(0, context, 0)}
    machine, index = fields.text(40, "h200"), fields.integer(0, context)
    seed = fields.integer(-(2**63), fields.INT64)
    return {
        "model": View({}, lambda: _model(service, subject)),
        "read": View(ids, _with(look_tokens.read, subject)),
        "choices": View(
            {
                **ids,
                **num_prompt,
                **best,
                "at": place,
                "seed": seed,
                "sampling": _sampling(Sampling()),
            },
            _with(look_tokens.choices, subject),
        ),
        "heads": View(ids, _with(look_inside.heads, subject)),
        "attention": View(
            {**ids, "layer": layer, "head": head, "query": place},
            _with(look_inside.attention, subject),
        ),
        "lens": View(
            {**ids, "start": fields.integer(0, context, 0), "stop": fields.integer(1, context)}
            | {"best": fields.integer(1, 20, 3)},
            _with(look_inside.lens, subject),
        ),
        "attribution": View(
            {**ids, "token": fields.required(token), "against": token},
            _with(look_inside.attribution, subject),
        ),
        "ablate": View({**ids, **best, "edits": _edits(())}, _with(look_inside.ablate, subject)),
        "patch": View(
            {name: fields.required(patched) for name in ("ids", "other")}
            | {"token": fields.required(token), "against": token}
            | {"what": fields.text(20, "stream")},
            _with(look_inside.patch, subject),
        ),
        "number": View(
            {**ids, "kind": fields.required(fields.text(20)), "token": token, "against": token}
            | dict.fromkeys(("query", "key", "position", "chosen", "start"), index)
            | {
                "num_prompt": index,
                "sampling": _sampling(None),
                "seed": seed,
                "edits": _edits(None),
            }
            | {"layer": fields.integer(0, layers - 1), "other": replace(patched, default=None)}
            | {"head": fields.integer(0, config.num_heads - 1)}
            | {"what": fields.text(20), "part": fields.text(100), "machine": fields.text(40)},
            _with(look_numbers.number, subject),
        ),
        "experts": View(ids, _with(look_inside.experts, subject)),
        "cost": View(
            {"at": place, **num_prompt, "machine": machine}, _with(look_engine.cost, subject.model)
        ),
        "cache": View(ids, _with(look_engine.cache, service.engine)),
    }


def _with(function: Callable[..., dict[str, Any]], first: Any) -> Callable[..., dict[str, Any]]:
    return lambda **values: function(first, **values)


def _listed(most: int) -> Field:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"must be a list of at most {most}; got {value!r:.60}")
        return value

    return Field(read, {"type": "array", "maxItems": most})


def _sampling(default: Sampling | None) -> Field:
    known = Sampling.__dataclass_fields__

    def read(value: Any) -> Sampling:
        if not isinstance(value, dict):
            raise ValueError(f"must be an object; got {value!r:.60}")
        for name in value:
            if name not in known or name == "logit_bias":
                raise ValueError(f"has no {name!r:.40}")
        try:
            return Sampling(**value)
        except TypeError as error:
            raise ValueError(str(error)) from None

    return Field(read, {"type": "object"}, default)


def _edits(default: tuple[()] | None) -> Field:
    def read(value: Any) -> list[look_inside.Scaling]:
        if not isinstance(value, list) or len(value) > _EDITS:
            raise ValueError(f"must be a list of at most {_EDITS}; got {value!r:.60}")
        return [_edit(one) for one in value]

    return Field(read, {"type": "array", "maxItems": _EDITS}, default)


_EDIT = {
    "point": fields.required(fields.text(100)),
    "factor": fields.required(fields.number(-1000, 1000)),
    "heads": _listed(1024),
    "units": _listed(1024),
}


def _edit(value: Any) -> look_inside.Scaling:
    return look_inside.Scaling(**read_fields(value, _EDIT))


def _model(service: Service, subject: Subject) -> dict[str, Any]:
    """Say what the model is, for the page to know what it can show."""
    config, chat = subject.model.config, service.chat
    block: Any = subject.model.layers[0]
    neurons = getattr(getattr(block.ffn, "w2", None), "weight", None)
    experts = getattr(getattr(block.ffn, "router", None), "weight", None)
    return {
        "name": subject.name,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "d_model": config.d_model,
        "neurons": 0 if neurons is None else neurons.shape[-1],
        "experts": 0 if experts is None else experts.shape[0],
        "vocabulary": config.vocab_size,
        "context": config.context_length,
        "page_size": service.engine.scheduler.page_size,
        "precision": look_engine.precision_of(subject.model),
        "adds_up": config.norm_placement == "pre",
        "chat": chat.template is not None or chat.format is not None,
        "chat_problem": chat.problem,
        "end_ids": sorted(chat.end_ids())[: service.settings.max_stops],
        "source": str(service.loaded.source),
    }
