"""What stands before every route, in this order: Host, the headers' size, Origin, the key,
the body's limits.

A web page can make its reader's browser call this machine. A foreign page that has its own name
point here (DNS rebinding) is told by `Host`; any other by `Origin`, unless it was named.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scratchlm.serve.refusals import Refusal
from scratchlm.serve.settings import KIB, ServeSettings, is_address, is_loopback

log = logging.getLogger("scratchlm.serve")
OPEN = frozenset({"/health"})  # needs no key
SMALL = 64 * KIB  # of a body, which is always taken


class Guards:
    """ASGI middleware that lets in what may come in."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self.app, self.settings, self.bodies = app, settings, _Bodies()
        self._key = (settings.api_key or "").encode()
        self.names = {"localhost", "127.0.0.1", "::1", settings.host.strip("[]").lower()}
        self.names |= {name.strip("[]").lower() for name in settings.hosts}
        self.any_address = not is_loopback(settings.host)
        if self.any_address:
            self.names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = _Body(receive, self.settings, self.bodies)
        if self.settings.log_requests:
            send = _logged(scope, send)
        try:
            self._check(scope, headers)
            body.check_length(headers)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
        else:
            try:
                await self.app(scope, body.receive, send)
            finally:
                body.forget()

    def _check(self, scope: Scope, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise Refusal(403, "Host: not a name of this server (--allow-host adds one)")
        # What comes in many pieces is cut off by h11; this is for what comes in one.
        size = sum(len(name) + len(value) + 4 for name, value in headers.raw)
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > self.settings.max_headers:
            most = self.settings.max_headers
            raise Refusal(431, f"address and headers must not exceed {most} bytes")
        origins = headers.getlist("origin")
        if origins and not self._is_known_origin(origins, hosts[0]):
            raise Refusal(403, "Origin: web pages from elsewhere may not call this server")
        if self._is_preflight(scope, headers):
            return
        needs_key = self.settings.api_key is not None and scope["path"] not in OPEN
        if needs_key and not any(hmac.compare_digest(self._key, given) for given in _keys(headers)):
            raise Refusal(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="scratchlm"'},
            )
        if scope["method"] not in ("GET", "HEAD") and not _is_json(headers):
            raise Refusal(415, "Content-Type: must be application/json")

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if name in self.names:
            return True
        return self.any_address and is_address(name)  # an address cannot be rebound

    def _is_known_origin(self, origins: list[str], host: str) -> bool:
        if len(origins) != 1:
            return False
        ours = (f"http://{host}", f"https://{host}")  # behind a proxy that speaks TLS
        return origins[0] in ours or origins[0] in self.settings.origins

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        return (
            scope["method"] == "OPTIONS"
            and "access-control-request-method" in headers
            and headers.get("origin") in self.settings.origins
        )


@dataclass
class _Bodies:
    """What requests that are being answered hold of their bodies, beyond what is small."""

    size: int = 0


class _Body:
    """A request's body, of bounded length and within bounded time."""

    def __init__(self, receive: Receive, settings: ServeSettings, bodies: _Bodies) -> None:
        self._receive, self._settings, self._bodies = receive, settings, bodies
        self._counted = 0
        self._deadline = asyncio.get_running_loop().time() + settings.body_seconds
        self._length, self._is_whole = 0, False

    def check_length(self, headers: Headers) -> None:
        """Refuse a body that is said to be too long, before any of it is read."""
        said = headers.get("content-length", "0")
        if not said.isdecimal() or int(said[:20]) > self._settings.max_body:
            raise self._too_long()

    async def receive(self) -> Message:
        """Receive the next part of the body, or that the client has gone."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(408, "the body took too long to arrive") from None
        if message["type"] == "http.request":
            self._length += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            if self._length > self._settings.max_body:
                raise self._too_long()
            self._count(max(0, self._length - SMALL))
            if self._counted and self._bodies.size > self._settings.max_bodies:
                raise Refusal(
                    429,
                    "too many large bodies at once",
                    code="bodies_full",
                    headers={"Retry-After": "1"},
                )
        return message

    def forget(self) -> None:
        """Count the body no more: its request is over."""
        self._count(0)

    def _count(self, size: int) -> None:
        self._bodies.size += size - self._counted
        self._counted = size

    def _too_long(self) -> Refusal:
        return Refusal(413, f"the body must not exceed {self._settings.max_body} bytes")


def _logged(scope: Scope, send: Send) -> Send:
    """Log a request when its answer begins: the path and the status, nothing of what was said."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            log.info("%s %.200s %d", scope["method"], ascii(scope["path"]), message["status"])
        await send(message)

    return sending


def _keys(headers: Headers) -> Iterable[bytes]:
    """Yield the keys a request brings: a bearer token, or the password a browser asked for."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        yield given.strip().encode("latin-1")
    elif kind.lower() == "basic":
        try:
            yield base64.b64decode(given, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return


def _is_json(headers: Headers) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        name, closed, port = host[1:].partition("]")
        return name if closed and (not port or port[1:].isdecimal()) else ""
    name, _, port = host.partition(":")
    return name.rstrip(".") if not port or port.isdecimal() else ""
