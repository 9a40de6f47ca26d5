"""A process that kills itself, for real, at a moment that is counted: no clock decides where."""

import os
import signal
from collections.abc import Callable
from typing import Any


def is_unfinished(path: object = "", *_: object) -> bool:
    """Whether a rename brings what was written beside its place into it."""
    return os.path.basename(os.fspath(path)).startswith(".")  # type: ignore[call-overload]


def die_at(number: int, *names: str) -> None:
    """Let SIGKILL come just before the nth of these calls to the system (`fsync`, `rename` …).

    Of renames only those count that end a write.
    """
    count = 0

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += name == "fsync" or is_unfinished(*args)
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return watched

    for name in names:
        setattr(os, name, watch(name, getattr(os, name)))
