"""Load and abuse: disconnects, timeouts, aborts, nonsense, slowness. Short here, long with `slow`.

Each long form is the same function with larger numbers; ten minutes of all of it at once, with an
eye on the memory, are in `tests/faults/test_load.py`.
"""

import asyncio
import json
import random
import shutil
import string
import subprocess
import threading
import time
import warnings
from urllib.parse import urlsplit

import httpx
import pytest

from serve.tiny_server import ask, connect, raw_request, tiny_engine, tiny_loaded, tiny_server
from waiting import PATIENCE, wait_until


@pytest.fixture
def note(capsys, record_property):
    """Write a figure down, and print it; no time decides whether a test passes."""

    def write(name, value):
        record_property(name, value)
        with capsys.disabled():
            print(f"\n{name}: {value}")

    return write


def tasks_of(server):
    return [t for t in asyncio.all_tasks(server.service.thread._loop) if "run_asgi" in repr(t)]


def nothing_is_left(server):
    """No page, row, task or submission."""
    service = server.service
    wait_until(lambda: service.engine.pool.num_held == 0 and service.thread.num_open == 0)
    wait_until(lambda: not tasks_of(server))
    assert not service.engine._handles
    assert not service.thread._following


async def disconnecting_streams(server, users, seconds, share):
    """Stream by many users at once, of whom some leave in the middle; return the statuses.

    Every user asks twice at least, however slow the machine is.
    """
    statuses, end = [], time.monotonic() + seconds
    limits = httpx.Limits(max_connections=users)

    async def user(number):
        rng = random.Random(number)
        asked = 0
        while asked < 2 or time.monotonic() < end:
            asked += 1
            body = {
                "prompt": [rng.randrange(256) for _ in range(rng.randrange(1, 100))],
                "max_tokens": rng.randrange(1, 200),
                "stream": True,
                "n": rng.choice([1, 1, 1, 2]),
            }
            leaves = rng.random() < share
            async with client.stream("POST", "/v1/completions", json=body) as response:
                statuses.append(response.status_code)
                count = 0
                async for line in response.aiter_lines():
                    count += bool(line)
                    if leaves and count > rng.randrange(1, 20):
                        break

    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
        await asyncio.gather(*(user(i) for i in range(users)))
    return statuses


def run_disconnecting_streams(users, seconds):
    with tiny_server(engine=tiny_engine(max_rows=32)) as server:
        statuses = asyncio.run(disconnecting_streams(server, users, seconds, 0.3))
        nothing_is_left(server)
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) > users
    return len(statuses)


def test_streams_of_whom_a_third_leave_leave_nothing_behind(note):
    count = run_disconnecting_streams(16, 1)
    note("streams", count)


def run_timeouts(requests, tokens):
    """Ask for long answers that nobody waits for; then one that somebody does."""
    loaded = tiny_loaded(16384)
    engine = tiny_engine(loaded, num_pages=2048, page_size=64, max_rows=16)

    async def impatient(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=0.5, limits=unbounded) as client:
            body = {"prompt": [1] * tokens, "max_tokens": 100, "ignore_eos": True}
            asked = [client.post("/v1/completions", json=body) for _ in range(requests)]
            return await asyncio.gather(*asked, return_exceptions=True)

    unbounded = httpx.Limits(max_connections=None)
    with tiny_server(loaded, engine) as server:
        found = asyncio.run(impatient(server))
        begin = time.monotonic()
        answer = ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 5})
        took = time.monotonic() - begin
        nothing_is_left(server)
    given_up = sum(isinstance(one, httpx.TimeoutException) for one in found)
    assert all(isinstance(one, httpx.TimeoutException | httpx.Response) for one in found)
    assert answer.status == 200
    return given_up, took


def test_requests_that_time_out_do_not_hold_up_the_next(note):
    given_up, took = run_timeouts(20, 3000)
    note("given up", given_up)
    note("seconds until the next was answered", round(took, 2))


@pytest.mark.slow
def test_200_requests_of_10000_tokens_do_not_hold_up_the_next(note, tried):
    given_up, took = run_timeouts(200, 10_000)
    tried("requests of 10,000 tokens, given up after 0.5 s", 200, f"the next took {took:.1f} s")
    note("given up", given_up)
    note("seconds until the next was answered", round(took, 2))
    assert given_up > 100


def abort_once(server, rng):
    """Leave at any moment: while sending, before the answer, in the middle of it."""
    body = {
        "prompt": [rng.randrange(256) for _ in range(rng.randrange(1, 60))],
        "max_tokens": rng.randrange(1, 100),
        "stream": rng.random() < 0.5,
    }
    data = raw_request("/v1/completions", json.dumps(body).encode())
    with connect(server) as client:
        sent = rng.choice([rng.randrange(len(data)), len(data), len(data), len(data)])
        client.sendall(data[:sent])
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.01)
        if sent == len(data) and rng.random() < 0.3:
            client.recv(rng.randrange(1, 300))


def run_aborts(count, threads=4):
    with tiny_server(engine=tiny_engine(max_rows=16), max_queue=4096) as server:

        def leave(number):
            rng = random.Random(number)
            for _ in range(count // threads):
                abort_once(server, rng)

        workers = [threading.Thread(target=leave, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        nothing_is_left(server)
        assert ask(server, "/v1/completions", {"prompt": "x"}).status == 200


def test_random_aborts_leave_the_pool_empty():
    run_aborts(200)


@pytest.mark.slow
def test_10000_random_aborts_leave_the_pool_empty(tried):
    run_aborts(10_000)
    tried("requests aborted at any moment, the pool empty after", 10_000)


# Nonsense

ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, -1e308, 2**63, -(2**63), 10**400, 1e-320),
    *("", "a", "\ud800", "\x00", "é" * 50, "STOP", [], [[]], [0], [-1], [258], [259], ["a", 1]),
    *({}, {"a": 1}, {"0": 100}, {"include_usage": True}, [{}], [{"role": "user"}]),
    [{"role": "user", "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": ["user"], "content": {"a": 1}}],
]
NAMES = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]


def odd_request(rng, fields):
    """Return a route and a body that is nearly, or not at all, a request."""
    path = rng.choice(NAMES)
    body = {
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2,
        },
        "/v1/embeddings": {"input": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }[path]
    known = list(fields[path])
    for _ in range(rng.randrange(4)):
        name = rng.choice(known) if rng.random() < 0.9 else rng.choice(["x", "", "n\x00"])
        body[name] = rng.choice(ODD_VALUES)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    if rng.random() < 0.2:
        data = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.choice(string.printable.encode() + b"\x00\xff\xed")
        data = bytes(data)
    return path, data


def ask_nonsense(server, client, rng):
    """Ask once; return the status, which is never the server's error."""
    path, data = odd_request(rng, server.service.fields)
    answer = client.post(path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (path, data, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    return answer.status_code


def run_nonsense(count, seed):
    rng = random.Random(seed)
    statuses = {}
    with tiny_server() as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for _ in range(count):
            status = ask_nonsense(server, client, rng)
            statuses[status] = statuses.get(status, 0) + 1
        nothing_is_left(server)
    return statuses


def test_nonsense_is_never_an_error_of_the_server(note):
    statuses = run_nonsense(250, 0)
    note("statuses", str(statuses))
    assert statuses[200] > 25
    assert statuses[400] > 25


@pytest.mark.slow
def test_10000_nonsense_requests_are_never_an_error_of_the_server(note, tried):
    note("statuses", str(run_nonsense(10_000, 1)))
    tried("nonsense requests, no 5xx", 10_000)


@pytest.mark.parametrize(
    "examples", [3, pytest.param(200, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_schemathesis_finds_no_error_of_the_server(examples, tried):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import hypothesis
        import schemathesis
    with tiny_server() as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = schemathesis.openapi.from_dict(ask(server, "/openapi.json").json)
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) == 10
        for operation in operations:

            @hypothesis.settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy())
            def run(case):
                answer = case.call(base_url=server.url, timeout=PATIENCE)
                assert answer.status_code < 500
                case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

            run()
    tried("requests by schemathesis, no 5xx", examples * len(operations), "at most")


# Slowness


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["-H", "-B", "-X"], ids=["headers", "body", "reading"])
def test_slowhttptest_leaves_the_server_quick(attack, note, tried):
    if shutil.which("slowhttptest") is None:
        pytest.skip("slowhttptest is not installed: a package of Debian of that name")
    with tiny_server() as server:
        parts = urlsplit(server.url)
        path = "/v1/completions" if attack == "-B" else "/health"
        command = ["slowhttptest", attack, "-c", "1000", "-r", "200", "-l", "20", "-i", "5"]
        command += ["-u", f"http://{parts.hostname}:{parts.port}{path}", "-x", "24", "-p", "3"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            times = []
            while process.poll() is None:
                begin = time.perf_counter()
                assert ask(server, "/health").status == 200
                times.append(time.perf_counter() - begin)
                time.sleep(0.1)
    times.sort()
    note(
        "health, ms: median, 99 %, most",
        str([round(1000 * times[at], 1) for at in (len(times) // 2, len(times) * 99 // 100, -1)]),
    )
    assert len(times) > 50
    tried("slow connections (slowhttptest), /health answered", 1000, f"slowest {times[-1]:.2f} s")


def test_many_slow_clients_leave_the_server_answering():
    with tiny_server(max_connections=200) as server:
        slow = [connect(server) for _ in range(180)]
        for at, client in enumerate(slow):
            client.sendall(raw_request("/v1/completions", b"{}")[: 20 + at % 100])
        for _ in range(50):
            assert ask(server, "/health").status == 200
        for client in slow:
            client.close()
