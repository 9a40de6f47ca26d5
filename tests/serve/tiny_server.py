"""A tiny model served in a thread of the test, and ways to ask it."""

import contextlib
import json
import resource
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from inference.tiny import END, byte_tokenizer, tiny_model
from scratchlm.inference import Engine, Loaded
from scratchlm.serve import ServeSettings
from scratchlm.serve.run import serving
from waiting import PATIENCE, wait_until

# A busy machine is no slow client: a deadline is short only where a test is about it.
LIMITS = {
    f"{name}_seconds": PATIENCE for name in ("header", "body", "write", "keep_alive", "drain")
}
CHATML = ("<|im_start|>", "<|im_end|>")
NAME = "tiny"


@cache
def tiny_loaded(context_length=512, chat=True):
    """A random model over bytes, which knows ChatML's markers."""
    tokenizer = byte_tokenizer(END, *(CHATML if chat else ()))
    model = tiny_model(tokenizer.vocab_size, context_length)
    return Loaded(model, tokenizer, model.config, Path(NAME), (256,))


def tiny_engine(loaded=None, **options):
    loaded = loaded or tiny_loaded()
    options = {"num_pages": 256, "page_size": 16, "max_rows": 8, **options}
    return Engine(loaded.model, tokenizer=loaded.tokenizer, **options)


@contextlib.contextmanager
def tiny_server(loaded=None, engine=None, **settings):
    """Serve it; at the end nothing is left in the pool."""
    loaded = loaded or tiny_loaded()
    engine = engine or tiny_engine(loaded)
    settings = ServeSettings(**{"port": 0, **LIMITS, **settings})
    with serving(loaded, settings, engine=engine) as server:
        yield server
        wait_until(lambda: engine.pool.num_held == 0 and server.service.thread.num_open == 0)
    assert not engine._handles


def memory():
    """Return the megabytes this process holds now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except FileNotFoundError:
        return 0.0
    return pages * resource.getpagesize() / 2**20


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict = field(default_factory=dict)

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        return events_in(self.body)


def ask(server, path, body=None, headers=None, method=None):
    """Send a request, and return what came, whatever the status."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return Answer(response.status, response.read(), dict(response.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(), dict(error.headers))


def events_in(body):
    """Return what server-sent events hold; the last must be [DONE]."""
    lines = body.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def connect(server, receive_buffer=None):
    """Open a connection by hand."""
    parts = urlsplit(server.url)
    client = socket.socket()
    client.settimeout(PATIENCE)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((parts.hostname, parts.port))
    return client


def raw_request(path, body=b"", method="POST", headers=()):
    """Write a request by hand."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def read_all(connection):
    """Read until the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data
