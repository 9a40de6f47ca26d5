"""From an HTTP request to the checked fields of its body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from scratchlm.serve.fields import parse_json, read_fields
from scratchlm.serve.refusals import Refusal
from scratchlm.serve.service import Service, check_present

LARGE = 1 << 14  # a body that is parsed and encoded beside the event loop


async def read_request(
    service: Service, http: Request, make: Callable[[dict[str, Any]], Any] = lambda values: values
) -> Any:
    """Read a body, check its fields by the table of the route, and make something of them."""

    def read(body: bytes) -> Any:
        parsed = parse_json(body, service.settings.max_json_depth)
        values = read_fields(parsed, service.fields[http.url.path])
        service.check_model(values["model"])
        return make(values)

    try:
        body = await http.body()
    except ClientDisconnect:
        raise Refusal(499, "the client has gone away") from None
    if len(body) > LARGE:
        async with service.reading:  # two at a time, so that who has gone meanwhile costs nothing
            await check_present(http)
            return await asyncio.to_thread(read, body)
    if service.chat.template is not None:  # which another process renders
        return await asyncio.to_thread(read, body)
    return read(body)
