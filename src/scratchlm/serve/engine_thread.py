"""The engine in a thread of its own, and its news on the event loop.

    loop thread     submit → rows into the engine          Submission ← pieces, errors, ends
    engine thread   step, step, …; calls between steps   → one wake-up of the loop for many pieces

The engine thread never waits for the loop: pieces gather with their handles, and the loop is woken
once for all that are there; the longer it takes to write them, the less often, so that writing
events leaves the engine its time. A stream gets what has gathered in one event.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from scratchlm.inference.engine import Engine, Handle
from scratchlm.inference.rows import Piece, Row

LOOP_TURNS = 6  # from a connection that is taken to its request being submitted, and one more
EVENTS_SHARE = 8  # events take about one part in so many of the time, at most


@dataclass(frozen=True)
class News:
    """What came for one row of a submission."""

    index: int
    pieces: list[Piece]
    is_over: bool
    error: BaseException | None


WriteNow = Callable[[list[News]], bool]  # whether it could be done


class Submission:
    """Rows of one HTTP request on their way; lives on the event loop."""

    def __init__(self, thread: EngineThread, lengths: Sequence[int], generates: bool) -> None:
        self.lengths = list(lengths)  # of the prompts, in tokens
        self.generates = generates  # or else scores what is there
        self.handles: list[Handle] = []
        self.num_open = len(lengths)
        self.is_cancelled = False
        self.begin = time.perf_counter()
        self._thread = thread
        self.write_now: WriteNow | None = None  # where news can be passed on without a task's turn
        self._inbox: list[News] = []
        self._is_taken = False  # news that were given out are still being worked on
        self._is_news = asyncio.Event()

    def take(self, found: list[News]) -> None:
        """Receive what the engine thread has sent, and pass it on at once where that can be."""
        self.num_open -= sum(news.is_over for news in found)
        in_order = not self._inbox and not self._is_taken
        if not (in_order and self._is_written(found)):
            self._inbox += found
            self._is_news.set()
        elif not self.num_open:
            self._is_news.set()

    def _is_written(self, found: list[News]) -> bool:
        if self.write_now is None or self.is_cancelled:
            return False
        try:
            return self.write_now(found)
        except Exception:  # raised again where the request is answered, and there alone
            return False

    def cancel(self) -> None:
        """Give all rows up; their pages are free within one step."""
        if self.num_open and not self.is_cancelled:
            for handle in self.handles:
                handle.cancel()
            self._thread.wake()
        self.is_cancelled = True
        self._is_news.set()

    async def news(self) -> AsyncIterator[list[News]]:
        """Yield what has come since, until every row is over or the submission is cancelled."""
        while not self.is_cancelled:
            await self._is_news.wait()
            self._is_news.clear()
            found, self._inbox = self._inbox, []
            if found:
                self._is_taken = True
                yield found
                self._is_taken = False
            if not self.num_open and not self._inbox:
                return


class EngineThread:
    """Runs an engine, and brings its news to an event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_open = 0  # rows submitted and not over, as the loop knows
        self.error: BaseException | None = None  # what ended the thread
        self.listeners: list[Callable[[Submission, News], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: deque[tuple[Submission, int]] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._following: list[tuple[Submission, int, Handle]] = []
        self._outbox: deque[tuple[Submission, News]] = deque()
        self._delivery_due = False
        self._next_delivery = 0.0
        self._delivery_seconds = 0.0  # of the loop's thread, which shares the interpreter
        self._num_gathered = 0  # tokens of prompts that the thread has not been woken for
        self._wake = threading.Event()
        self._closing = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # On the loop

    def start(self) -> None:
        """Begin to run, for the event loop this is called on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end; what still runs fails."""
        self._closing = True
        self.wake()

    async def close(self) -> None:
        """End the thread, and wait for that."""
        self.stop()
        await asyncio.to_thread(self._thread.join)

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits for something of the engine."""
        return bool(self.num_open or self._calls)

    def submit(
        self, rows: Sequence[Row], *, num_logprobs: int | None = None, salt: str = ""
    ) -> Submission:
        """Queue rows whose arguments have been checked; all of them, or none."""
        submission = Submission(self, [row.num_prompt for row in rows], generates=True)
        submit = partial(self.engine.submit_row, num_logprobs=num_logprobs, salt=salt)
        return self._begin(submission, [partial(submit, row) for row in rows])

    def score(
        self, prompts: Sequence[list[int]], *, num_logprobs: int, salt: str = ""
    ) -> Submission:
        """Queue prompts whose tokens but the first are to be scored; all of them, or none."""
        submission = Submission(self, [len(ids) for ids in prompts], generates=False)
        score = partial(self.engine.submit_score, num_logprobs=num_logprobs, salt=salt)
        return self._begin(submission, [partial(score, ids) for ids in prompts])

    def _begin(self, submission: Submission, begin: list[Callable[[], Handle]]) -> Submission:
        try:
            for one in begin:
                submission.handles.append(one())
        except BaseException:
            submission.cancel()
            raise
        self.num_open += len(begin)
        self._arrived.extend((submission, index) for index in range(len(begin)))
        self._num_gathered += sum(submission.lengths)
        is_enough = self._num_gathered >= self.engine.scheduler.max_tokens
        self._wake_after(0 if is_enough else LOOP_TURNS)
        if self._has_ended:  # nobody else would say so
            self._give_up()
        return submission

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread, between two steps."""
        future: Future[Any] = Future()
        self._calls.append((function, future))
        self.wake()
        if self._has_ended:
            self._give_up()
        return await asyncio.wrap_future(future)

    def wake(self) -> None:
        """Let the engine's thread look for something to do."""
        self._wake.set()

    def _wake_after(self, turns: int) -> None:
        """Wake the thread when the loop has read what came meanwhile: it begins together.

        What fills a step need not wait for more.
        """
        if turns and self._loop is not None:
            self._loop.call_soon(self._wake_after, turns - 1)
        else:
            self._num_gathered = 0
            self.wake()

    def _deliver(self) -> None:
        begin = time.thread_time()
        self._delivery_due = False
        found: dict[Submission, list[News]] = {}  # what came together for each
        while self._outbox:
            submission, news = self._outbox.popleft()
            if news.is_over:
                self.num_open -= 1
            for listener in self.listeners:
                listener(submission, news)
            found.setdefault(submission, []).append(news)
        for submission, of_one in found.items():
            submission.take(of_one)
        self._delivery_seconds = time.thread_time() - begin

    # In the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._make_calls()
                if self.engine.is_idle:
                    self._follow(at_once=True)
                    self._wake.wait(timeout=1.0)
                    self._wake.clear()
                else:
                    self.engine.step()
                    self._follow()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._has_ended = True
            self._give_up()

    def _make_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def _follow(self, at_once: bool = False) -> None:
        """Gather what the last steps have brought, and wake the loop once, if it is time for it."""
        now = time.perf_counter()
        if not at_once and (self._delivery_due or now < self._next_delivery):
            return
        self._next_delivery = now + EVENTS_SHARE * self._delivery_seconds
        while self._arrived:
            submission, index = self._arrived.popleft()
            self._following.append((submission, index, submission.handles[index]))
        still = []
        for following in self._following:
            submission, index, handle = following
            over = handle.done  # before looking: what comes last comes before the end
            pieces: list[Piece] = []
            error = None
            try:
                pieces.extend(handle.ready())
            except BaseException as raised:
                error, over = raised, True
            if pieces or over:
                self._outbox.append((submission, News(index, pieces, over, error)))
            if not over:
                still.append(following)
        self._following = still
        self._send()

    def _send(self) -> None:
        if self._outbox and not self._delivery_due and self._loop is not None:
            self._delivery_due = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has been closed
                self._closing = True

    def _give_up(self) -> None:
        """Tell all that wait that nothing more will come."""
        self._follow(at_once=True)
        problem = RuntimeError("the engine has stopped")
        for submission, index, handle in self._following:
            handle.cancel()
            self._outbox.append((submission, News(index, [], True, problem)))
        self._following = []
        self._send()
        while self._calls:
            self._calls.popleft()[1].set_exception(problem)
