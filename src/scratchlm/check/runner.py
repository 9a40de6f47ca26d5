"""Run a learner's file in a process of its own, with a time limit on every call.

The process is forked from this one, which has imported everything already: it starts in a few
milliseconds. One that hangs or ends itself is replaced, from the next function on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scratchlm.check.child import Reporter, fork, run_child
from scratchlm.check.outcomes import Outcome, unpack
from scratchlm.check.tasks import expected
from scratchlm.errors import ScratchLMError

TIME_LIMIT = 10.0  # seconds for one call


@dataclass
class FunctionRun:
    """What one function did."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by case
    printed: str = ""


class ChildEnded(Exception):
    """The learner's process hung or ended."""


def messages(
    work: Callable[[Reporter], None], limit: float, printed: int
) -> Generator[dict[str, Any], None, None]:
    """Yield what a forked process reports; one that is silent for too long is killed."""
    pid, pipe = fork(work, printed)
    reaped = False
    buffer = b""
    try:
        while True:
            until = time.monotonic() + limit
            while b"\n" not in buffer:
                ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
                if not ready:
                    raise ChildEnded(f"does not return within {limit:g} s")
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    reaped = True
                    if status == 0 and not buffer:
                        return
                    raise ChildEnded(_ending(status))
                buffer += piece
            line, _, buffer = buffer.partition(b"\n")
            yield json.loads(line)
    finally:
        os.close(pipe)
        _kill(pid, reaped)


def _ending(status: int) -> str:
    if status < 0:
        return f"ends the process ({signal.Signals(-status).name})"
    return f"ends the process (exit status {status})"


def _kill(pid: int, reaped: bool) -> None:
    """End a process and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not reaped:
        os.kill(pid, signal.SIGKILL)  # where it had no group of its own yet
        os.waitpid(pid, 0)


def run_file(
    path: Path,
    names: Sequence[str],
    *,
    borrowed: frozenset[str],
    course: bool,
    limit: float,
) -> dict[str, FunctionRun]:
    """Run functions of a file on all their cases; `borrowed` ones stay as they are defined."""
    if not hasattr(os, "fork"):
        raise ScratchLMError("scratchlm check needs a system that can fork: Linux, macOS or WSL")
    ran = {name: FunctionRun() for name in names}
    for name in names:
        expected(name)  # before the fork, once for all of them
    ended: set[str] = set()
    with tempfile.TemporaryFile() as output:
        while left := [name for name in names if name not in ended]:
            wrong = set(borrowed) | ended
            ended |= _run_once(path, left, wrong, ran, course, limit, output.fileno())
    return ran


def _run_once(
    path: Path,
    names: list[str],
    borrowed: set[str],
    ran: dict[str, FunctionRun],
    course: bool,
    limit: float,
    output: int,
) -> set[str]:
    """Run functions in one process until it ends; return those that are done with."""
    ended: set[str] = set()
    at: list[Any] | None = None

    def work(report: Reporter) -> None:
        run_child(report, path, names, borrowed, course)

    try:
        for message in messages(work, limit, output):
            at = message.get("begin", at)
            if "failed" in message:
                raise ScratchLMError(f"{path} {message['failed']}")
            if "end" in message:
                name, index = message["end"]
                ran[name].outcomes[index] = unpack(message["outcome"])
            if "done" in message:
                ran[message["done"]].printed = message["printed"]
                ended.add(message["done"])
    except ChildEnded as how:
        if at is None:
            raise ScratchLMError(f"{path} does not load: it {how}") from None
        name, index = at
        ran[name].outcomes[index] = {"complaint": str(how)}
        return {*ended, name}
    return set(names)  # those without an outcome are not in the file
