"""Encode parts in parallel and yield the results in order.

Worker processes (`worker.py`) get parts through their stdin and answer on their stdout; this
process alone sends, waits and reads. There is no thread and so no lock here: Ctrl-C may arrive
between any two lines and finds nothing that could be left held. Only a few parts are in flight at
a time, so neither memory nor the work folder grows with the input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from scratchlm.data.encoding import Counts, EncodeOptions, Tokenizer, encode_part
from scratchlm.data.parts import Part
from scratchlm.errors import ScratchLMError


class WorkerDiedError(ScratchLMError):
    """A worker process died; the parts finished before are kept."""


def usable_cores() -> int:
    """Return how many cores this process may use, where the system says so; else all."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux's
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def encode_parts(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    saved_tokenizer: Path,
    options: EncodeOptions,
    folder: Path,
    workers: int,
) -> Iterator[tuple[Part, Path, Counts]]:
    """Yield (part, path of its ids, counts) in the order of `parts`, whatever the workers."""
    paths = [folder / f"part-{os.getpid()}-{number}" for number in range(len(parts))]
    workers = min(workers, len(parts))
    if workers <= 1 or not _can_be_loaded(tokenizer, saved_tokenizer):
        for part, path in zip(parts, paths, strict=True):
            yield part, path, encode_part(part, tokenizer, options, path)
        return
    with _started(saved_tokenizer, options, workers) as pool:
        sent = 0
        answers: dict[int, bytes] = {}
        for number, (part, path) in enumerate(zip(parts, paths, strict=True)):
            while True:
                # Two parts a worker: the next begins while the caller stores the last.
                while sent < min(number + 2 * workers, len(parts)) and (free := _least_busy(pool)):
                    free.send(sent, {"part": asdict(parts[sent]), "path": str(paths[sent])})
                    sent += 1
                if number in answers:
                    break
                answers.update(_next_answers(pool))
            yield part, path, _counts(answers.pop(number))


def _can_be_loaded(tokenizer: Tokenizer, saved: Path) -> bool:
    """Return whether a worker can load this tokenizer; a user-provided class stays in-process."""
    from scratchlm.tokenizer import load_tokenizer

    try:
        return load_tokenizer(saved).fingerprint() == tokenizer.fingerprint()
    except (ScratchLMError, ValueError, TypeError, OSError):
        return False


class _Worker:
    """A worker process and the numbers of the parts it has been given."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scratchlm.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what select calls unread is all that is unread
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the parent only
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.given: deque[int] = deque()
        self.alive = True

    def send(self, number: int | None, message: object) -> None:
        if number is not None:
            self.given.append(number)
        with contextlib.suppress(BrokenPipeError):  # it died: reading its answer reports it
            self.stdin.write(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[int, bytes]:
        """Return the next part's answer; from one that died, its status for every part it has."""
        if line := self.stdout.readline():
            return {self.given.popleft(): line}
        self.alive = False
        status = json.dumps({"died": self.process.wait()}).encode()
        return dict.fromkeys(self.given, status)


@contextlib.contextmanager
def _started(tokenizer: Path, options: EncodeOptions, workers: int) -> Iterator[list[_Worker]]:
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    setup = {"tokenizer": str(tokenizer.absolute()), "options": asdict(options)}
    pool: list[_Worker] = []
    try:
        for _ in range(workers):
            pool.append(_Worker({**os.environ, "PYTHONPATH": path}))
            pool[-1].send(None, setup)
        yield pool
    finally:
        for worker in pool:
            worker.process.kill()
        for worker in pool:
            worker.process.wait()
            worker.stdin.close()
            worker.stdout.close()


def _least_busy(pool: list[_Worker]) -> _Worker | None:
    """Return the worker with the fewest parts, if one may be given another."""
    free = [worker for worker in pool if worker.alive and len(worker.given) < 2]
    return min(free, key=lambda worker: len(worker.given), default=None)


def _next_answers(pool: list[_Worker]) -> dict[int, bytes]:
    """Wait until a worker answers or ends; return what it says of which parts."""
    waiting = {worker.stdout.fileno(): worker for worker in pool if worker.alive and worker.given}
    poll = select.poll()  # select.select takes no descriptor above 1,023
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    answers: dict[int, bytes] = {}
    for descriptor, _ in poll.poll():
        answers.update(waiting[descriptor].receive())
    return answers


def _counts(line: bytes) -> Counts:
    answer = json.loads(line)
    if "died" in answer:
        raise WorkerDiedError(
            f"a worker process ended with status {answer['died']}"
            + (" (killed: out of memory?)" if answer["died"] == -9 else "")
            + "; run the same command again to continue"
        )
    if "errno" in answer:
        raise OSError(answer["errno"], answer["error"], answer["file"])
    if "error" in answer:
        raise ScratchLMError(answer["error"])
    return Counts(**answer["counts"])
