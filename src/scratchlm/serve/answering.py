"""Generate for a request and answer it, whole or as a stream; whoever goes away is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scratchlm.inference.device_sampling import NO_VALID_TOKEN
from scratchlm.inference.rows import Generation, Piece
from scratchlm.serve.engine_thread import News, Submission
from scratchlm.serve.generation import Generate
from scratchlm.serve.openai_format import DONE, Answer, AnswerStream, PromptLogprobs, event
from scratchlm.serve.refusals import Refusal, json_response
from scratchlm.serve.server import WRITE_NOW
from scratchlm.serve.service import Service

log = logging.getLogger("scratchlm.serve")
Write = Callable[[bytes], Awaitable[None]]
LONG = 1000  # tokens whose log-probabilities are written beside the event loop


@contextlib.asynccontextmanager
async def given_up_with(receive: Receive, submission: Submission | None) -> AsyncIterator[None]:
    """Cancel a submission when its client goes away, and when the block is left."""
    if submission is None:
        yield
        return

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        submission.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        submission.cancel()
        watcher.cancel()


async def answer(service: Service, request: Generate, http: Request) -> Response:
    """Answer a request to generate."""
    service.check_running()
    read = None
    if request.echo and request.num_logprobs is not None:
        read = await _score(service, request, http)
    about = (request, service.name, service.loaded.tokenizer, read)
    is_long = read is not None and request.num_prompt_tokens >= LONG
    if request.stream:
        stream = AnswerStream(*about)
        first = await asyncio.to_thread(stream.first) if is_long else stream.first()
        return EventStream(stream, first, await _submit(service, request) if request.rows else None)
    generations = [Generation() for _ in request.prompts]
    if request.rows:
        generations = await _gather(await _submit(service, request), http)
    if not is_long:
        return json_response(Answer(*about).whole(generations))
    return await asyncio.to_thread(lambda: json_response(Answer(*about).whole(generations)))


async def _submit(service: Service, request: Generate) -> Submission:
    return await service.submit(request.rows, num_logprobs=request.num_logprobs, salt=request.salt)


async def _gather(submission: Submission, http: Request) -> list[Generation]:
    """Wait for all that is to come, as long as the client does."""
    generations = [Generation() for _ in submission.lengths]
    async with given_up_with(http.receive, submission):
        async for found in submission.news():
            for news in found:
                if news.error is not None:
                    raise failure(news.error)
                for piece in news.pieces:
                    generations[news.index].add(piece)
    if submission.num_open:
        raise Refusal(499, "the client has gone away")  # nobody is there to read it
    return generations


async def _score(service: Service, request: Generate, http: Request) -> list[PromptLogprobs]:
    """Return the log-probabilities of every choice's prompt, each prompt read once.

    A token's come from what is before it, so the first has none.
    """
    repeat, best = len(request.prompts) // request.num_prompts, request.num_logprobs or 0
    prompts = request.prompts[::repeat]
    scored = [ids for ids in prompts if len(ids) > 1]
    found: list[Generation] = []
    if scored:
        submission = await service.score(scored, num_logprobs=max(best, 1), salt=request.salt)
        found = await _gather(submission, http)
    of_scored = iter(found)
    read: list[PromptLogprobs] = []
    for ids in prompts:
        logprobs = (next(of_scored).logprobs or []) if len(ids) > 1 else []
        entries = [replace(one, best=one.best[:best]) for one in logprobs]
        read += [[None, *entries]] * repeat
    return read


def failure(error: BaseException) -> Refusal:
    """Say in one line what a request failed by; the log has the rest."""
    if str(error) == NO_VALID_TOKEN:
        return Refusal(500, NO_VALID_TOKEN, code="no_valid_token")
    if is_out_of_memory(error):
        return Refusal(500, "not enough memory for this step", code="out_of_memory")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the request failed in the engine; the server's log says why")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether something did not fit in memory, as Python or torch say it."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("out of memory" in text or "can't allocate memory" in text)
    )


class EventStream(Response):
    """The answer to one request as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, writer: AnswerStream, first: bytes, submission: Submission | None) -> None:
        self.status_code = 200
        self.background = None
        self.writer, self.first, self.submission = writer, first, submission
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come."""

        async def write(data: bytes) -> None:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        write_now = scope.get("extensions", {}).get(WRITE_NOW)
        async with given_up_with(receive, self.submission):
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await write(self.first)
            if self.submission is None:
                await write(self.writer.last())
            else:
                if write_now is not None:
                    self.submission.write_now = partial(self._write_now, write_now)
                await self._send_news(self.submission, write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_news(self, submission: Submission, write: Write) -> None:
        async for found in submission.news():
            data, error = self._events(found)
            if error is not None:
                await write(data + event(failure(error).body()) + DONE)
                return
            await write(data)
        if not submission.num_open:
            await write(self.writer.last())

    def _write_now(self, write: Callable[[bytes], bool], found: list[News]) -> bool:
        """Write news as they come, without a task's turn; not where one says how it failed."""
        if any(news.error is not None for news in found) or not write(b""):
            return False
        return write(self._events(found)[0])  # which can be made once only

    def _events(self, found: list[News]) -> tuple[bytes, BaseException | None]:
        """Write what came together, in one event for each choice; and say what one failed by."""
        pieces: dict[int, list[Piece]] = {}
        for news in found:
            pieces.setdefault(news.index, []).extend(news.pieces)
        data = b"".join([self.writer.pieces(*of_choice) for of_choice in pieces.items()])
        return data, next((news.error for news in found if news.error is not None), None)
