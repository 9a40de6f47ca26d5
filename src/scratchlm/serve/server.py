"""Listen and serve: uvicorn with what it lacks, deadlines and an orderly end.

A connection has a deadline to send all headers of a request, to read what is ready for it, and to
end a body that has been refused (the body's own deadline is in `guards.py`). Where there are too
many connections, an idle one is closed, or else the one that has been sending for longest.

After SIGTERM or Ctrl-C requests that run may finish, and new ones are refused with 503.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from scratchlm.errors import ScratchLMError
from scratchlm.serve.service import Service
from scratchlm.serve.settings import ServeSettings

log = logging.getLogger("scratchlm.serve")
WRITE_NOW = "scratchlm.write_now"  # the name of `Connection.write_chunk` in a request's extensions
LINGER_SECONDS = 2.0  # for a client to read an answer while it still sends a body
CLOSING_SECONDS = 2  # for answers to be sent once nothing runs any more


class Connection(H11Protocol):
    """One client's connection, with deadlines."""

    settings = ServeSettings()  # replaced in a subclass by `make_server`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; where there are too many, end the one that keeps us waiting for longest."""
        super().connection_made(transport)
        app = self.app

        async def with_writer(scope: Any, receive: Any, send: Any) -> None:
            if scope["http_version"] == "1.1":  # whose bodies of unknown length go in chunks
                scope["extensions"] = {**scope.get("extensions", {}), WRITE_NOW: self.write_chunk}
            await app(scope, receive, send)

        self.app = with_writer
        self._began = self.loop.time()  # to send a request
        self._sending_since: float | None = self._began  # headers
        self._refused_since: float | None = None  # a body that nobody wants
        self._unread_since: float | None = None  # by the client
        if len(self.connections) > self.settings.max_connections:
            waiting = [c for c in self.connections if c.is_sending]  # type: ignore[union-attr]
            oldest = min(waiting, key=lambda c: c.waiting_since, default=self)  # type: ignore[union-attr]
            oldest.transport.abort()

    @property
    def is_sending(self) -> bool:
        """Whether the client has yet to send a request, or the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def waiting_since(self) -> float:
        """Since when the client has been sending; an idle one since ever."""
        is_idle = self.conn.their_state is h11.IDLE and self._sending_since is None
        return 0.0 if is_idle else self._began

    def data_received(self, data: bytes) -> None:
        """Take what came; note since when headers are incomplete."""
        if self.conn.their_state is h11.IDLE and self._sending_since is None:
            self._began = self._sending_since = self.loop.time()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._sending_since = None

    def write_chunk(self, data: bytes) -> bool:
        """Write a part of a body that goes in chunks, if it can be written at once.

        It is what `send` does, without a task's turn and h11's checks of it.
        """
        cycle = self.cycle
        if self.flow.write_paused or cycle is None or cycle.disconnected or cycle.response_complete:
            return False
        if data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def close_if_overdue(self, now: float) -> None:
        """Drop the connection if a deadline has passed."""
        settings = self.settings
        answered = self.cycle is not None and self.cycle.response_complete
        refused = answered and self.conn.their_state is h11.SEND_BODY
        self._refused_since = (self._refused_since or now) if refused else None
        unread = self.transport.get_write_buffer_size() > 0
        self._unread_since = (self._unread_since or now) if unread else None
        for since, limit in (
            (self._sending_since, settings.header_seconds),
            (self._refused_since, LINGER_SECONDS),
            (self._unread_since, settings.write_seconds),
        ):
            if since is not None and now - since > limit:
                self.transport.abort()
                return


class Server(uvicorn.Server):
    """A uvicorn server that says when it is ready, watches deadlines and ends in order."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Look at deadlines twice a second."""
        if counter % 5 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_overdue(now)
        return await super().on_tick(counter)

    async def main_loop(self) -> None:
        """Serve until told to end; then let finish what runs, and refuse what comes."""
        await super().main_loop()
        service, loop = self._service, asyncio.get_running_loop()
        service.is_draining = True
        deadline = loop.time() + service.settings.drain_seconds
        counter = 0
        while self._is_busy() and loop.time() < deadline and not self.force_exit:
            await asyncio.sleep(0.1)
            counter += 1
            await self.on_tick(counter)
        if service.thread.is_busy:
            log.warning("%d answers were not finished in time", service.thread.num_open)
        service.thread.stop()

    def _is_busy(self) -> bool:
        """Whether anything runs, or an answer is still being sent."""
        return self._service.thread.is_busy or bool(self.server_state.tasks)


def listen(settings: ServeSettings) -> socket.socket:
    """Take the address; an error names it."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends small pieces at once (TCP_NODELAY) only where the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise ScratchLMError(f"cannot listen on {where}: {error.strerror or error}") from None
    return listener


def make_server(
    app: Starlette, settings: ServeSettings, ready: Callable[[], None] = lambda: None
) -> Server:
    """Make the server of an application; `run(sockets=[listen(settings)])` runs it."""
    protocol: Any = type("Connection", (Connection,), {"settings": settings})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_seconds)),
        timeout_graceful_shutdown=CLOSING_SECONDS,
        h11_max_incomplete_event_size=settings.max_headers,
    )
    return Server(config, app.state.service, ready)
