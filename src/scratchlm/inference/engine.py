"""The engine: requests join and leave a running batch at every step.

    engine = Engine(model, num_pages=256)
    handles = [engine.submit(ids, max_new_tokens=50) for ids in prompts]
    for piece in handles[0]: …              whoever waits for a piece drives the engine

A step is scheduled (`scheduler.py`), read by a runner (`paged.py`), and its tokens are chosen on
the device (`device_sampling.py`). The host reads them `lag` steps later: on a GPU the next step is
launched before the tokens of this one are looked at, and a row found to have ended has had one
step too many, whose token is dropped. Text and stop strings are the host's (`rows.py`).

The same request gives the same tokens and log-probabilities, bit for bit, whatever else is in the
batch, however its prompt is cut, and whether its first pages were found or computed: on a CPU
always, on a GPU with `exact=True`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from scratchlm import acceleration
from scratchlm.accounting.pool import PAGE_SIZE
from scratchlm.accounting.pool import num_pages as pool_pages
from scratchlm.inference.device_sampling import (
    NO_VALID_TOKEN,
    NOTHING,
    Settings,
    choose_into,
    logprobs,
    to_device,
)
from scratchlm.inference.outcome import Outcome
from scratchlm.inference.pages import PagePool
from scratchlm.inference.plain_runner import PlainRunner
from scratchlm.inference.prompts import AnyTokenizer, Prompts
from scratchlm.inference.requests import PastContext, check_num_logprobs, make_rows
from scratchlm.inference.rows import Generation, Piece, Row
from scratchlm.inference.sampling import AS_IS, Sampling, uniform
from scratchlm.inference.scheduler import Plan, Request, Scheduler
from scratchlm.model import TransformerLM
from scratchlm.paged import PagedCache, Runner

MakeRunner = Callable[[TransformerLM, PagedCache], Runner]


class Handle:
    """A submitted request: its pieces as they come, and the way to cancel it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._pieces: deque[Piece] = deque()
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
        while self._pieces:
            yield self._pieces.popleft()
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[Piece]:
        while True:
            over = self._is_over  # before looking: what comes last comes before the end
            yield from self.ready()
            if over:
                return
            self._engine._advance(self)

    def result(self) -> Generation:
        """Wait for the whole answer."""
        generation = Generation()
        for piece in self:
            generation.add(piece)
        return generation

    def _end(self, error: BaseException | None = None) -> None:
        self._error, self._is_over = error, True


class Engine:
    """Generates for any number of requests at once, over one pool of pages."""

    def __init__(
        self,
        model: TransformerLM,
        *,
        tokenizer: AnyTokenizer | None = None,
        num_pages: int | None = None,
        memory: int | None = None,
        page_size: int = PAGE_SIZE,
        max_rows: int = 64,
        max_tokens_per_step: int | None = None,
        exact: bool = False,
        accelerate: bool = True,
        lag: int | None = None,
        make_runner: MakeRunner | None = None,
    ) -> None:
        """Take the pool: `num_pages` pages, or as many as fit in `memory` bytes.

        - `page_size`: tokens of a page; whole pages are shared.
        - `max_rows`: requests that run at once; others wait.
        - `max_tokens_per_step`: decoding rows and pieces of prompts together.
        - `exact`: on a GPU, only kernels whose sums do not depend on the batch.
        - `accelerate=False` reads by the model's own forward.
        - `lag`: steps that the host reads behind; None means 1 on a GPU and 0 elsewhere.
        - `make_runner`: what reads steps instead of the choice made here.
        """
        weight = model.token_embeddings.weight
        self.model, self.tokenizer, self.device = model, tokenizer, weight.device
        self.max_rows = max_rows
        on_gpu = self.device.type == "cuda"
        num_pages = _num_pages(model, num_pages, memory, page_size)
        self.cache = PagedCache(
            model.config, num_pages, page_size, device=self.device, dtype=weight.dtype
        )
        self.pool = PagePool(num_pages)
        self.plain = PlainRunner(model, self.cache)
        self.runner = self._choose_runner(make_runner, max_rows, exact, accelerate)
        if max_tokens_per_step is None:
            max_tokens_per_step = max(8192 if on_gpu else 256, 2 * max_rows)
        self.scheduler = Scheduler(
            self.pool,
            page_size=page_size,
            context_length=model.config.context_length,
            max_rows=max_rows,
            max_tokens_per_step=max_tokens_per_step,
            usual_tokens=2048 if on_gpu else None,
            chunk=getattr(self.runner, "chunk", None),
            replay_by_token=exact or not on_gpu,
            catch_up=self._catch_up,
            place=self._place,
        )
        self.lag = (1 if on_gpu else 0) if lag is None else lag
        longest = self.scheduler.pages_for(model.config.context_length)
        self.tables = torch.zeros(max_rows, longest, dtype=torch.int32)
        self._tables: Any = self.tables.numpy()
        self.last = torch.zeros(max_rows, dtype=torch.long, device=self.device)
        self._handles: dict[Request, Handle] = {}
        self._unread: deque[tuple[list[Request], Outcome]] = deque()
        self._choosing: list[Request] | None = None  # whose settings these are:
        self._settings: Settings | None = None
        self._slots = self.last[:0]
        self._arrived: deque[Handle] = deque()
        self._cancelled: deque[Handle] = deque()
        self._stepping = threading.Lock()
        self._news = threading.Condition()

    def _choose_runner(
        self, make_runner: MakeRunner | None, max_rows: int, exact: bool, accelerate: bool
    ) -> Runner:
        if make_runner is not None:
            return make_runner(self.model, self.cache)
        found = None
        if accelerate:
            found = acceleration.make_runner(self.model, self.cache, max_rows=max_rows, exact=exact)
        return self.plain if found is None else found

    # From any thread

    def submit(
        self,
        prompt: Prompts,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling = AS_IS,
        stop: str | Sequence[str] = (),
        eos_ids: Collection[int] | None = None,
        seed: int | None = None,
        num_logprobs: int | None = None,
        past_context: PastContext = "error",
        salt: str = "",
    ) -> Handle:
        """Queue one prompt, a text or token ids; options as in `stream`.

        Requests share pages of prompts that begin alike if they have the same `salt`.
        """
        rows = make_rows(
            prompt,
            self.model.config,
            tokenizer=self.tokenizer,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            eos_ids=eos_ids,
            seed=seed,
            past_context=past_context,
        )
        if len(rows) != 1:
            raise ValueError(f"submit takes one prompt at a time; got {len(rows)}")
        return self.submit_row(rows[0], num_logprobs=num_logprobs, salt=salt)

    def submit_row(self, row: Row, *, num_logprobs: int | None = None, salt: str = "") -> Handle:
        """Queue a row whose arguments have been checked."""
        check_num_logprobs(num_logprobs, self.model.config.vocab_size)
        need = self.scheduler.most_pages(row)
        if need > self.pool.num_pages:
            raise ValueError(
                f"a request must fit the pool of {self.pool.num_pages} pages of "
                f"{self.scheduler.page_size} tokens; got one that takes {need}"
            )
        handle = Handle(self, Request(row, salt, num_logprobs))
        self._arrived.append(handle)
        with self._news:
            self._news.notify_all()
        return handle

    def _cancel(self, handle: Handle) -> None:
        self._cancelled.append(handle)
        if self._stepping.acquire(blocking=False):  # nobody is in the middle of a step
            try:
                self._take_in()
            finally:
                self._stepping.release()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs, or is still to be read."""
        scheduler = self.scheduler
        return not (self._arrived or scheduler.waiting or scheduler.running or self._unread)

    def run(self, until: threading.Event | None = None) -> None:
        """Step until there is nothing to do; with `until`, wait for more until it is set."""
        while True:
            while not self.is_idle and not (until is not None and until.is_set()):
                self.step()
            if until is None or until.is_set():
                return
            with self._news:
                if self.is_idle:
                    self._news.wait(timeout=0.1)

    def _advance(self, handle: Handle) -> None:
        """Step, or wait while another thread does, until `handle` may have news."""
        if self._stepping.acquire(blocking=False):
            try:
                self._step()
            finally:
                self._stepping.release()
        else:
            with self._news:
                if not handle._pieces and not handle.done:
                    self._news.wait(timeout=0.05)

    # A step

    def step(self) -> bool:
        """Do one step; return whether there was anything to do."""
        with self._stepping:
            return self._step()

    @torch.inference_mode()
    def _step(self) -> bool:
        self._take_in()
        plan = self.scheduler.schedule()
        if plan is None:
            found = bool(self._unread)
            self._catch_up()
        else:
            found = True
            try:
                outcome = self._launch(plan)
            except Exception as error:
                for request in plan.requests:
                    self._fail(request, error)
            else:
                self.scheduler.launched(plan)
                if outcome is not None:
                    self._unread.append((plan.choosing, outcome))
            while len(self._unread) > self.lag:
                self._read(*self._unread.popleft())
        with self._news:
            self._news.notify_all()
        return found

    def _launch(self, plan: Plan) -> Outcome | None:
        """Send a step on its way, to the choice of its tokens."""
        logits = self._current_runner().run(plan.step, self.tables, self.last)
        choosing = plan.choosing
        if not choosing:
            return None
        if choosing is not self._choosing:
            self._settings = Settings.of(choosing, logits.shape[-1], logits.device, self._settings)
            self._choosing = choosing
            self._slots = to_device([r.slot for r in choosing], torch.long, self.device)
        settings = self._settings
        assert settings is not None
        numbers = None
        if settings.draws:
            draws = [uniform(r.row.seed, r.chosen) for r in choosing]
            numbers = to_device(draws, torch.float64, self.device)
        tokens = choose_into(self.last, self._slots, logits, settings, numbers)
        if settings.seen is not None:
            settings.seen.add(tokens)
        wanted = logprobs(logits, tokens, settings) if settings.logprobs else []
        return Outcome(tokens, wanted)

    def _current_runner(self) -> Runner:
        """Return the runner, or the model itself once its modules are not those of the runner."""
        return self.runner if getattr(self.runner, "unchanged", True) else self.plain

    def _read(self, requests: list[Request], outcome: Outcome) -> None:
        """Look at the tokens of an earlier step."""
        tokens, logprobs = outcome.read()
        for i, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if request.ended:
                continue
            if token == NOTHING:
                self._fail(request, ValueError(NO_VALID_TOKEN))
                continue
            try:
                piece = request.row.take(token, logprobs.get(i))
            except Exception as error:
                self._fail(request, error)
                continue
            self._handles[request]._pieces.append(piece)
            if piece.finish_reason is not None:
                self._end(request)

    def _catch_up(self) -> None:
        while self._unread:
            self._read(*self._unread.popleft())

    def _take_in(self) -> None:
        """Take in what other threads have asked for."""
        while self._arrived:
            handle = self._arrived.popleft()
            self._handles[handle._request] = handle
            self.scheduler.add(handle._request)
        while self._cancelled:
            handle = self._cancelled.popleft()
            if not handle.done:
                self._end(handle._request)

    def _fail(self, request: Request, error: BaseException) -> None:
        if not request.ended:
            self._end(request, error)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        self.scheduler.end(request)
        self._handles.pop(request)._end(error)

    def _place(self, slot: int, at: int, pages: list[int]) -> None:
        self._tables[slot, at : at + len(pages)] = pages

    def forget_prefixes(self) -> None:
        """Let no request use pages computed before now: call it when the weights have changed."""
        self.pool.forget_all()


def _num_pages(
    model: TransformerLM, num_pages: int | None, memory: int | None, page_size: int
) -> int:
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1; got page_size={page_size}")
    if (num_pages is None) == (memory is None):
        raise ValueError(
            "the pool's size must be given as num_pages or as memory in bytes, one of them; "
            f"got num_pages={num_pages}, memory={memory}"
        )
    if memory is not None:
        size = model.token_embeddings.weight.element_size()
        return pool_pages(model.config, memory, page_size, size)
    assert num_pages is not None
    return num_pages
