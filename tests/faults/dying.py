"""A process that kills itself, for real, at a moment that is counted: no clock decides where."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def is_unfinished(path: object = "", *_: object) -> bool:
    """Whether a rename brings what was written beside its place into it."""
    return os.path.basename(os.fspath(path)).startswith(".")  # type: ignore[call-overload]


def die_at(number: int, *names: str, every: bool = False) -> None:
    """Let SIGKILL come just before the nth of these calls to the system (`fsync`, `rename` …).

    Of renames only those count that end a write; with `every`, all calls.
    """
    count = 0

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += every or name == "fsync" or is_unfinished(*args)
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            # SIGKILL loses nothing that was written: nobody need wait for the disk.
            return None if name == "fsync" else real(*args, **more)

        return watched

    for name in names:
        setattr(os, name, watch(name, getattr(os, name)))


def fork(work: Callable[[], object]) -> int:
    """Do `work` in a child that ends with it; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"a life ended in {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def end_within(pid: int, seconds: float) -> int:
    """Wait for a child, and send it SIGKILL where time runs out; return how it ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
