"""Ask a server as many users do, and measure what they see: a client in processes of its own.

    python bench/load.py URL PATH < work.json

`work.json` is a list of users, each a list of bodies asked one after the other; all users at once.
For every answer: seconds until its first piece, between tokens (from the first piece to the last,
over the tokens after the first), and in all; and its tokens, as the last chunk counts them
(`stream_options`; else its pieces). An answer without a token fails the load, with what came
instead. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Seen:
    """What one user saw of one answer, in seconds."""

    first: float
    between: float
    total: float
    tokens: int
    began: float  # by the clock that all processes of a machine share
    ended: float
    cpu: float = 0.0  # of the client's process, its part for this answer


class LoadError(Exception):
    """A server did not answer as it should; says what came."""


class Answer(asyncio.Protocol):
    """Notes when bytes came, and reads them when all is over: a client's work must not be seen."""

    def __init__(self, request: bytes) -> None:
        self.request, self.came = request, list[tuple[float, bytes]]()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Note the time."""
        self.came.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        """The server closes the connection at the end."""
        self.over.set_result(None)


def seen(came: Sequence[tuple[float, bytes]], began: float) -> Seen:
    """Read the events in what came; each came when the last of its bytes did."""
    whole = b"".join(data for _, data in came)
    times, tokens, arrivals = [], 0, iter(came)
    now, length, start = 0.0, 0, 0
    while (start := whole.find(b"data: {", start)) >= 0:
        end = whole.index(b"\n", start)
        while length <= end:
            now, data = next(arrivals)
            length += len(data)
        event = json.loads(whole[start + 6 : end])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        choices = event.get("choices") or [{}]
        if choices[0].get("text") or choices[0].get("token_ids"):
            times.append(now)
        start = end
    if not times:
        raise LoadError(f"an answer without a token: {whole[:300]!r}")
    tokens, ended = tokens or len(times), came[-1][0]
    between = (times[-1] - times[0]) / max(tokens - 1, 1)
    return Seen(times[0] - began, between, ended - began, tokens, began, ended)


async def ask(url: str, body: dict[str, Any], path: str) -> tuple[Answer, float]:
    """Stream one answer; return it with when it was asked for."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    _, answer = await loop.create_connection(
        lambda: Answer(head.encode() + data), parts.hostname or "", parts.port or 80
    )
    await answer.over
    return answer, began


async def all_users(url: str, users: Sequence[Sequence[dict[str, Any]]], path: str) -> list[Seen]:
    """Let every user ask one thing after the other, all users at once."""

    async def user(bodies: Sequence[dict[str, Any]]) -> list[tuple[Answer, float]]:
        return [await ask(url, body, path) for body in bodies]

    begin = time.process_time()
    answers = await asyncio.gather(*(user(bodies) for bodies in users))
    took = time.process_time() - begin
    found = [seen(answer.came, began) for of_user in answers for answer, began in of_user]
    return [replace(one, cpu=took / len(found)) for one in found]


def load(
    url: str,
    users: Sequence[Sequence[dict[str, Any]]],
    path: str = "/v1/completions",
    processes: int = 1,
    generator: str = "load",
) -> list[Seen]:
    """Run users in processes of their own, by this file or `load_locust`; return what they saw."""
    script = Path(__file__).with_name(f"{generator}.py")
    command = [sys.executable, str(script), url, path]
    started = []
    for number in range(processes):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(json.dumps(users[number::processes]).encode())
        process.stdin.close()
        started.append(process)
    found: list[Seen] = []
    for process in started:
        assert process.stdout is not None
        answer = process.stdout.read()
        if process.wait():
            raise LoadError("a process of the load ended by an error; it is above")
        printed = json.loads(answer)
        if isinstance(printed, str):
            raise LoadError(printed)
        found += [Seen(**seen) for seen in printed]
    return found


def rate(found: Sequence[Seen]) -> float:
    """Return tokens per second, from the first request to the last answer."""
    begin, end = min(seen.began for seen in found), max(seen.ended for seen in found)
    return sum(seen.tokens for seen in found) / (end - begin)


def medians(found: Sequence[Seen]) -> tuple[float, float, float]:
    """Return the median seconds to the first piece, between tokens, and in all."""
    return (
        statistics.median(seen.first for seen in found),
        statistics.median(seen.between for seen in found),
        statistics.median(seen.total for seen in found),
    )


def report(run: Callable[[], list[Seen]]) -> None:
    """Print what users saw as JSON, or in its place what failed."""
    try:
        print(json.dumps([asdict(seen) for seen in run()]))
    except (LoadError, OSError) as error:
        print(json.dumps(str(error)))


if __name__ == "__main__":
    url, path, users = sys.argv[1], sys.argv[2], json.load(sys.stdin)
    report(lambda: asyncio.run(all_users(url, users, path)))
