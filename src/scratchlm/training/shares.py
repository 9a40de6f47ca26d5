"""A batch in shares, on a CPU: every thread computes the gradients of its rows from end to end.

Torch shares every operation out among its threads, and each waits at its end for the slowest of
them, hundreds of times a step. Here they meet once, when the gradients are added up: in the order
of the shares, whoever is done first, so that the same step gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from scratchlm.data import Batch

T = TypeVar("T")


class Shares:
    """Threads of one torch thread each."""

    def __init__(self, count: int) -> None:
        self.count = count
        # How many threads OpenMP starts is each thread's own number.
        self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        self._known: set[torch.Size] = set()

    def each(self, work: Callable[[Batch], T], batch: Batch) -> list[T]:
        """Cut a batch into shares of as equal rows as can be, and return what `work` makes of each.

        The first of a shape is computed before the others: it may have to be compiled.
        """
        parts = list(batch.cut(-(-len(batch.inputs) // self.count)))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # MKL has one number for all threads
        try:
            return self._run(work, parts)
        finally:
            torch.set_num_threads(threads)

    def _run(self, work: Callable[[Batch], T], parts: Sequence[Batch]) -> list[T]:
        futures = []
        for part in parts:
            futures.append(self._pool.submit(work, part))
            if part.inputs.shape not in self._known:
                futures[-1].result()
                self._known.add(part.inputs.shape)
        errors = [future.exception() for future in futures]  # waits for all, whatever one does
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]
