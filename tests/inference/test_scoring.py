"""Scored tokens: each is as likely as the model alone says, whatever else is in the batch."""

import random
from functools import partial

import pytest
import torch

from inference.engine_oracle import HashRunner, logits_after
from inference.test_engine import check_empty, check_pool
from inference.tiny import tiny_model
from scratchlm.inference import GREEDY, Engine, likelihoods
from scratchlm.inference.plain_runner import PlainRunner
from scratchlm.model import TransformerLM
from tiny_models import FAMILIES, build

VOCAB, CONTEXT = 61, 24


def expected(tokens, start):
    """Score by the naive loop; exponentials are summed in float32."""
    found = []
    for i in range(start, len(tokens)):
        table = logits_after(tokens[:i], VOCAB).double().log_softmax(-1)
        value = pytest.approx(table[tokens[i]].item(), abs=3e-7)
        found.append((tokens[i], value, table.argmax().item()))
    return found


def scores(result):
    return [
        (token, one.logprob, one.best[0][0])
        for token, one in zip(result.token_ids, result.logprobs, strict=True)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_scored_and_generated_requests_gives_what_each_gives_alone(seed):
    draw = random.Random(seed)
    chunk = draw.choice([None, None, 4, 6])
    engine = Engine(
        tiny_model(VOCAB, CONTEXT),
        num_pages=draw.randint(8, 30),
        page_size=draw.choice([3, 4]),
        max_rows=draw.randint(1, 5),
        max_tokens_per_step=draw.randint(8, 20),
        lag=draw.choice([0, 1]),
        make_runner=partial(HashRunner, chunk=chunk),
    )
    begin = [draw.randrange(VOCAB) for _ in range(14)]
    scored, generated = [], []
    for _ in range(40):
        if draw.random() < 0.6:
            rest = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 8))]
            tokens = begin[: draw.randint(1, 14)] + rest
            start = draw.randint(1, len(tokens) - 1)
            scored.append((engine.submit_score(tokens, start), tokens, start))
        elif draw.random() < 0.5:
            prompt = begin[: draw.randint(1, 14)]
            handle = engine.submit(prompt, max_new_tokens=10, sampling=GREEDY, eos_ids=())
            generated.append((handle, prompt))
        engine.step()
        check_pool(engine)
    engine.run()
    check_empty(engine)
    assert scored
    for handle, tokens, start in scored:
        result = handle.result()
        assert scores(result) == expected(tokens, start)
        assert result.finish_reason == "length"
    for handle, ids in generated:
        ids = list(ids)
        for token in handle.result().token_ids:
            assert token == logits_after(ids, VOCAB).argmax()
            ids.append(token)


def test_a_scored_request_that_is_put_back_scores_every_token_once():
    engine = Engine(
        tiny_model(VOCAB, CONTEXT),
        num_pages=7,
        page_size=4,
        max_rows=3,
        max_tokens_per_step=6,
        make_runner=HashRunner,
    )
    engine.submit([1, 2, 3, 4], max_new_tokens=18, sampling=GREEDY, eos_ids=())
    engine.submit([5, 2, 3, 4], max_new_tokens=6, sampling=GREEDY, eos_ids=())
    tokens = list(range(10, 24))
    handle = engine.submit_score(tokens, 2)
    engine.run()
    assert engine.scheduler.num_put_back
    assert scores(handle.result()) == expected(tokens, 2)


def full_forward(model: TransformerLM, tokens, start):
    table = model(torch.tensor([tokens]))[0].double().log_softmax(-1)
    at = torch.arange(start - 1, len(tokens) - 1)
    return table[at, torch.tensor(tokens[start:])], table[at].argmax(-1).tolist()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_scores_are_those_of_a_full_forward(family):
    model = build(FAMILIES[family], dtype=torch.float32)
    engine = Engine(model, num_pages=40, page_size=4, max_rows=4)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(29, (6, 24), generator=generator).tolist()
    pairs = [(row[:9], row[9 : 12 + i]) for i, row in enumerate(rows)]
    pairs += [(rows[0][:9], row[2:7]) for row in rows]
    for (context, rest), found in zip(pairs, likelihoods(engine, pairs), strict=True):
        values, greedy = full_forward(model, [*context, *rest], len(context))
        torch.testing.assert_close(
            torch.tensor(found.logprobs, dtype=torch.float64), values, atol=2e-5, rtol=1e-5
        )
        assert [best[0][0] for best in found.best] == greedy
        assert found.is_greedy == (greedy == rest)
        assert found.total == pytest.approx(values.sum().item(), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "post-norm"])  # the CPU's runner, and the model itself
def test_a_score_is_the_same_to_the_bit_alone_and_where_its_beginning_was_found(family):
    model = build(FAMILIES[family], dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    begin, *rows = torch.randint(29, (9, 14), generator=generator).tolist()
    pairs = [(begin[:13], row[: 2 + i]) for i, row in enumerate(rows)]
    engine = Engine(model, num_pages=30, page_size=4, max_rows=8, max_tokens_per_step=16)
    together = likelihoods(engine, pairs)
    assert (engine.scheduler.num_found > 0) == (family == "llama")  # pages of 64 where chunks are
    alone = Engine(model, num_pages=30, page_size=4, max_rows=1)
    for pair, found in zip(pairs, together, strict=True):
        alone.forget_prefixes()
        assert likelihoods(alone, [pair]) == [found]


@pytest.mark.parametrize("family", ["llama", "mixtral", "mistral", "post-norm"])
def test_where_scoring_begins_changes_no_bit_and_nor_does_the_size_of_steps(family):
    model = build(FAMILIES[family], dtype=torch.float32)
    ids = torch.randint(29, (22,), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for start, tokens_per_step in ((1, 64), (1, 6), (7, 64), (15, 8), (21, 64)):
        engine = Engine(
            model,
            num_pages=8,
            page_size=4,
            max_rows=2,
            max_tokens_per_step=tokens_per_step,
            make_runner=None if family == "llama" else partial(PlainRunner, chunk=4),
        )
        result = engine.submit_score(ids, start).result()
        found.append([one.logprob for one in result.logprobs])
    for part in found[1:]:
        assert part == found[0][-len(part) :]


def test_what_contexts_share_is_computed_once():
    engine = Engine(
        tiny_model(VOCAB, CONTEXT), num_pages=60, page_size=4, max_rows=8, make_runner=HashRunner
    )
    contexts = [[1, 2, 3, 4, 5, 6, 7, 8, i, i, i, i, 9] for i in range(6)]
    pairs = [(context, [i, 5]) for context in contexts for i in range(4)]
    likelihoods(engine, pairs)
    # 8 tokens for all, 4 for each context, and the rest of each: its last, and one target
    assert engine.runner.num_tokens == 8 + 6 * 4 + 24 * 2


def test_a_scored_request_is_one_row_of_a_step():
    engine = Engine(
        tiny_model(VOCAB, CONTEXT),
        num_pages=20,
        page_size=4,
        max_rows=4,
        max_tokens_per_step=12,
        make_runner=HashRunner,
    )
    engine.submit_score([1, *range(20, 35)], start=4)
    engine.submit_score([2, *range(20, 24)], start=2)
    engine.run()
    found = [(step.counts, step.num_logits) for step in engine.runner.steps]
    assert found == [([12], [9]), ([3, 4], [3, 3])]


def test_what_cannot_be_scored_is_refused():
    engine = Engine(tiny_model(VOCAB, CONTEXT), num_pages=8, page_size=4)
    with pytest.raises(ValueError, match="must have one before them; got start=0 of 3"):
        engine.submit_score([1, 2, 3], 0)
    with pytest.raises(ValueError, match="got start=3 of 3"):
        engine.submit_score([1, 2, 3], 3)
    with pytest.raises(ValueError, match="context_length=24 and one more; got 26"):
        engine.submit_score([1] * 26)
    with pytest.raises(ValueError, match=r"token id must lie in \[0, 61\); got 61"):
        engine.submit_score([1, 61])
    assert len(engine.submit_score([1] * 25).result().token_ids) == 24


def test_the_best_tokens_come_with_a_score():
    engine = Engine(tiny_model(VOCAB, CONTEXT), num_pages=8, page_size=4, make_runner=HashRunner)
    [one] = engine.submit_score([3, 4], num_logprobs=3).result().logprobs
    values, ids = logits_after([3], VOCAB).double().log_softmax(-1).topk(3)
    assert [token for token, _ in one.best] == ids.tolist()
    assert [value for _, value in one.best] == pytest.approx(values.tolist(), abs=3e-7)


def test_a_score_has_the_best_it_asked_for_in_any_company():
    """On ties, too, where the best one of five is not the best of one."""
    level = partial(HashRunner, logits_of=lambda ids, vocab: torch.zeros(vocab))
    options = {"num_pages": 20, "page_size": 4, "make_runner": level}
    asked = [(range(10), 1), (range(5, 12), 5), (range(3, 9), 2)]
    together = Engine(tiny_model(VOCAB, CONTEXT), **options)
    handles = [together.submit_score(ids, num_logprobs=best) for ids, best in asked]
    for handle, (ids, best) in zip(handles, asked, strict=True):
        alone = Engine(tiny_model(VOCAB, CONTEXT), **options)
        expected = alone.submit_score(ids, num_logprobs=best).result()
        assert handle.result().logprobs == expected.logprobs
        assert len(expected.logprobs[0].best) == best


def test_on_ties_the_best_token_is_the_one_that_greedy_decoding_chooses():
    def two_alike(ids, vocab):
        logits = torch.zeros(vocab)
        logits[[7, 50]] = 9.0
        return logits

    options = {"num_pages": 20, "page_size": 4}
    runner = partial(HashRunner, logits_of=two_alike)
    engine = Engine(tiny_model(VOCAB, CONTEXT), make_runner=runner, **options)
    greedy = engine.submit([1], max_new_tokens=2, sampling=GREEDY, eos_ids=()).result().token_ids
    for best in (1, 2, 10, VOCAB):
        [found] = likelihoods(engine, [([1], greedy)], num_logprobs=best)
        assert found.is_greedy
        assert {len(set(place)) for place in found.best} == {best}
        assert {place[1][0] for place in found.best if best > 1} <= {50}


def test_whoever_stops_reading_scored_tokens_may_go_on():
    engine = Engine(tiny_model(VOCAB, CONTEXT), num_pages=8, page_size=4, make_runner=HashRunner)
    handle = engine.submit_score(range(10, 20))
    first = next(iter(handle))
    second = next(handle.ready())
    rest = handle.result()
    assert [first.token_id, second.token_id, *rest.token_ids] == list(range(11, 20))
    assert rest.finish_reason == "length"
