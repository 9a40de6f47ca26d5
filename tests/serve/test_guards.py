"""Who is let in, and how much of what they send is read."""

import asyncio
import base64
import contextlib
import hmac
import socket
from dataclasses import replace
from unittest import mock

import h11
import pytest

from scratchlm.errors import ScratchLMError
from scratchlm.serve import ServeSettings, guards
from scratchlm.serve.server import Connection
from serve.tiny_server import ask, connect, memory, raw_request, read_all, tiny_server
from waiting import wait_until


@pytest.fixture(scope="module")
def server():
    with tiny_server(api_key="secret", origins=("https://friend.example",)) as running:
        yield running


@pytest.fixture(scope="module")
def open_server():
    with tiny_server() as running:
        yield running


@pytest.fixture
def connections(monkeypatch):
    """Those that a server has taken, in their order."""
    taken, made = [], Connection.connection_made

    def note(connection, transport):
        made(connection, transport)
        taken.append(connection)

    monkeypatch.setattr(Connection, "connection_made", note)
    return taken


KEY = {"Authorization": "Bearer secret"}
ROUTES = [
    *("/v1/models", "/v1/models/tiny", "/metrics", "/tokenizer_info", "/openapi.json", "/"),
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/nowhere"),
]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_but_health_needs_the_key(server, path):
    for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Bearer secrets"}):
        assert ask(server, path, headers=headers).status == 401
    assert ask(server, path, headers=KEY).status != 401


def test_keys_are_compared_in_constant_time(server):
    """By the function made for that, whatever is given: nothing is decided before it."""
    given = ["", "s", "secreu", "secret", "secret" * 9, "\xff"]
    with mock.patch("hmac.compare_digest", wraps=hmac.compare_digest) as compare:
        for key in given:
            ask(server, "/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert [call.args for call in compare.call_args_list] == [
        (b"secret", key.encode("latin-1")) for key in given
    ]


def test_health_needs_no_key(server):
    assert ask(server, "/health").status == 200


def test_a_browser_may_give_the_key_as_a_password(server):
    good, bad = (base64.b64encode(f"me:{key}".encode()).decode() for key in ("secret", "other"))
    assert ask(server, "/v1/models", headers={"Authorization": f"Basic {good}"}).status == 200
    for given in (bad, "%%%", ""):
        answer = ask(server, "/v1/models", headers={"Authorization": f"Basic {given}"})
        assert answer.status == 401
        assert "Basic" in answer.headers["www-authenticate"]


def host_status(server, *lines):
    """Ask with these lines in place of a Host header."""
    with connect(server) as client:
        request = ["GET /health HTTP/1.1", *lines, "Connection: close", "", ""]
        client.sendall("\r\n".join(request).encode())
        return int(read_all(client).split()[1])


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "localhost:81"])
def test_this_machine_may_be_called_by_its_own_names(open_server, name):
    assert host_status(open_server, f"Host: {name}") == 200


@pytest.mark.parametrize(
    "name",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""),
        *("localhost:80:81", "[::1", "localhost/", "evil.example#localhost", "user@localhost"),
    ],
)
def test_a_foreign_host_is_refused_before_anything_else(server, open_server, name):
    assert host_status(open_server, f"Host: {name}") == 403
    assert host_status(server, f"Host: {name}") == 403


def test_a_request_without_a_host_or_with_two_is_refused(open_server):
    assert host_status(open_server) in (400, 403)
    assert host_status(open_server, "Host: localhost", "Host: evil.example") in (400, 403)


def test_names_can_be_added_and_addresses_are_names_where_others_may_come():
    with tiny_server(hosts=("box.example",)) as server:
        assert host_status(server, "Host: box.example:8000") == 200
    settings = {"host": "0.0.0.0", "api_key": "k"}
    with tiny_server(**settings) as server:
        assert host_status(server, "Host: 192.168.1.7:8000") == 200
        assert host_status(server, f"Host: {socket.gethostname()}") == 200
        assert host_status(server, "Host: evil.example") == 403


def test_a_page_from_elsewhere_may_not_call_unless_named(server):
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        (server.url, 200),
        (server.url.replace("http:", "https:"), 200),  # the page, behind a proxy that speaks TLS
        (server.url + "0", 403),
        ("https://friend.example", 200),
    ):
        answer = ask(server, "/v1/models", headers={**KEY, "Origin": origin})
        assert answer.status == status
    asked = {"Access-Control-Request-Method": "POST"}
    for origin, allowed in (("https://friend.example", True), ("https://evil.example", False)):
        answer = ask(server, "/v1/models", headers={"Origin": origin, **asked}, method="OPTIONS")
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


def test_no_other_origin_is_let_in_by_default(open_server):
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = ask(open_server, "/v1/completions", headers=headers, method="OPTIONS")
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_form_of_a_web_page_is_no_request(open_server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": kind}
        answer = ask(open_server, "/v1/completions", {"prompt": "x"}, headers)
        assert answer.status == 415


def test_settings_that_let_others_in_unseen_are_refused():
    for settings in (
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "example.org"},
        {"api_key": ""},
        {"origins": ("*",)},
    ):
        with pytest.raises(ScratchLMError):
            ServeSettings(**settings)


def test_names_that_no_request_could_have_are_refused():
    for settings in (
        {"host": "", "api_key": "k"},
        {"hosts": ("",)},
        {"hosts": ("box.example:8000",)},
        {"hosts": ("https://box.example",)},
        {"origins": ("friend.example",)},
        {"origins": ("https://friend.example/",)},
    ):
        with pytest.raises(ScratchLMError):
            ServeSettings(**settings)
    names = ("box.example", "10.0.0.1", "::1", "[fe80::1]")
    assert ServeSettings(hosts=names, origins=("http://localhost:3000",)).hosts == names


# How much is read


def test_a_body_said_to_be_too_long_is_refused_without_reading_it():
    with tiny_server(max_body=1000) as server, connect(server) as client:
        head = raw_request("/v1/completions").replace(b"Length: 0", b"Length: 1000000000")
        client.sendall(head)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_a_body_that_grows_too_long_is_refused():
    with tiny_server(max_body=1000) as server, connect(server) as client:
        head = raw_request("/v1/completions").replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        client.sendall(head + b"400\r\n" + b"x" * 0x400 + b"\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_large_bodies_are_bounded_together_and_small_ones_are_always_taken(monkeypatch):
    held, real = [0], guards._Body._count

    def count(body, size):
        real(body, size)
        held.append(body._bodies.size)

    monkeypatch.setattr(guards._Body, "_count", count)
    prompt = b'{"prompt": "x"%s}'
    large, small = prompt % (b" " * 200_000), prompt % b""
    with tiny_server(max_bodies=300_000) as server:
        slow = [connect(server) for _ in range(2)]
        for client in slow:  # 134 kB each beyond what is small
            client.sendall(raw_request("/v1/completions", large)[:-1])
        wait_until(lambda: held[-1] > 260_000)
        refused = ask(server, "/v1/completions", large)
        assert (refused.status, refused.error["code"]) == (429, "bodies_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(server, "/v1/completions", small).status == 200
        for client in slow:
            client.close()
        wait_until(lambda: held[-1] == 0)
        assert ask(server, "/v1/completions", large).status == 200
    assert held[-1] == 0


@pytest.mark.parametrize("said", ["Content-Length: 1073741824", "Transfer-Encoding: chunked"])
def test_a_gigabyte_is_refused_with_little_memory(open_server, said):
    piece, before, most = b"x" * (1 << 20), memory(), 0.0
    if "chunked" in said:
        piece = b"100000\r\n" + piece + b"\r\n"
    with connect(open_server) as client:
        client.sendall(raw_request("/v1/completions").replace(b"Content-Length: 0", said.encode()))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1024):
                client.sendall(piece)
                most = max(most, memory())
    assert most - before < 20


def test_a_body_that_was_refused_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr("scratchlm.serve.server.LINGER_SECONDS", 0.2)
    with tiny_server(keep_alive_seconds=1) as server, connect(server) as client:
        client.sendall(raw_request("/v1/completions").replace(b"th: 0", b"th: 1073741824"))

        def send_more():
            client.sendall(b"x" * 1000)

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            wait_until(send_more)  # which says nothing, until the connection is gone


def test_headers_that_do_not_end_are_cut_off():
    with tiny_server(header_seconds=0.2) as server, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert b"200" not in read_all(client)


def test_a_connection_that_says_nothing_is_cut_off():
    with tiny_server(header_seconds=0.2) as server, connect(server) as client:
        assert read_all(client) == b""


def test_a_second_request_has_a_deadline_for_its_headers_too(connections):
    with tiny_server() as server, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        [connection] = connections
        wait_until(lambda: connection.conn.their_state is h11.IDLE)  # the first is over
        client.sendall(b"lth")
        wait_until(lambda: connection._sending_since is not None)
        connection.settings = replace(connection.settings, header_seconds=0.0)
        assert b"HTTP/1.1" not in read_all(client)


def test_a_body_that_does_not_end_is_refused():
    with tiny_server(body_seconds=0.2) as server, connect(server) as client:
        head = raw_request("/v1/completions").replace(b"Length: 0", b"Length: 100")
        client.sendall(head + b'{"prompt"')
        assert read_all(client).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_cut_off_and_its_pages_are_free():
    with tiny_server(write_seconds=0.3) as server:
        client = connect(server, receive_buffer=2048)
        body = b'{"prompt": "x", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 20, '
        body += b'"logprobs": 20}'
        client.sendall(raw_request("/v1/completions", body))
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        wait_until(lambda: server.service.thread.num_open == 0)
        wait_until(lambda: not _tasks(server))
        assert b"[DONE]" not in read_all(client)
        client.close()


def _tasks(server):
    loop = server.service.thread._loop
    return [t for t in asyncio.all_tasks(loop) if "run_asgi" in repr(t)]


def test_long_headers_are_refused(open_server):
    with connect(open_server) as client:
        lines = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(100))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines)
        assert b"200 OK" not in read_all(client)


def test_long_headers_that_come_at_once_are_refused_too(open_server):
    for path, line in (("/health", "X: " + "a" * 40_000), ("/health?" + "a" * 40_000, "X: a")):
        with connect(open_server) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode())
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 431")


def test_where_there_are_too_many_connections_the_slowest_gives_way(connections):
    with tiny_server(max_connections=5) as server:
        slow = [connect(server) for _ in range(5)]
        for client in slow:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        wait_until(lambda: len(connections) == 5)
        assert ask(server, "/health").status == 200
        assert read_all(slow[0]) == b""
        for client in slow:
            client.close()


@pytest.mark.parametrize("sent", [20, -1], ids=["headers", "a body"])
def test_an_idle_connection_gives_way_before_one_that_sends(sent):
    request = raw_request("/v1/completions", b"{}", headers=["Connection: close"])
    with tiny_server(max_connections=2) as server, connect(server) as slow, connect(server) as idle:
        slow.sendall(request[:sent])
        idle.sendall(raw_request("/health", method="GET"))
        assert idle.recv(9) == b"HTTP/1.1 "
        assert ask(server, "/health").status == 200
        assert read_all(idle).startswith(b"200")  # and is over, long before it would be
        slow.sendall(request[sent:])
        assert read_all(slow).startswith(b"HTTP/1.1 400")


def test_logs_hold_no_prompt(caplog):
    with caplog.at_level("DEBUG"), tiny_server(log_requests=True) as server:
        ask(server, "/v1/completions", {"prompt": "a secret thing"})
        ask(server, "/v1/completions", {"prompt": "a secret thing", "n": -1})
    lines = [r.getMessage() for r in caplog.records if r.name == "scratchlm.serve"]
    assert lines == ["POST '/v1/completions' 200", "POST '/v1/completions' 400"]
    assert "secret" not in caplog.text
