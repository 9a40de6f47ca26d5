"""Prefetch in a background thread, in order.

One thread, one bounded queue: it yields make(start), make(start + 1), …, as if called in
a loop. An error of `make` is raised in its place in the order. Closing or
dropping the iterator ends the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
DEPTH = 4  # how many are made in advance


def prefetch(make: Callable[[int], T], start: int, stop: int | None) -> Iterator[T]:
    """Yield make(start), make(start + 1), … below `stop`, `DEPTH` of them made in advance."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(DEPTH)
    stopping = threading.Event()

    def put(item: tuple[T | None, BaseException | None]) -> None:
        while not stopping.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        step = start
        try:
            while not stopping.is_set() and (stop is None or step < stop):
                put((make(step), None))
                step += 1
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=produce, name="scratchlm-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stopping.set()
        while not ready.empty():  # wake a producer that waits for room
            ready.get_nowait()
        thread.join()
