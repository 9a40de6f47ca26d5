"""Ctrl-C in a command: KeyboardInterrupt, but never where it would leave a lock held.

Python raises it between any two instructions of the main thread, also inside a `Condition`'s
`__enter__`, when the lock is taken and the `with` block that would give it back has not begun, and
inside its `__exit__`, before it is given back. A thread pool's thread that needs the lock then
waits for ever, and the command for that thread.
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


@contextmanager
def interrupts_outside_locks() -> Iterator[None]:
    """Put Ctrl-C off while a lock is being taken or given back."""
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not plain or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(_: int, frame: FrameType | None) -> None:
    if frame is None or frame.f_code not in _WITH_A_LOCK:
        raise KeyboardInterrupt
    start_new_thread(_again, ())  # of `threading`, it would take locks too


def _again() -> None:
    time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
