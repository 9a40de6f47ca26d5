"""The engine: every answer is the request's alone, whatever else happens, and no page is lost."""

import copy
import math
import random
import resource
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from inference.engine_oracle import HashRunner, alone, draft_habits, habits
from inference.test_sampling import SAMPLINGS
from inference.tiny import byte_tokenizer, tiny_model
from scratchlm.accounting.pool import bytes_per_page
from scratchlm.inference import GREEDY, Engine, Sampling
from scratchlm.paged import LAST, PagedCache
from tiny_models import FAMILIES, build

VOCAB, CONTEXT = 61, 24
WAYS = [GREEDY, GREEDY, Sampling(0.8, 5, 0.9), *SAMPLINGS.values()]


def model():
    return tiny_model(VOCAB, CONTEXT)


def make_engine(num_pages=40, page_size=4, chunk=None, **options):
    options = {"max_rows": 4, "max_tokens_per_step": 16, **options}
    make_runner = partial(HashRunner, chunk=chunk)
    return Engine(
        model(), num_pages=num_pages, page_size=page_size, make_runner=make_runner, **options
    )


def said(piece):
    best = piece.logprob
    return piece.token_id, None if best is None else (best.logprob, best.best)


def check_pool(engine):
    """No page is lost, none is held that nobody needs, and tables say where they are."""
    running = engine.scheduler.running
    held = {page for request in running for page in request.pages}
    assert engine.pool.num_held == len(held)
    for request in running:
        table = engine.tables[request.slot, : len(request.pages)].tolist()
        assert table == request.pages
        assert len(request.pages) * engine.scheduler.page_size >= request.computed
    slots = [request.slot for request in running]
    assert len({*slots, *engine.scheduler._slots}) == engine.scheduler.max_rows


def check_empty(engine):
    assert engine.is_idle
    assert engine.pool.num_held == 0
    assert sorted(engine.pool._free) == list(range(engine.pool.num_pages))
    assert not engine.scheduler._computing
    assert not engine._handles


# Everything at random


def random_request(rng):
    """Prompts begin alike in many ways; some slide past the context."""
    head = [rng.randrange(3)] * rng.choice([0, 4, 8, 12])
    prompt = head + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
    slides = rng.random() < 0.15
    room = CONTEXT - len(prompt)
    options = {
        "max_new_tokens": rng.choice([1, 2, 5, 30]) if slides else rng.randrange(1, room + 1),
        "sampling": rng.choice(WAYS),
        "seed": rng.randrange(1000),
        "eos_ids": rng.choice([(), (), range(0, VOCAB, 20)]),
        "past_context": "slide" if slides else "error",
        "num_logprobs": rng.choice([None, None, 0, 3]),
    }
    return prompt, options


def test_10_000_random_operations_change_no_answer_and_lose_no_page():
    put_back, found = [], []
    for seed in range(20):
        scheduler = operate_at_random(random.Random(seed), 500)
        put_back.append(scheduler.num_put_back)
        found.append(scheduler.num_found)
    assert sum(map(bool, put_back)) >= 5  # and they were of every kind
    assert sum(map(bool, found)) >= 10


def test_random_operations_on_requests_that_speculate_change_no_answer_and_lose_no_page():
    """By lookup, by a draft, or not at all, side by side, with all else as above."""
    put_back, found, accepted = [], [], {"lookup": 0, "draft": 0}
    for seed in range(10):
        scheduler = operate_at_random(random.Random(seed), 400, accepted)
        put_back.append(scheduler.num_put_back)
        found.append(scheduler.num_found)
    assert sum(map(bool, put_back)) >= 3
    assert sum(map(bool, found)) >= 5
    assert accepted["lookup"] > 50
    assert accepted["draft"] > 200


def count_accepted(engine, counts):
    """Count the proposals that are accepted, by who made them."""
    learn = engine.scheduler.accepted

    def accepted(request, count):
        counts["draft" if request.drafts else "lookup"] += count
        learn(request, count)

    engine.scheduler.accepted = accepted


def operate_at_random(rng, operations, accepted=None):
    """Submit, step and cancel; compare every answer with the naive loop's."""
    page_size = rng.choice([1, 2, 4, 8])
    chunk, more, logits = rng.choice([None, None, 4, 8]), {}, {}
    if accepted is not None:
        more = {"draft": model(), "draft_tokens": rng.choice([1, 3, 5])}
        logits = {"logits_of": habits}
    engine = make_engine(
        num_pages=-(-CONTEXT // page_size) * rng.choice([1, 1, 2, 6]) + rng.randrange(4),
        page_size=page_size,
        chunk=chunk,
        max_rows=rng.choice([1, 2, 5, 9]),
        max_tokens_per_step=rng.choice([9, 12, 40]),
        lag=rng.choice([0, 1, 1, 2]),
        **more,
    )
    if accepted is not None:
        engine.scheduler.chunk, engine.scheduler.unit = chunk, math.lcm(page_size, chunk or 1)
        engine.runner.logits_of = habits
        engine.drafter.runner = HashRunner(
            model(), engine.drafter.cache, chunk=chunk, logits_of=draft_habits
        )
        count_accepted(engine, accepted)
    engine.scheduler.replay_by_token = rng.random() < 0.7
    requests, cancelled = [], set()
    for _ in range(operations):
        action = rng.random()
        if action < 0.15:
            prompt, options = random_request(rng)
            speculate = "off" if accepted is None else rng.choice(["off", "lookup", "draft"])
            handle = engine.submit(prompt, salt=rng.choice("ab"), speculate=speculate, **options)
            draft_of = {"draft_of": draft_habits} if speculate == "draft" else {}
            requests.append((prompt, {**options, **logits, **draft_of}, handle))
        elif action < 0.19 and requests:
            number = rng.randrange(len(requests))
            if not requests[number][2].done:
                cancelled.add(number)
            requests[number][2].cancel()
            check_pool(engine)
        else:
            engine.step()
            check_pool(engine)
    engine.run()
    check_empty(engine)
    for number, (prompt, options, handle) in enumerate(requests):
        pieces = list(handle)
        expected, reason = alone(model(), prompt, **options)
        assert [said(piece) for piece in pieces] == expected[: len(pieces)]
        if number not in cancelled:
            assert len(pieces) == len(expected)
            assert pieces[-1].finish_reason == reason
    return engine.scheduler


@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("family", ["tiny", "mistral", "mixtral"])
def test_a_request_has_the_same_bits_alone_and_in_any_company(family, accelerate):
    """Log-probabilities are compared as they are: rounding would show."""
    lm = model() if family == "tiny" else build(FAMILIES[family], dtype=torch.float32)
    vocab, context = lm.config.vocab_size, lm.config.context_length
    rng = random.Random(family)
    work = []
    for _ in range(10):
        prompt = [rng.randrange(2)] * rng.choice([0, 4, 9]) + [rng.randrange(vocab)]
        new = rng.randrange(1, context - len(prompt))
        work.append((prompt, {"max_new_tokens": new, "seed": rng.randrange(99), "num_logprobs": 2}))

    def run(requests, **options):
        options = {"num_pages": 30, "page_size": 4, "max_rows": 4, **options}
        engine = Engine(lm, accelerate=accelerate, **options)
        if engine.runner is engine.plain:
            engine.plain.chunk = engine.scheduler.chunk = 4
            engine.scheduler.unit = 4
        handles = []
        for prompt, given in requests:
            handles.append(engine.submit(prompt, **given))
            for _ in range(rng.randrange(4)):
                engine.step()
        engine.run()
        check_empty(engine)
        return [[said(piece) for piece in handle] for handle in handles], engine

    expected = [run([one], max_tokens_per_step=99)[0][0] for one in work]
    put_back = found = 0
    for pages, tokens, lag in ((30, 99, 0), (7, 4, 0), (8, 9, 1), (9, 7, 2)):
        got, engine = run(work, num_pages=pages, max_tokens_per_step=tokens, lag=lag)
        assert got == expected
        put_back += engine.scheduler.num_put_back
        found += engine.scheduler.num_found
    assert put_back
    assert found


# Pages


def step_until_decoding(engine, handles):
    while not all(handle._request.chosen for handle in handles):
        engine.step()


def test_a_shared_prefix_is_computed_once():
    engine = make_engine(max_rows=8)
    prefix = list(range(12))  # three pages
    handles = [
        engine.submit([*prefix, 20 + i], max_new_tokens=2, sampling=GREEDY) for i in range(5)
    ]
    engine.run()
    # The prefix, what each prompt has besides, and one more token of each answer.
    assert engine.runner.num_tokens == 12 + 5 + 5
    assert engine.scheduler.num_found == 4 * 12
    for i, handle in enumerate(handles):
        expected, _ = alone(model(), [*prefix, 20 + i], max_new_tokens=2, sampling=GREEDY, seed=0)
        assert [said(piece) for piece in handle] == expected


def test_pages_of_a_request_that_has_gone_are_found_again_until_they_are_needed():
    engine = make_engine(num_pages=6)
    prompt = list(range(9))
    for expected in (9 + 1, 1 + 1):  # two pages found: one token is left to read
        before = engine.runner.num_tokens
        engine.submit(prompt, max_new_tokens=2, seed=0).result()
        assert engine.runner.num_tokens - before == expected
    engine.submit([50] * 20, max_new_tokens=2, seed=0).result()  # takes every page
    before = engine.runner.num_tokens
    engine.submit(prompt, max_new_tokens=2, seed=0).result()
    assert engine.runner.num_tokens - before == 10


def test_a_salt_keeps_callers_apart_and_forgetting_keeps_times_apart():
    engine = make_engine()
    for salt, found in (("a", 0), ("b", 0), ("a", 8), ("b", 16)):
        engine.submit(list(range(9)), max_new_tokens=1, seed=0, salt=salt).result()
        assert engine.scheduler.num_found == found
    engine.forget_prefixes()
    engine.submit(list(range(9)), max_new_tokens=1, seed=0, salt="a").result()
    assert engine.scheduler.num_found == 16


def test_what_is_being_computed_is_forgotten_too():
    """Its last pages were written by the new weights from keys of the old ones."""
    changing = copy.deepcopy(model())
    options = {"max_new_tokens": 4, "sampling": GREEDY, "num_logprobs": 0}
    engine = Engine(changing, num_pages=12, page_size=4, max_rows=1, max_tokens_per_step=8)
    first = engine.submit(list(range(18)), **options)
    engine.step()
    with torch.no_grad():
        changing.layers[0].attn.v_proj.weight.mul_(3)
    engine.forget_prefixes()
    first.result()
    found = [engine.submit(list(range(18)), **options).result().logprobs for _ in range(2)]
    assert engine.scheduler.num_found == 16
    fresh = Engine(changing, num_pages=12, page_size=4).submit(list(range(18)), **options)
    assert found == [fresh.result().logprobs] * 2
    check_empty(engine)


def test_any_string_is_a_salt():
    engine = make_engine()
    handle = engine.submit(list(range(9)), max_new_tokens=1, seed=0, salt="\ud800")
    assert len(handle.result().token_ids) == 1


def test_a_request_takes_pages_as_it_grows_and_not_before():
    engine = make_engine()
    handle = engine.submit([1, 2, 3], max_new_tokens=14, seed=0)
    held = []
    while not handle.done:
        engine.step()
        held.append(engine.pool.num_held)
    assert held == [1, 1, *[2] * 4, *[3] * 4, *[4] * 3, 0]


def test_where_the_pool_is_full_the_youngest_is_put_back_and_the_oldest_goes_on():
    engine = make_engine(num_pages=7, max_rows=2)
    first, second = (engine.submit([i], max_new_tokens=20, seed=i) for i in (1, 2))
    while not first.done:
        engine.step()
        assert first._request.slot >= 0 or first.done
    assert engine.scheduler.num_put_back >= 1
    assert not second.done
    assert [said(p) for p in second] == alone(model(), [2], max_new_tokens=20, seed=2)[0]


def test_what_was_put_back_comes_before_what_waits():
    engine = make_engine(num_pages=7, max_rows=2)
    first, second = (engine.submit([i], max_new_tokens=20, seed=i) for i in (1, 2))
    third = engine.submit([3], max_new_tokens=3, seed=3)  # would fit the slot and the pages
    while not first.done:
        engine.step()
        assert not third._request.chosen
    assert engine.scheduler.num_put_back >= 1
    engine.run()
    check_empty(engine)
    assert second.done
    assert third.done


@pytest.mark.parametrize("num_pages", range(6, 13))
def test_rows_that_share_pages_slide_in_a_pool_of_any_size(num_pages):
    """What a row gives up is not free while another holds it."""
    engine = make_engine(num_pages=num_pages)
    options = {"max_new_tokens": 20, "past_context": "slide", "sampling": GREEDY}
    handles = [engine.submit(list(range(22)), **options) for _ in range(4)]
    while not engine.is_idle:
        engine.step()
        check_pool(engine)
    check_empty(engine)
    expected = alone(model(), list(range(22)), seed=0, **options)[0]
    for handle in handles:
        assert [said(piece) for piece in handle] == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_no_token_is_computed_after_the_last(lag):
    engine = make_engine(lag=lag)
    engine.submit([1, 2, 3], max_new_tokens=12, seed=0).result()  # ends within a page
    engine.run()
    assert engine.runner.num_tokens == 3 + 11


def test_after_an_end_token_as_many_more_are_computed_as_the_host_lags_behind():
    for lag in (0, 1, 2):
        engine = make_engine(lag=lag)
        tokens = engine.submit([1], max_new_tokens=9, seed=0).result().token_ids
        before, end = engine.runner.num_tokens, tokens[4]
        ended = engine.submit([1], max_new_tokens=9, seed=0, eos_ids=[end]).result()
        assert ended.token_ids == tokens[: tokens.index(end) + 1]
        assert engine.runner.num_tokens - before == len(ended.token_ids) + lag
        engine.run()
        check_empty(engine)


# Scheduling


def test_decoding_rows_have_a_token_in_every_step_while_a_long_prompt_is_read():
    engine = make_engine(max_tokens_per_step=5)
    rows = [engine.submit([i], max_new_tokens=18, seed=i) for i in range(3)]
    step_until_decoding(engine, rows)
    chosen = [row._request.chosen for row in rows]
    late = engine.submit(list(range(20)), max_new_tokens=2, seed=0)
    for steps in range(1, 11):
        engine.step()
        assert [row._request.chosen - c for row, c in zip(rows, chosen, strict=True)] == [steps] * 3
        assert late._request.chosen == (steps >= 10)  # two tokens of it a step
    assert max(len(step.tokens) for step in engine.runner.steps) == 5


def test_a_prompt_gets_less_of_a_step_the_more_rows_it_would_hold_up():
    engine = make_engine(max_rows=6, max_tokens_per_step=24)
    engine.scheduler.usual_tokens = 8

    def of_prompts():
        engine.step()
        step = engine.runner.steps[-1]
        return len(step.tokens) - sum(token == LAST for token in step.tokens)

    engine.submit(list(range(20)), max_new_tokens=4, seed=0)
    assert of_prompts() == 20  # nobody waits
    handles = [engine.submit([i] * 9, max_new_tokens=4, seed=i) for i in range(4)]
    assert of_prompts() == 23  # four wait for one: more than 8, and the step is full
    for handle in handles:
        handle.result()
    rows = [engine.submit([i], max_new_tokens=15, seed=i) for i in range(5)]
    step_until_decoding(engine, rows)
    engine.submit([7] * 20, max_new_tokens=1, seed=0)
    assert of_prompts() == 1  # one among five: the least


def test_no_request_starves_however_many_younger_ones_come():
    engine = make_engine(num_pages=12, max_rows=3)
    for i in range(3):
        engine.submit([i] * 9, max_new_tokens=4, seed=i)
    engine.step()
    big = engine.submit([9] * 20, max_new_tokens=4, seed=0)  # half of the pool
    for i in range(40):
        engine.submit([i], max_new_tokens=3, seed=i)
        engine.step()
        if big.done:
            break
    assert big.done
    assert i < 20


def test_requests_begin_in_the_order_they_came():
    engine = make_engine(max_rows=2)
    handles = [engine.submit([i], max_new_tokens=3, seed=i) for i in range(7)]
    begun = []
    while not engine.is_idle:
        engine.step()
        begun += [i for i, h in enumerate(handles) if h._request.chosen and i not in begun]
    assert begun == list(range(7))


@pytest.mark.parametrize("tokens", [4, 5, 7, 8, 50])
@pytest.mark.parametrize("chunk", [None, 4, 8])
def test_pieces_keep_to_the_budget_and_to_the_chunks(chunk, tokens):
    engine = make_engine(chunk=chunk, max_tokens_per_step=tokens)
    handle = engine.submit(list(range(19)), max_new_tokens=1, seed=0)
    engine.run()
    assert handle.done
    sizes = [step.counts[0] for step in engine.runner.steps]
    assert sum(sizes) == 19
    if chunk is None:
        assert sizes == [tokens] * (19 // tokens) + [19 % tokens] * (19 % tokens > 0)
    else:
        assert all(size % chunk == 0 for size in sizes[:-1])
        assert max(sizes) <= max(tokens, chunk)


# Cancelling and failing


@pytest.mark.parametrize("lag", [0, 1])
def test_cancelling_frees_the_pages_within_one_step_from_another_thread(lag):
    engine = make_engine(lag=lag)
    kept, gone = (engine.submit([i] * 9, max_new_tokens=10, seed=i) for i in (1, 2))
    step_until_decoding(engine, [kept, gone])
    held = engine.pool.num_held
    thread = threading.Thread(target=gone.cancel)
    with engine._stepping:  # in the middle of a step
        thread.start()
        thread.join()
        assert engine.pool.num_held == held
    engine.step()
    assert engine.pool.num_held == len(kept._request.pages)
    assert gone.done
    engine.run()
    assert [said(p) for p in kept] == alone(model(), [1] * 9, max_new_tokens=10, seed=1)[0]
    gone.cancel()  # once more: nothing happens
    check_empty(engine)


def test_cancelling_while_nobody_steps_frees_the_pages_at_once():
    engine = make_engine()
    handle = engine.submit([1] * 9, max_new_tokens=10, seed=0)
    waiting = engine.submit([1] * 9, max_new_tokens=10, seed=0)
    engine.step()
    for one in (handle, waiting):
        one.cancel()
    check_empty(engine)
    assert len(list(handle)) == 1


class Broken(Exception):
    pass


@pytest.mark.parametrize("lag", [0, 1])
def test_an_exception_in_one_request_leaves_the_others_and_the_pool(lag):
    """By its text, and by logits that leave nothing to choose from."""
    engine = make_engine(lag=lag, tokenizer=None)
    bad, good, forbidden = (
        engine.submit([i] * 5, max_new_tokens=12, seed=i, sampling=sampling)
        for i, sampling in enumerate(
            [Sampling(), Sampling(), Sampling(logit_bias=dict.fromkeys(range(VOCAB), -torch.inf))]
        )
    )
    row, take = bad._request.row, bad._request.row.take

    def take_three(token, logprob):
        if row.step == 3:
            raise Broken("text")
        return take(token, logprob)

    row.take = take_three
    engine.run()
    check_empty(engine)
    with pytest.raises(Broken, match="text"):
        bad.result()
    with pytest.raises(ValueError, match="nothing to choose from"):
        forbidden.result()
    expected = alone(model(), [1] * 5, max_new_tokens=12, seed=1)[0]
    assert [said(piece) for piece in good] == expected


def test_a_step_that_fails_ends_its_requests_and_leaves_the_pool():
    engine = make_engine(max_rows=1)
    first, second = (engine.submit([i] * 9, max_new_tokens=3, seed=i) for i in (1, 2))
    run = engine.runner.run

    def fail(*given):
        engine.runner.run = run
        raise Broken("step")

    engine.runner.run = fail
    engine.run()
    with pytest.raises(Broken, match="step"):
        first.result()
    assert len(second.result().token_ids) == 3
    check_empty(engine)
    engine.submit([1] * 9, max_new_tokens=3, seed=1).result()
    assert engine.scheduler.num_found == 0  # what the failed step was to write is not there


def test_an_interrupted_step_ends_its_requests_and_reaches_the_caller():
    engine = make_engine(max_rows=1)
    first, second = (engine.submit([i] * 3, max_new_tokens=9, seed=i) for i in (1, 2))
    for _ in range(3):
        engine.step()
    run = engine.runner.run

    def interrupt(*given):
        engine.runner.run = run
        raise KeyboardInterrupt

    engine.runner.run = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.run()
    with pytest.raises(KeyboardInterrupt):
        first.result()
    assert [said(p) for p in second] == alone(model(), [2] * 3, max_new_tokens=9, seed=2)[0]
    check_empty(engine)


# From threads


def test_many_threads_submit_wait_and_cancel():
    engine = make_engine(num_pages=14)
    wrong = []

    def work(number):
        rng = random.Random(number)
        for i in range(6):
            prompt, new = [rng.randrange(3)] * 5 + [number], rng.randrange(1, 15)
            handle = engine.submit(prompt, max_new_tokens=new, seed=i)
            if rng.random() < 0.3:
                next(iter(handle))
                handle.cancel()
            elif [said(p) for p in handle] != alone(model(), prompt, max_new_tokens=new, seed=i)[0]:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    engine.run()
    check_empty(engine)


def test_run_until_serves_what_comes_until_it_is_told_to_stop():
    engine, stop = make_engine(), threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,))
    thread.start()
    try:
        for i in range(3):
            handle = engine.submit([i], max_new_tokens=4, seed=i)
            assert [said(p) for p in handle] == alone(model(), [i], max_new_tokens=4, seed=i)[0]
    finally:
        stop.set()
    thread.join(timeout=600)
    assert not thread.is_alive()


# Text, settings


def test_a_request_may_be_text():
    tokenizer = byte_tokenizer()
    engine = Engine(tiny_model(257), tokenizer=tokenizer, memory=1 << 20)
    result = engine.submit("ab", max_new_tokens=5, seed=0, stop=["\x00\x00"]).result()
    assert result.text == tokenizer.decode(result.token_ids)


def test_memory_is_the_pool_in_bytes():
    engine = Engine(model(), memory=100_000, page_size=8)
    size = engine.cache.keys.nbytes + engine.cache.values.nbytes
    page = bytes_per_page(model().config, page_size=8, bytes_per_number=4)
    assert size == page * engine.pool.num_pages  # as the account predicts
    assert 100_000 - page < size <= 100_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "num_pages or as memory in bytes, one of them; got num_pages=None, memory=None"),
        ({"num_pages": 2, "memory": 9}, "one of them; got num_pages=2, memory=9"),
        ({"num_pages": 0}, "num_pages must be at least 1; got num_pages=0"),
        ({"memory": 10}, "memory must hold at least one page of"),
        ({"num_pages": 2, "page_size": 0}, "page_size must be at least 1; got page_size=0"),
        ({"num_pages": 2, "max_rows": 0}, "max_rows must be at least 1; got max_rows=0"),
        (
            {"num_pages": 2, "max_rows": 9, "max_tokens_per_step": 8},
            "max_tokens_per_step must be at least max_rows",
        ),
    ],
)
def test_a_wrong_setting_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        Engine(model(), **options)
    assert "\n" not in str(caught.value)


def test_a_request_that_can_never_fit_is_refused_at_once():
    engine = make_engine(num_pages=3)
    assert len(engine.submit([1] * 9, max_new_tokens=4, seed=0).result().token_ids) == 4
    with pytest.raises(ValueError, match="must fit the pool of 3 pages of 4 tokens; got one that"):
        engine.submit([1] * 9, max_new_tokens=5)
    with pytest.raises(ValueError, match="one prompt at a time; got 2"):
        engine.submit([[1], [2]])


def test_a_pool_takes_memory_where_keys_are_written():
    """Room for one context of 40,960 tokens is 4.7 GB in Qwen3-0.6B; a request may need 8."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    config = tiny_model().config
    before = resident()
    page = bytes_per_page(config, 16, 4)
    cache = PagedCache(config, (256 << 20) // page, 16)
    assert cache.nbytes > 250 << 20
    assert resident() - before < 32 << 20
    assert not cache.keys[:, :8].any()
    cache.keys[:, :8] = 1
    assert cache.keys[:, :8].all()
