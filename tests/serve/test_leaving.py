"""Clients that go away, queues that are full, servers that end: nothing is lost or left behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from scratchlm.checkpoint import write_checkpoint
from scratchlm.cli.serve import serve
from scratchlm.errors import ScratchLMError
from scratchlm.inference.plain_runner import PlainRunner
from scratchlm.serve import ServeSettings
from scratchlm.serve.engine_thread import EngineThread
from scratchlm.serve.fields import parse_json
from scratchlm.serve.server import listen
from serve.tiny_server import (
    ask,
    connect,
    raw_request,
    read_all,
    tiny_engine,
    tiny_loaded,
    tiny_server,
)
from waiting import PATIENCE, wait_until

LONG = {"prompt": "x" * 40, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


class Gate(PlainRunner):
    """A runner whose every step needs to be let through."""

    def __init__(self, model, cache):
        super().__init__(model, cache)
        self.permits, self.is_open = threading.Semaphore(0), False
        self.num_begun = 0

    def run(self, *step):
        self.num_begun += 1
        if not self.is_open:
            self.permits.acquire()
        return super().run(*step)

    def let(self, steps):
        self.permits.release(steps)

    def open(self):
        self.is_open = True
        self.permits.release(1)


@contextlib.contextmanager
def gated_server(max_rows=8, **settings):
    engine = tiny_engine(make_runner=Gate, max_rows=max_rows)
    with tiny_server(engine=engine, **settings) as server:
        try:
            yield server, engine
        finally:
            engine.runner.open()


def request_of(fields):
    return raw_request("/v1/completions", json.dumps(fields).encode())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages_within_one_step(stream):
    with gated_server() as (server, engine):
        client = connect(server)
        client.sendall(request_of({**LONG, "stream": stream, "n": 3}))
        engine.runner.let(5)
        wait_until(lambda: engine.runner.num_begun == 6)  # in the middle of a step
        assert engine.pool.num_held > 0
        client.close()
        wait_until(lambda: engine._cancelled)
        assert engine.pool.num_held > 0
        engine.runner.let(1)
        wait_until(lambda: engine.pool.num_held == 0)
        assert engine.runner.num_begun == 6  # no further step was begun for it


def test_one_that_waits_in_the_queue_can_go_away_too():
    with gated_server(max_rows=1) as (server, engine):
        first, second = connect(server), connect(server)
        first.sendall(request_of(LONG))
        wait_until(lambda: engine.runner.num_begun == 1)
        second.sendall(request_of(LONG))
        wait_until(lambda: server.service.thread.num_open == 2)
        second.close()
        wait_until(lambda: engine._cancelled)
        engine.runner.let(1)
        wait_until(lambda: not engine.scheduler.waiting)

        def is_told():
            engine.runner.let(1)  # news is gathered after a step, unless the loop is behind
            return server.service.thread.num_open == 1

        wait_until(is_told, pause=0.2)  # long before the first has its 400 tokens
        first.close()


def test_a_large_body_of_one_who_has_gone_is_not_even_parsed():
    running, gate = threading.Semaphore(0), threading.Semaphore(0)

    def slow(data, depth):
        running.release()
        gate.acquire()
        return parse_json(data, depth)

    with mock.patch("scratchlm.serve.bodies.parse_json", slow), tiny_server() as server:
        request = request_of({**LONG, "prompt": "x", "max_tokens": 3, "user": "y" * (1 << 14)})
        clients = [connect(server) for _ in range(4)]
        for client in clients:
            client.sendall(request)
        for _ in range(2):
            running.acquire()
        wait_until(lambda: len(server.service.reading._waiters or ()) == 2)
        assert ask(server, "/health").status == 200  # the loop is free meanwhile
        clients[2].close()
        clients[3].close()
        gate.release(4)
        for client in clients[:2]:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 400")  # a user is no such text
            client.close()
        wait_until(lambda: not server.service.reading.locked())
    assert not running.acquire(blocking=False)


def test_a_full_queue_answers_429_and_says_when_to_come_again():
    with gated_server(max_rows=2, max_queue=3) as (server, engine):
        clients = [connect(server) for _ in range(5)]
        for client in clients:
            client.sendall(request_of({**LONG, "max_tokens": 3}))
        wait_until(lambda: server.service.thread.num_open == 5)
        refused = ask(server, "/v1/completions", {"prompt": "x"})
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.error["type"] == "rate_limit_error"
        assert ask(server, "/v1/completions", {"prompt": "x", "n": 6}).status == 400  # never fits
        engine.runner.open()
        for client in clients:
            assert b"200 OK" in client.recv(1 << 16)
            client.close()
        assert ask(server, "/v1/completions", {"prompt": "x"}).status == 200


def test_so_does_a_full_queue_of_those_who_use_the_model_beside_the_engine():
    """Embeddings and views: one after the other; who goes away while waiting is passed over."""
    running, gate = threading.Semaphore(0), threading.Semaphore(0)

    def slow(*_, **__):
        running.release()
        gate.acquire()
        return []

    with mock.patch("scratchlm.serve.embeddings.embed", slow), tiny_server(max_queue=2) as server:
        data = raw_request("/v1/embeddings", b'{"input": "x"}')
        clients = [connect(server) for _ in range(3)]
        for client in clients:
            client.sendall(data)
        running.acquire()
        wait_until(lambda: server.service._num_in_turn == 3)
        refused = ask(server, "/look/read", {"ids": [1, 2]})
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        clients[1].close()
        gate.release(2)
        for client in (clients[0], clients[2]):
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            client.close()
        wait_until(lambda: server.service._num_in_turn == 0)
    assert running.acquire(blocking=False)  # the third; the second was never begun
    assert not running.acquire(blocking=False)


class NoMemory(PlainRunner):
    """A runner that finds no memory."""

    def run(self, *step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_out_of_memory_is_not_called_too_many_requests():
    with tiny_server(engine=tiny_engine(make_runner=NoMemory)) as server:
        answer = ask(server, "/v1/completions", {"prompt": "x"})
    assert answer.status == 500
    assert answer.error["code"] == "out_of_memory"


def test_a_request_that_never_fits_the_pool_is_refused():
    with tiny_server(engine=tiny_engine(num_pages=4)) as server:
        answer = ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 200})
        assert answer.status == 400
        assert answer.error["param"] == "max_tokens"
        assert ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 9}).status == 200


def test_an_engine_that_dies_is_reported_and_nobody_waits_for_it():
    class Dies(BaseException):
        pass

    class Dying(PlainRunner):
        def run(self, *step):
            raise Dies

    engine = tiny_engine(make_runner=Dying)
    seen = []
    before, threading.excepthook = threading.excepthook, seen.append
    try:
        with tiny_server(engine=engine) as server:
            assert ask(server, "/v1/completions", {"prompt": "x"}).status == 500
            assert ask(server, "/health").status == 500
            assert ask(server, "/v1/completions", {"prompt": "x"}).status == 500
            assert ask(server, "/v1/embeddings", {"input": "x"}).status == 500
    finally:
        threading.excepthook = before
    assert [one.exc_type for one in seen] == [Dies]


def test_what_comes_after_the_engine_has_ended_is_told_so():
    async def ask_late():
        thread = EngineThread(tiny_engine())
        thread.start()
        await thread.close()
        late = thread.score([[1, 2, 3]], num_logprobs=1)
        errors = [one.error async for found in late.news() for one in found]
        with pytest.raises(RuntimeError, match="stopped"):
            await thread.call(lambda: None)
        return errors

    [error] = asyncio.run(ask_late())
    assert "stopped" in str(error)


def test_a_server_that_ends_lets_answers_finish_and_refuses_new_ones():
    with gated_server() as (server, engine):
        client = connect(server)
        client.sendall(request_of({**LONG, "max_tokens": 9, "stream": True}))
        wait_until(lambda: engine.runner.num_begun == 1)
        server.stop()
        wait_until(lambda: server.service.is_draining)
        health = ask(server, "/health")
        refused = ask(server, "/v1/completions", {"prompt": "x"})
        assert (health.status, refused.status) == (503, 503)
        engine.runner.open()
        body = read_all(client)
        assert body.count(b'"finish_reason":"length"') == 1
        assert b"data: [DONE]" in body
        client.close()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_takes_too_long_to_finish_is_ended_with_an_error(stream, monkeypatch):
    monkeypatch.setattr("scratchlm.serve.server.CLOSING_SECONDS", PATIENCE)
    with gated_server(drain_seconds=0.3) as (server, engine):
        client = connect(server)
        client.sendall(request_of({**LONG, "stream": stream}))
        wait_until(lambda: engine.runner.num_begun == 1)
        server.stop()
        wait_until(lambda: server.service.thread._closing)
        engine.runner.let(1)
        body = read_all(client)
        assert b'"error"' in body
        assert (b"500" in body.split(b"\r\n")[0]) is not stream
        client.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    loaded = tiny_loaded(2048)
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(
        folder / "tiny",
        model=loaded.model.state_dict(),
        config=loaded.config,
        tokenizer_file=loaded.tokenizer.save(folder / "tokenizer"),
    )


MAIN = [sys.executable, "-c", "from scratchlm.cli import main; main()", "serve"]


def test_the_command_says_where_it_serves_and_ends_in_order_at_sigterm(checkpoint):
    with subprocess.Popen(
        [*MAIN, str(checkpoint), "--port", "0", "--drain-seconds", str(PATIENCE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SCRATCHLM_API_KEY": "secret"},
    ) as process:
        line = process.stdout.readline()
        assert "serving" in line, process.stderr.read()
        url = line.split()[-1]

        server = SimpleNamespace(url=url)
        key = {"Authorization": "Bearer secret"}
        assert ask(server, "/v1/models").status == 401
        client = connect(server, receive_buffer=4096)  # the stream waits until it is read
        fields = {**LONG, "max_tokens": 1900, "stream": True, "logprobs": 5}
        head = raw_request(
            "/v1/completions", json.dumps(fields).encode(), headers=["Authorization: Bearer secret"]
        )
        client.sendall(head)
        assert b"200 OK" in client.recv(64)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: ask(server, "/health").status == 503)
        assert ask(server, "/v1/completions", {"prompt": "x"}, key).status == 503
        body = read_all(client)
        assert b'"finish_reason":"length"' in body
        assert body.rstrip(b"\r\n0").endswith(b"data: [DONE]")
        client.close()
        assert process.wait() == -signal.SIGTERM
        assert process.stderr.read() == ""


def test_another_address_needs_a_key(checkpoint, monkeypatch):
    monkeypatch.delenv("SCRATCHLM_API_KEY", raising=False)
    with pytest.raises(ScratchLMError, match="--api-key"):
        serve(str(checkpoint), host="0.0.0.0")


def test_a_port_that_is_taken_is_said_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ScratchLMError, match=f"127.0.0.1:{port}"):
            listen(ServeSettings(port=port))


def test_small_pieces_are_sent_at_once():
    """asyncio sets TCP_NODELAY where a socket names its protocol; else each answer takes 40 ms."""
    with listen(ServeSettings(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
