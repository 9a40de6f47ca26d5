"""Ctrl-C and SIGTERM: ask the loop to stop at the next step; a second one ends the process.

After the first signal the default handlers are restored, so that a second one ends the process at
once, even inside a long computation. That loses no more than a kill would: nothing that was saved.
A rank ignores a second one: its launcher passes on what it gets, and a cluster may send to both.
The launcher kills a rank that takes too long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Interruption:
    """The signal that asked the run to stop, if any."""

    signal: int | None = None

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """The shell's convention, 128 + signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 0 if self.signal is None else 128 + self.signal


@contextlib.contextmanager
def watch_signals(notice: str = "", *, is_rank: bool = False) -> Iterator[Interruption]:
    """Catch the first SIGINT or SIGTERM, and print `notice` to stderr at once.

    Outside the main thread nothing is caught.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interruption.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN if is_rank else signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.write(2, notice.encode())  # print is not safe in the middle of another print

    before = {each: signal.signal(each, handle) for each in SIGNALS}
    try:
        yield interruption
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
