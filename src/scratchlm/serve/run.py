"""A model served: until a signal comes, or in a thread while a block runs.

run(loaded, settings)                       until Ctrl-C or SIGTERM
with serving(loaded, settings) as address:  in this process, for tests and notebooks
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scratchlm.errors import ScratchLMError
from scratchlm.inference.engine import Engine
from scratchlm.inference.loading import Loaded
from scratchlm.serve.app import make_app
from scratchlm.serve.server import listen, make_server
from scratchlm.serve.service import Service
from scratchlm.serve.settings import ServeSettings


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    url: str
    service: Service
    stop: Callable[[], None]  # lets requests that run finish, and refuses new ones


def run(
    loaded: Loaded,
    settings: ServeSettings,
    *,
    engine: Engine | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve a model until a signal comes; `ready` hears the address."""
    listener = listen(settings)
    allow_files(settings.max_connections + 100)
    address = address_of(listener, settings)
    app = make_app(loaded, settings, engine=engine)
    server = make_server(app, settings, lambda: ready(address))
    server.run(sockets=[listener])


@contextlib.contextmanager
def serving(
    loaded: Loaded, settings: ServeSettings | None = None, *, engine: Engine | None = None
) -> Iterator[Running]:
    """Serve a model in a thread while a block runs, on any port that is free unless said."""
    settings = ServeSettings(port=0) if settings is None else settings
    listener = listen(settings)
    app = make_app(loaded, settings, engine=engine)
    is_ready = threading.Event()
    server = make_server(app, settings, is_ready.set)
    thread = threading.Thread(
        target=server.run, name="server", kwargs={"sockets": [listener]}, daemon=True
    )
    thread.start()

    def stop() -> None:
        server.should_exit = True

    try:
        while not is_ready.wait(timeout=0.1):
            if not thread.is_alive():
                raise ScratchLMError("the server did not start")
        yield Running(address_of(listener, settings), app.state.service, stop)
    finally:
        stop()
        thread.join()


def allow_files(count: int) -> None:
    """Let this process open so many files and connections, as far as it may decide that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def address_of(listener: socket.socket, settings: ServeSettings) -> str:
    """Return the address at which a server can be asked."""
    host = f"[{settings.host.strip('[]')}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"
