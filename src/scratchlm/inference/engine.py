"""The engine: requests join and leave a running batch at every step.

    engine = Engine(model, num_pages=256)
    handles = [engine.submit(ids, max_new_tokens=50) for ids in prompts]
    for piece in handles[0]: …              whoever waits for a piece drives the engine

A step is scheduled (`scheduler.py`), read by a runner (`paged.py`), and its tokens are chosen on
the device (`choosing.py`). The host reads them `lag` steps later: on a GPU the next step is
launched before the tokens of this one are looked at, and a row found to have ended has had one
step too many, whose token is dropped. Text and stop strings are the host's (`rows.py`).

Some requests speculate (`speculation.py`): several tokens are proposed for them, by a draft model
(`drafting.py`) or from their own text, and verified in one step. Such a step is read at once.

The same request gives the same tokens and log-probabilities, bit for bit, whatever else is in the
batch, however its prompt is cut, and whether its first pages were found or computed: on a CPU
always, on a GPU with `exact=True`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from scratchlm import acceleration
from scratchlm.accounting.pool import PAGE_SIZE
from scratchlm.inference.choosing import TokenChooser
from scratchlm.inference.device_sampling import NO_VALID_TOKEN, to_device
from scratchlm.inference.drafting import Drafter, check_draft
from scratchlm.inference.drawing import NOTHING
from scratchlm.inference.handle import Handle
from scratchlm.inference.outcome import Outcome
from scratchlm.inference.pages import PagePool
from scratchlm.inference.plain_runner import PlainRunner
from scratchlm.inference.pool_memory import check_kv_dtype, new_cache, num_pool_pages
from scratchlm.inference.prompts import AnyTokenizer, Prompts
from scratchlm.inference.proposing import Proposer, why_not_verified
from scratchlm.inference.requests import PastContext, check_num_logprobs, make_rows
from scratchlm.inference.rows import Piece, Row, ScoredTokens, TokenLogprob
from scratchlm.inference.sampling import AS_IS, Sampling
from scratchlm.inference.scheduler import Plan, Request, Scheduler
from scratchlm.inference.scoring import (
    ScoredRow,
    UnreadScores,
    rows_that_choose,
    score_logits,
    scored_row,
)
from scratchlm.inference.speculation import Speculate
from scratchlm.inference.verifying import accept
from scratchlm.model import TransformerLM
from scratchlm.paged import KVDtype, PagedCache, Runner

MakeRunner = Callable[[TransformerLM, PagedCache], Runner]


class Unread(NamedTuple):
    """Tokens of a step that the host has not looked at, and whose they are."""

    requests: list[Request]
    outcome: Outcome
    is_verified: bool = False  # some requests have several, for proposals


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
        draft: TransformerLM | None = None,
        draft_tokens: int = 6,
        speculate: Speculate | None = None,
        kv_dtype: KVDtype | None = None,
        make_runner: MakeRunner | None = None,
    ) -> None:
        """Take the pool: `num_pages` pages, or as many as fit in `memory` bytes.

        - `page_size`: tokens of a page; whole pages are shared.
        - `max_rows`: requests that run at once; others wait.
        - `max_tokens_per_step`: decoding rows and pieces of prompts together.
        - `exact`: on a GPU, only kernels whose sums do not depend on the batch.
        - `accelerate=False` reads by the model's own forward.
        - `lag`: steps that the host reads behind; None means 1 on a GPU and 0 elsewhere.
        - `draft`: a smaller model that proposes up to `draft_tokens` at a time; `speculate`: what
          proposes where a request does not say: "draft" (the default with a draft), "lookup" (the
          request's own text), or "off". `why_not_verified` says where that gains nothing.
        - `kv_dtype`: keys and values in 8 bits, "int8" or "fp8"; None: in the weights' dtype.
        - `make_runner`: what reads steps instead of the choice made here.
        """
        weight = model.token_embeddings.weight
        self.model, self.tokenizer, self.device = model, tokenizer, weight.device
        self.max_rows = max_rows
        on_gpu = self.device.type == "cuda"
        models = [model] if draft is None else [model, draft]
        check_kv_dtype(kv_dtype, self.device, accelerate)
        num_pages = num_pool_pages(models, num_pages, memory, page_size, kv_dtype)
        self.cache = new_cache(model, num_pages, page_size, kv_dtype)
        self.pool = PagePool(num_pages)
        self.plain = PlainRunner(model, self.cache, exact=exact)
        self.runner = self._choose_runner(make_runner, max_rows, exact, accelerate)
        self.drafter: Drafter | None = None
        if draft is not None:
            check_draft(draft, model.config, self.device)
            cache = new_cache(draft, num_pages, page_size, kv_dtype)
            self.drafter = Drafter(
                draft, cache, max_rows=max_rows, exact=exact, accelerate=accelerate
            )
        self.proposer = Proposer(self.drafter, draft_tokens, speculate)
        self.speculate = self.proposer.default
        chunks = [getattr(reader, "chunk", None) for reader in (self.runner, self.drafter)]
        chunk = math.lcm(*(c for c in chunks if c)) if any(chunks) else None
        if max_tokens_per_step is None:
            max_tokens_per_step = max(8192 if on_gpu else 256, 2 * max_rows)
        self.scheduler = Scheduler(
            self.pool,
            page_size=page_size,
            context_length=model.config.context_length,
            max_rows=max_rows,
            max_tokens_per_step=max_tokens_per_step,
            usual_tokens=2048 if on_gpu else None,
            costly_keys=_costly_keys(model) if on_gpu else None,
            chunk=chunk,
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
        self._unread: deque[Sequence[Unread | UnreadScores]] = deque()  # by step
        self._chooser = TokenChooser(self.last, model.config.vocab_size)
        self._arrived: deque[Handle] = deque()
        self._cancelled: deque[Handle] = deque()
        self._forgets = False
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
        speculate: Speculate | None = None,
    ) -> Handle:
        """Queue one prompt, a text or token ids; options as in `stream`.

        Requests share pages of prompts that begin alike if they have the same `salt`. `speculate`:
        what proposes tokens for this one, if not what does so by default.
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
        return self.submit_row(rows[0], num_logprobs=num_logprobs, salt=salt, speculate=speculate)

    def submit_row(
        self,
        row: Row,
        *,
        num_logprobs: int | None = None,
        salt: str = "",
        speculate: Speculate | None = None,
    ) -> Handle:
        """Queue a row whose arguments have been checked."""
        speculator = self.proposer.speculator(speculate)
        return self._queue(Request(row, salt, num_logprobs, speculator=speculator))

    def submit_score(
        self, tokens: Sequence[int], start: int = 1, *, num_logprobs: int = 1, salt: str = ""
    ) -> Handle:
        """Queue token ids to be scored: how likely each from `start` on is, after all before it.

        Its pieces are these tokens with their log-probabilities and the best `num_logprobs`. What
        requests begin with alike is computed once, as for prompts.
        """
        row = scored_row(tokens, start, self.model.config)
        return self._queue(Request(row, salt, num_logprobs, row.targets))

    def _queue(self, request: Request) -> Handle:
        row = request.row
        check_num_logprobs(request.num_logprobs, self.model.config.vocab_size)
        need = self.scheduler.most_pages(row)
        if need > self.pool.num_pages:
            raise ValueError(
                f"a request must fit the pool of {self.pool.num_pages} pages of "
                f"{self.scheduler.page_size} tokens; got one that takes {need}"
            )
        handle = Handle(self, request)
        self._arrived.append(handle)
        with self._news:
            self._news.notify_all()
        return handle

    @property
    def why_not_verified(self) -> str | None:
        """Why nothing is proposed here, or None where proposals are verified."""
        return why_not_verified(self._current_runner())

    def _cancel(self, handle: Handle) -> None:
        self._cancelled.append(handle)
        self._take_in_between_steps()

    def _take_in_between_steps(self) -> None:
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
        runner = self._current_runner()
        running, catch_up = self.scheduler.running, self._catch_up
        plan = self.scheduler.schedule(self.proposer.propose(running, runner, catch_up))
        if plan is None:
            found = bool(self._unread)
            self._catch_up()
        else:
            found = True
            try:
                outcomes = self._launch(plan, runner)
            except BaseException as error:  # an interrupt, too, leaves the step half done
                for request in plan.requests:
                    self._fail(request, error)
                if not isinstance(error, Exception):
                    raise
            else:
                self.scheduler.launched(plan)
                if outcomes:
                    self._unread.append(outcomes)
            while len(self._unread) > (0 if plan.is_verified else self.lag):
                self._read(self._unread.popleft())
        with self._news:
            self._news.notify_all()
        return found

    def _launch(self, plan: Plan, runner: Any) -> list[Unread | UnreadScores]:
        """Send a step on its way, to the choice of its tokens."""
        drafted = self.proposer.draft(plan, self.tables, self.last)
        choosing = plan.choosing
        can_choose = not (plan.scoring or plan.is_verified) and getattr(runner, "chooses", False)
        if choosing and can_choose:
            choice = self._chooser.choice(choosing, getattr(runner, "draws", True))
            if choice is not None:
                tokens = runner.run_and_choose(plan.step, self.tables, self.last, choice)
                return [Unread(choosing, Outcome(tokens, []))]
        logits = runner.run(plan.step, self.tables, self.last)
        found: list[Unread | UnreadScores] = []
        if plan.scoring:
            found += score_logits(logits, plan.scoring)
            if choosing:
                logits = logits[rows_that_choose(plan.scoring, len(logits))]
        if choosing:
            chosen = self._chooser.choose(plan, logits, drafted)
            found.append(Unread(choosing, chosen, plan.is_verified))
        return found

    def _current_runner(self) -> Runner:
        """Return the runner, or the model itself once its modules are not those of the runner."""
        return self.runner if getattr(self.runner, "unchanged", True) else self.plain

    def _read(self, outcomes: Sequence[Unread | UnreadScores]) -> None:
        """Look at the tokens of an earlier step."""
        for unread in outcomes:
            if isinstance(unread, UnreadScores):
                for request, scores in unread.read():
                    assert isinstance(request.row, ScoredRow)
                    self._give(request, request.row.take_scores, *scores)
                continue
            requests, outcome, is_verified = unread
            tokens, logprobs = outcome.read()
            if is_verified:
                self._read_verified(requests, tokens, logprobs)
                continue
            for i, (request, token) in enumerate(zip(requests, tokens, strict=True)):
                self._take(request, token, logprobs.get(i))

    def _read_verified(
        self, requests: list[Request], tokens: list[int], logprobs: dict[int, TokenLogprob]
    ) -> None:
        """Take the tokens of a step just done, as far as they follow what was proposed."""

        def take(request: Request, line: int) -> None:
            self._take(request, tokens[line], logprobs.get(line))

        newest = accept(requests, tokens, take, self.scheduler.accepted)
        running = {r.slot: token for r, token in newest.items() if r.slot >= 0}
        slots = to_device(list(running), torch.long, self.device)
        self.last.index_copy_(0, slots, to_device([*running.values()], torch.long, self.device))

    def _take(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        if token == NOTHING:
            self._fail(request, ValueError(NO_VALID_TOKEN))
        else:
            self._give(request, request.row.take, token, logprob)

    def _give(
        self, request: Request, take: Callable[..., Piece | ScoredTokens], *found: Any
    ) -> None:
        """Let a request's row take what was found, and give it to whoever waits."""
        if request.ended:
            return
        try:
            piece = take(*found)
        except Exception as error:
            self._fail(request, error)
            return
        self._handles[request]._pieces.append(piece)
        if piece.finish_reason is not None:
            self._end(request)

    def _catch_up(self) -> None:
        while self._unread:
            self._read(self._unread.popleft())

    def _take_in(self) -> None:
        """Take in what other threads have asked for."""
        if self._forgets:
            self._forgets = False
            self.scheduler.forget_prefixes()
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
        """Let no request use pages computed before now: call it when the model has changed."""
        self._forgets = True
        self._take_in_between_steps()


def _costly_keys(model: TransformerLM) -> int:
    """Return how many keys cost a token about as much as its matrix products.

    A product with a weight is 2 FLOPs, a key of a head 4 per channel, at about half their rate.
    """
    config = model.config
    weights = sum(p.numel() for p in model.layers.parameters() if p.ndim > 1)
    return max(1, weights // (4 * config.num_layers * config.num_heads * config.d_head))
