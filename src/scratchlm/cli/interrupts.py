"""Ctrl-C in a command: KeyboardInterrupt, but never with a lock held or a module half imported.

Python raises it between any two instructions of the main thread, also inside a `Condition`'s
`__enter__`, when the lock is taken and the `with` block that would give it back has not begun, and
inside its `__exit__`, before it is given back. A thread pool's thread that needs the lock then
waits for ever, and the command for that thread. An import that is cut short leaves modules which
hold a half of another: a command whose numpy was such a half ended with an AttributeError.
"""

from __future__ import annotations

import signal
import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_WITH_A_LOCK = {threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__}
_IMPORT = "<frozen importlib._bootstrap>"


@contextmanager
def interrupts_between_steps() -> Iterator[None]:
    """Put Ctrl-C off while a lock is being taken or given back, and while a module is imported."""
    before = signal.getsignal(signal.SIGINT)
    plain = before in (signal.default_int_handler, signal.SIG_DFL)
    if not plain or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(_: int, frame: FrameType | None) -> None:
    if frame is None or not (frame.f_code in _WITH_A_LOCK or _is_importing(frame)):
        raise KeyboardInterrupt
    start_new_thread(_again, ())  # of `threading`, it would take locks too


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _again() -> None:
    time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
