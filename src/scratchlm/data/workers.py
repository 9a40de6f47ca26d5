"""Encode parts in parallel and yield the results in order.

Each thread of a small pool drives one worker process (`worker.py`) through its pipes. Only a few
parts are in flight at a time, so neither memory nor the work folder grows with the input.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO

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
    workers = min(workers, len(parts))
    if workers <= 1 or not _can_be_loaded(tokenizer, saved_tokenizer):
        for number, part in enumerate(parts):
            path = folder / f"part-{os.getpid()}-{number}"
            yield part, path, encode_part(part, tokenizer, options, path)
        return
    pool = _Pool(saved_tokenizer, options, workers)
    try:
        with ThreadPoolExecutor(workers, "scratchlm-prepare") as threads:
            waiting: deque[tuple[Part, Path, Future[Counts]]] = deque()
            try:
                for number, part in enumerate(parts):
                    path = folder / f"part-{os.getpid()}-{number}"
                    waiting.append((part, path, threads.submit(pool.encode, part, path)))
                    if len(waiting) >= 2 * workers:
                        yield _result(waiting)
                while waiting:
                    yield _result(waiting)
            finally:  # before the threads are joined: they wait for these processes
                for _, _, future in waiting:
                    future.cancel()
                pool.close()
    finally:
        pool.close()


def _can_be_loaded(tokenizer: Tokenizer, saved: Path) -> bool:
    """Return whether a worker can load this tokenizer; a user-provided class stays in-process."""
    from scratchlm.tokenizer import load_tokenizer

    try:
        return load_tokenizer(saved).fingerprint() == tokenizer.fingerprint()
    except (ScratchLMError, ValueError, TypeError, OSError):
        return False


def _result(waiting: deque[tuple[Part, Path, Future[Counts]]]) -> tuple[Part, Path, Counts]:
    part, path, future = waiting.popleft()
    return part, path, future.result()


class _Pool:
    def __init__(self, tokenizer: Path, options: EncodeOptions, workers: int) -> None:
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        setup = json.dumps({"tokenizer": str(tokenizer.absolute()), "options": asdict(options)})
        self.processes: list[subprocess.Popen[str]] = []
        self.free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for _ in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-m", "scratchlm.data.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C goes to the parent only
            )
            self.processes.append(process)
            self.free.put(process)
            _send(process, setup)

    def encode(self, part: Part, path: Path) -> Counts:
        process = self.free.get()
        try:
            _send(process, json.dumps({"part": asdict(part), "path": str(path)}))
            assert process.stdout is not None
            line = process.stdout.readline()
        finally:  # a dead one too: no thread may wait for it forever
            self.free.put(process)
        if not line:
            status = process.wait()
            raise WorkerDiedError(
                f"a worker process ended with status {status}"
                + (" (killed: out of memory?)" if status == -9 else "")
                + "; run the same command again to continue"
            )
        answer = json.loads(line)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"], answer["file"])
        if "error" in answer:
            raise ScratchLMError(answer["error"])
        return Counts(**answer["counts"])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    _close(pipe)
        self.processes = []


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died: reading its answer reports it
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _close(pipe: IO[str]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
