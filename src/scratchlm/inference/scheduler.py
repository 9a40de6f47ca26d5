"""What runs in the next step: requests in the order they came, decoding rows in every step.

    waiting → running (reads its prompt in pieces, then decodes) → gone
       ↑_________| put back: the pool is full, and it is the youngest

A step has one token of every decoding row, and proposals of those that speculate, as far as there
is room; what is left of `max_tokens_per_step` goes to prompts, the oldest first. A request is let
in when there is a slot and room in the pool for all its tokens so far; while it decodes it takes
page after page. Where a page is missing, the youngest is put back and later computed again, so the
oldest always goes on.

Some runners give the same bits only if a prompt is cut at the same places whenever it is read:
with `chunk`, pieces end at its multiples, or with the prompt. An answer that is computed again
is read as it was written, token by token, unless `replay_by_token` is off.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from scratchlm.inference.pages import Key, PagePool, page_keys
from scratchlm.inference.rows import Row
from scratchlm.inference.step_plan import Plan, Request, lay_out
from scratchlm.paged import Step


def window_start(length: int, context_length: int) -> int:
    """Return the first token that a row of `length` tokens still sees."""
    if length <= context_length:
        return 0
    stride = max(context_length // 2, 1)
    return -(-(length - context_length) // stride) * stride


class Scheduler:
    """Waiting and running requests over one pool."""

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        context_length: int,
        max_rows: int,
        max_tokens_per_step: int,
        usual_tokens: int | None = None,
        costly_keys: int | None = None,
        chunk: int | None = None,
        replay_by_token: bool = True,
        catch_up: Callable[[], None] = lambda: None,
        place: Callable[[int, int, list[int]], None] = lambda slot, at, pages: None,
    ) -> None:
        """Make it; `catch_up` reads all chosen tokens, `place` writes pages into the page table.

        With `usual_tokens`, prompts get so many a step where as many wait as decode, fewer or more
        by that ratio: a long prompt among many answers holds them up little, and many prompts at
        once are read at the machine's rate. A token that sees `costly_keys` keys counts twice, one
        that sees more, more.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1; got max_rows={max_rows}")
        if max_tokens_per_step < max_rows:
            raise ValueError(
                "max_tokens_per_step must be at least max_rows, as every decoding row has a token; "
                f"got max_tokens_per_step={max_tokens_per_step}, max_rows={max_rows}"
            )
        self.pool, self.page_size, self.context = pool, page_size, context_length
        self.max_rows, self.max_tokens = max_rows, max_tokens_per_step
        self.usual_tokens, self.costly_keys = usual_tokens, costly_keys
        self.chunk, self.replay_by_token = chunk, replay_by_token
        self.unit = math.lcm(page_size, chunk or 1)  # what is shared is a multiple of it
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.num_put_back = self.num_found = 0  # requests, tokens
        self._catch_up, self._place = catch_up, place
        self._slots = list(range(max_rows - 1, -1, -1))
        self._computing: dict[Key, Request] = {}
        self._steady: Plan | None = None  # all decode, nobody comes or goes
        self._steady_steps = 0  # for so many steps nobody needs a page or is full

    def pages_for(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-tokens // self.page_size)

    def most_pages(self, row: Row) -> int:
        """Return how many pages a row takes at its longest; its last token needs no key."""
        return self.pages_for(min(row.num_prompt + row.limit - 1, self.context))

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._open_window(request)
        self.waiting.append(request)
        self._steady = None

    def end(self, request: Request) -> None:
        """Let a request go, wherever it is; its pages and its slot are free."""
        request.ended = True
        if request.slot >= 0:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def forget_prefixes(self) -> None:
        """Let no page be found that was, or is being, computed so far."""
        self.pool.forget_all()
        self._computing.clear()
        for request in self.running:
            request.num_registered = len(request.keys)  # the rest builds on what is forgotten

    # A step

    def schedule(self, proposes: bool = False) -> Plan | None:
        """Return the next step, or None where there is nothing to do.

        `proposes`: whether some requests have proposals to be verified.
        """
        if proposes:
            self._steady = None
        if self._steady is None or self._steady_steps <= 0:
            self._make_room()
            self._steady_steps = self._quiet_steps() if self._steady is not None else 0
        if self._steady is not None:
            return self._next_steady(self._steady)
        self._let_in()
        if not self.running:
            return None
        plan = self._plan()
        if len(plan.requests) == len(self.running) and all(
            r.on_device and r.computed == r.length - 1 and not (r.ahead or r.drafts)
            for r in self.running
        ):
            self._steady = plan
            self._steady_steps = self._quiet_steps()
        return plan

    def launched(self, plan: Plan) -> None:
        """Count a step that is on its way; requests whose last token it chooses leave."""
        if plan is self._steady:
            for request in plan.choosing:
                request.computed += 1
                request.length += 1
                request.chosen += 1
            self._steady_steps -= 1
        else:
            for request, count in zip(plan.requests, plan.step.counts, strict=True):
                request.computed += count - request.ahead
                if request.is_reading or request.num_registered < len(request.keys):
                    self._register(request)
            for request in plan.choosing:
                request.length += 1
                request.chosen += 1
                request.on_device = True
            for request in [one.request for one in plan.scoring]:
                if not request.is_reading:
                    self._leave(request)
        if self._steady_steps <= 0 or plan is not self._steady:
            for request in plan.choosing:
                if request.chosen >= request.row.limit:
                    self._leave(request)

    def accepted(self, request: Request, count: int) -> None:
        """Count the proposals that were accepted; the keys of the others are written over."""
        request.computed += count
        request.length += count
        request.chosen += count
        request.ahead, request.proposed = 0, []

    def _next_steady(self, plan: Plan) -> Plan:
        """Return the same rows one token on."""
        step = plan.step
        starts = [start + 1 for start in step.starts]
        plan.step = Step(step.tokens, step.counts, starts, step.slots, step.chooses)
        return plan

    def _quiet_steps(self) -> int:
        """Return for how many steps from this one no row needs a page, slides or is full."""
        page_size = self.page_size
        return min(
            min(
                len(r.pages) * page_size - r.computed,
                r.row.limit - r.chosen,
                self.context - r.computed,
            )
            for r in self.running
        )

    def _plan(self) -> Plan:
        rows: list[tuple[Request, int]] = []
        for request in self.running:
            if not request.is_reading:
                rows.append((request, 1 + request.ahead))
        num_decoding = len(rows)
        left = self.max_tokens - sum(count for _, count in rows)
        budget = min(self._for_prompts(num_decoding), left)
        for request in self.running:
            if request.is_reading:
                cost = self._cost(request) if num_decoding else 1.0
                must = len(rows) == num_decoding
                count = self._piece(request, int(budget / cost), must)
                if not count:
                    break
                rows.append((request, count))
                budget -= int(count * cost)
        return lay_out(rows)

    def _for_prompts(self, num_decoding: int) -> int:
        """Return how many tokens of prompts this step may have."""
        if self.usual_tokens is None or not num_decoding:
            return self.max_tokens
        num_reading = len(self.running) - num_decoding + len(self.waiting)
        return max(self.usual_tokens // 8, self.usual_tokens * num_reading // num_decoding)

    def _cost(self, request: Request) -> float:
        """Return how many times the first token's cost its next tokens have."""
        return 1.0 if self.costly_keys is None else 1.0 + request.computed / self.costly_keys

    def _piece(self, request: Request, budget: int, must: bool) -> int:
        """Return how many tokens of a prompt are read now; `must`: some, however few are left."""
        end = min(request.computed + budget, request.base)
        if self.chunk is not None and end < request.base:
            end = end // self.chunk * self.chunk
            if end <= request.computed and must:
                end = min((request.computed // self.chunk + 1) * self.chunk, request.base)
        return max(end - request.computed, 0)

    # Room

    def _make_room(self) -> None:
        """Give every decoding row the page of its next token, at the youngest ones' cost."""
        growing, sliding = self._growing()
        if sliding or len(growing) > self.pool.num_free:
            self._catch_up()  # what starts again is read from the host; and some may have ended
            growing, sliding = self._growing()
        for request in sliding:
            if request.slot >= 0:  # not put back by another
                self._slide(request)
        growing = [request for request in growing if request.slot >= 0]
        while len(growing) > self.pool.num_free:
            youngest = self.running[-1]
            self._put_back(youngest)
            growing = [request for request in growing if request is not youngest]
        for request in growing:
            self._add_pages(request, self.pool.take(1))
        self._make_room_ahead()

    def _make_room_ahead(self) -> None:
        """Let as much be proposed as there is room for, at nobody's cost."""
        num_decoding = sum(not request.is_reading for request in self.running)
        others = num_decoding < len(self.running) or bool(self.waiting)
        budget = (self.max_tokens - num_decoding) // (2 if others else 1)
        for r in self.running:
            if not r.ahead:
                continue
            most = min(budget, r.row.limit - r.chosen - 1, self.context - r.length)
            r.ahead = max(min(r.ahead, most), 0)
            new = self.pages_for(r.length + r.ahead) - len(r.pages)
            if 0 < new <= self.pool.num_free:
                self._add_pages(r, self.pool.take(new))
            r.ahead = min(r.ahead, len(r.pages) * self.page_size - r.length)
            budget -= r.ahead

    def _growing(self) -> tuple[list[Request], list[Request]]:
        """Return the rows whose next token needs a page, and those whose context is full."""
        sliding = [r for r in self.running if r.length > self.context]
        size = self.page_size
        growing = [
            r
            for r in self.running
            if r.computed == len(r.pages) * size and r.length <= self.context
        ]
        return growing, sliding

    def _let_in(self) -> None:
        """Admit from the front of the queue while there are slots and pages."""
        while self.waiting and self._slots:
            request = self.waiting[0]
            if not request.keys:
                request.keys = self._keys(request)
            most = request.num_context // self.unit * self.unit // self.page_size
            found = self.pool.find(request.keys[:most])
            found = found[: len(found) * self.page_size // self.unit * self.unit // self.page_size]
            if len(found) < most and request.keys[len(found)] in self._computing:
                break  # another is about to compute what this one begins with
            new = self.pages_for(request.length) - len(found)
            if new > self.pool.num_free - self.pool.num_free_among(found):
                break
            self.waiting.popleft()
            self._admit(request, found, new)

    def _admit(self, request: Request, found: list[int], new: int) -> None:
        request.slot = self._slots.pop()
        self.running.append(request)
        self.pool.hold(found)
        self._add_pages(request, found)
        self._add_pages(request, self.pool.take(new))
        request.computed = len(found) * self.page_size
        request.num_registered = len(found)
        self.num_found += request.computed
        for key in request.keys[len(found) :]:
            self._computing.setdefault(key, request)

    def _keys(self, request: Request) -> list[Key]:
        whole = request.base // self.unit * self.unit
        ids = request.row.ids[request.start : request.start + whole]
        return page_keys(ids, self.page_size, request.salt)

    def _register(self, request: Request) -> None:
        """Let others find the pages that are now full."""
        full = min(request.computed // self.page_size, len(request.keys))
        for i in range(request.num_registered, full):
            self.pool.register(request.pages[i], request.keys[i])
            if self._computing.get(request.keys[i]) is request:
                del self._computing[request.keys[i]]
        request.num_registered = max(full, request.num_registered)

    def _add_pages(self, request: Request, pages: list[int]) -> None:
        self._place(request.slot, len(request.pages), pages)
        request.pages += pages

    def _open_window(self, request: Request) -> None:
        """Let a request begin with what its context still sees, read as a prompt."""
        ids = request.row.ids
        request.start = window_start(len(ids), self.context)
        request.base = request.length = len(ids) - request.start
        request.keys = []

    def _slide(self, request: Request) -> None:
        """Forget the older half of a full context: the rest is read anew from position 0."""
        self._give_up_pages(request)
        self._open_window(request)
        need = self.pages_for(request.length)
        while need > self.pool.num_free:  # others hold some of what it gave up
            youngest = self.running[-1]
            self._put_back(youngest)
            if youngest is request:
                return
        self._add_pages(request, self.pool.take(need))

    def _put_back(self, request: Request) -> None:
        """Send the youngest back to the front of the queue."""
        self.num_put_back += 1
        self._leave(request)
        if request.targets is not None:
            request.targets = request.row.targets
        if window_start(len(request.row.ids), self.context) != request.start:
            self._open_window(request)  # it was about to slide
        request.length = len(request.row.ids) - request.start
        if not self.replay_by_token:
            request.base, request.keys = request.length, []
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self._give_up_pages(request)
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot = -1
        self._steady = None

    def _give_up_pages(self, request: Request) -> None:
        for key in request.keys[request.num_registered :]:
            if self._computing.get(key) is request:
                del self._computing[key]
        self.pool.release(request.pages)
        request.pages, request.num_registered, request.computed = [], 0, 0
        request.on_device = False
        request.ahead, request.proposed = 0, []
        self._steady = None
