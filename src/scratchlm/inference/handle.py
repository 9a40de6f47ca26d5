"""What whoever submits a request holds: its pieces as they come, and the way to cancel it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scratchlm.inference.rows import Generation, Piece, ScoredTokens
from scratchlm.inference.step_plan import Request

if TYPE_CHECKING:
    from scratchlm.inference.engine import Engine


class Handle:
    """A submitted request: its pieces as they come, and the way to cancel it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._pieces: deque[Piece | ScoredTokens] = deque()
        self._is_over = False
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether no more pieces will come: it has finished, failed, or been cancelled."""
        return self._is_over

    def cancel(self) -> None:
        """Give the request up, from any thread; its pages are free within one step."""
        self._engine._cancel(self)

    def ready(self) -> Iterator[Piece]:
        """Give out the pieces that are there, without waiting; raise what the request failed by."""
        return self._one_by_one(self._ready())

    def _ready(self) -> Iterator[Piece | ScoredTokens]:
        while self._pieces:
            yield self._pieces.popleft()
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[Piece]:
        return self._one_by_one(self._parts())

    def _one_by_one(self, parts: Iterator[Piece | ScoredTokens]) -> Iterator[Piece]:
        for part in parts:
            if isinstance(part, ScoredTokens):  # back with it: whoever stops may go on
                self._pieces.extendleft(reversed([*part.pieces()]))
            else:
                yield part

    def _parts(self) -> Iterator[Piece | ScoredTokens]:
        while True:
            over = self._is_over  # before looking: what comes last comes before the end
            yield from self._ready()
            if over:
                return
            self._engine._advance(self)

    def scores(self) -> list[ScoredTokens]:
        """Wait for all of a scored request, as it came from the device."""
        return [part for part in self._parts() if isinstance(part, ScoredTokens)]

    def result(self) -> Generation:
        """Wait for the whole answer."""
        generation = Generation()
        for piece in self:
            generation.add(piece)
        return generation

    def _end(self, error: BaseException | None = None) -> None:
        self._error, self._is_over = error, True
