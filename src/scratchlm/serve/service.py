"""What all routes of a server share: the model, its engine, and the way to both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from scratchlm.inference.engine import Engine
from scratchlm.inference.loading import Loaded
from scratchlm.inference.rows import Row
from scratchlm.serve.chat_prompts import find_chat_prompts
from scratchlm.serve.engine_thread import EngineThread, Submission
from scratchlm.serve.refusals import Refusal
from scratchlm.serve.request_fields import tables
from scratchlm.serve.settings import ServeSettings


class Service:
    """A model that is being served."""

    def __init__(self, loaded: Loaded, engine: Engine, settings: ServeSettings) -> None:
        self.loaded, self.engine, self.settings = loaded, engine, settings
        self.name = settings.name or loaded.source.absolute().name or "model"
        self.created = int(time.time())
        self.chat = find_chat_prompts(loaded, settings.chat_format)
        self.fields = tables(loaded.config, settings)
        self.thread = EngineThread(engine)
        self.is_draining = False
        self.reading = asyncio.Semaphore(2)  # of large bodies
        self._turn = asyncio.Lock()
        self._num_in_turn = 0  # requests that use the model beside the engine, or wait to

    @property
    def max_choices(self) -> int:
        """How many rows one request may have."""
        return min(self.settings.max_choices, self.engine.max_rows + self.settings.max_queue)

    def check_running(self) -> None:
        """Refuse where nothing can be run any more."""
        if self.thread.error is not None:
            raise Refusal(500, "the engine has stopped after an error", code="engine_stopped")
        if self.is_draining:
            raise Refusal(
                503,
                "the server is shutting down",
                code="shutting_down",
                headers={"Retry-After": "10", "Connection": "close"},
            )

    async def submit(
        self, rows: Sequence[Row], *, num_logprobs: int | None = None, salt: str = ""
    ) -> Submission:
        """Queue rows for the engine, or refuse: 429 where too many wait already."""
        return self._queue(
            len(rows), partial(self.thread.submit, rows, num_logprobs=num_logprobs, salt=salt)
        )

    async def score(
        self, prompts: Sequence[list[int]], *, num_logprobs: int, salt: str = ""
    ) -> Submission:
        """Queue prompts to be scored: how likely each token but the first is."""
        return self._queue(
            len(prompts), partial(self.thread.score, prompts, num_logprobs=num_logprobs, salt=salt)
        )

    def _queue(self, count: int, begin: Callable[[], Submission]) -> Submission:
        self.check_running()
        self._check_queue(self.thread.num_open + count - self.engine.max_rows)
        try:
            return begin()
        except ValueError as error:  # it could never fit the pool
            raise Refusal(400, str(error), field="max_tokens") from None

    def _check_queue(self, waiting: int) -> None:
        if waiting > self.settings.max_queue:
            raise Refusal(
                429,
                f"too many requests wait already: at most {self.settings.max_queue} may",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    @contextlib.asynccontextmanager
    async def turn(self, http: Request) -> AsyncIterator[None]:
        """Wait for a turn at the model beside the engine, one request after the other.

        Whoever has gone away meanwhile is passed over; 429 where too many wait already.
        """
        self.check_running()
        self._check_queue(self._num_in_turn)
        self._num_in_turn += 1
        try:
            async with self._turn:
                await check_present(http)
                yield
        finally:
            self._num_in_turn -= 1

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function that uses the model, between two steps of the engine."""
        self.check_running()
        return await self.thread.call(function)

    def check_model(self, name: str | None) -> None:
        """Refuse a model other than the one that is served."""
        if name is not None and name != self.name:
            raise Refusal(
                404,
                f"model: {name!r:.60} is not served here; {self.name!r} is",
                field="model",
                code="model_not_found",
            )


async def check_present(http: Request) -> None:
    """Stop working for a client that has gone away."""
    if await http.is_disconnected():
        raise Refusal(499, "the client has gone away")  # nobody is there to read it
