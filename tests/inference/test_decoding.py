"""Generation: the cache, the batch and the window change nothing; ends, stops and errors."""

import dataclasses

import pytest
import torch

from inference.test_sampling import SAMPLINGS
from inference.tiny import END, byte_tokenizer, scripted_model, tiny_model
from scratchlm import acceleration
from scratchlm.inference import (
    GREEDY,
    Sampling,
    decode_one_token,
    decoding,
    generate,
    prefill,
    stream,
)
from scratchlm.inference.scheduler import window_start
from tiny_models import FAMILIES, build

ROWS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8], [4, 4]]


def tokens(result):
    return [row.token_ids for row in result]


@pytest.mark.parametrize("name", [*SAMPLINGS, "greedy"])
def test_cached_equals_uncached_for_every_sampler(name):
    options = {"sampling": SAMPLINGS.get(name, GREEDY), "max_new_tokens": 20, "seed": 3}
    cached = generate(tiny_model(), ROWS, **options)
    uncached = generate(tiny_model(), ROWS, use_cache=False, **options)
    assert tokens(cached) == tokens(uncached)


@pytest.mark.parametrize("name", [*SAMPLINGS, "greedy"])
def test_a_row_of_a_batch_is_the_row_alone(name):
    sampling = SAMPLINGS.get(name, GREEDY)
    batch = generate(tiny_model(), ROWS, sampling=sampling, max_new_tokens=20, seed=11)
    for i, row in enumerate(ROWS):
        alone = generate(tiny_model(), row, sampling=sampling, max_new_tokens=20, seed=11 + i)
        assert alone[0].token_ids == batch[i].token_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_generates_the_same_with_and_without_cache(name):
    model = build(FAMILIES[name])
    cached = generate(model, [[1, 2], [3, 4, 5, 6]], max_new_tokens=12, seed=0)
    assert tokens(cached) == tokens(
        generate(model, [[1, 2], [3, 4, 5, 6]], max_new_tokens=12, seed=0, use_cache=False)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_generates_the_same_with_and_without_acceleration(name, monkeypatch):
    model = build(FAMILIES[name], dtype=torch.float32)
    options = {"max_new_tokens": 12, "sampling": GREEDY}
    asked, make = [], acceleration.make_runner

    def make_runner(*given, **options):
        asked.append(make(*given, **options))
        return asked[-1]

    monkeypatch.setattr(acceleration, "make_runner", make_runner)
    for prompts in ([[1, 2], [3, 4, 5, 6]], [[3, 4, 5, 6]]):
        asked.clear()
        fast = generate(model, prompts, **options)
        assert len(asked) == 1
        plain = generate(model, prompts, accelerate=False, **options)
        assert tokens(plain) == tokens(fast)
        assert len(asked) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "mixtral"])
def test_rows_of_very_different_lengths_are_read_one_by_one_with_the_same_result(name, monkeypatch):
    model = build(FAMILIES[name])
    context = model.config.context_length
    rows = [[i % 7 + 1 for i in range(n)] for n in (context - 4, 2, 1)]
    for settled in (False, True):  # the second time, into a cache that holds something
        results = []
        for limit in (0, 10**9):
            monkeypatch.setattr(decoding, "TOKENS_PER_READING", limit)
            cache = model.new_cache(3)
            if settled:
                prefill(model, [[3], [4, 5], [6]], cache)
            logits = prefill(model, [row[: context - 5] for row in rows], cache)
            after = decode_one_token(model, [1, 2, 3], cache)
            results.append((logits, after, cache.lengths))
        for one_by_one, padded in zip(*results, strict=True):
            torch.testing.assert_close(one_by_one, padded, atol=1e-5, rtol=1e-5)


def test_rows_may_be_sampled_each_in_its_own_way():
    samplings = [GREEDY, Sampling(top_k=3), Sampling(repetition_penalty=2.0), Sampling(0.5)]
    options = {"max_new_tokens": 10, "seed": 1}
    batch = generate(tiny_model(), ROWS, sampling=samplings, **options)
    for i, sampling in enumerate(samplings):
        whole = generate(tiny_model(), ROWS, sampling=sampling, **options)
        assert whole[i].token_ids == batch[i].token_ids


def test_the_same_prompt_with_other_seeds_gives_other_texts():
    results = tokens(generate(tiny_model(), [[5]] * 8, max_new_tokens=12, seed=0))
    assert len({tuple(row) for row in results}) == 8
    again = tokens(generate(tiny_model(), [[5]] * 8, max_new_tokens=12, seed=list(range(8))))
    assert again == results


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.5)])
def test_rows_that_end_early_leave_the_others_as_they_were(sampling):
    model = tiny_model()
    options = {"max_new_tokens": 20, "seed": 5, "sampling": sampling}
    free = generate(model, ROWS, **options)
    end = free[1].token_ids[4]
    ended = generate(model, ROWS, eos_ids=[end], **options)
    for whole, cut in zip(free, ended, strict=True):
        if end in whole.token_ids:
            stop = whole.token_ids.index(end) + 1
            assert cut.token_ids == whole.token_ids[:stop]
            assert cut.finish_reason == "end"
        else:
            assert cut.token_ids == whole.token_ids
            assert cut.finish_reason == "length"
    assert {row.finish_reason for row in ended} == {"end", "length"}


# The context


def test_the_window_slides_by_half_and_depends_on_the_length_alone():
    assert [window_start(n, 8) for n in (1, 8, 9, 12, 13, 16, 17)] == [0, 0, 4, 4, 8, 8, 12]
    assert [window_start(n, 1) for n in (1, 2, 3)] == [0, 1, 2]
    assert all(1 <= n - window_start(n, 7) <= 7 for n in range(1, 60))


@pytest.mark.parametrize("learned", [False, True])
def test_sliding_past_the_context_is_a_fresh_start_on_the_newer_half(learned):
    model = tiny_model(context_length=8, learned=learned)
    options = {"max_new_tokens": 30, "past_context": "slide", "sampling": GREEDY}
    rows = generate(model, ROWS, **options)
    for prompt, row in zip(ROWS, rows, strict=True):
        ids = list(prompt)
        for token in row.token_ids:
            window = ids[window_start(len(ids), 8) :]
            with torch.no_grad():
                assert int(model(torch.tensor([window]))[0, -1].argmax()) == token
            ids.append(token)
    assert tokens(generate(model, ROWS, use_cache=False, **options)) == tokens(rows)


def test_a_prompt_longer_than_the_context_may_slide_too():
    model = tiny_model(context_length=8)
    long = [i % 60 for i in range(21)]
    slid = generate(model, long, max_new_tokens=3, past_context="slide", sampling=GREEDY)
    start = window_start(21, 8)
    fresh = generate(model, long[start:], max_new_tokens=3, sampling=GREEDY)
    assert tokens(slid) == tokens(fresh)


def test_without_a_limit_a_row_fills_the_context():
    rows = generate(tiny_model(context_length=16), [[1, 2, 3], [4]], seed=0)
    assert [len(row.token_ids) for row in rows] == [13, 15]
    assert {row.finish_reason for row in rows} == {"length"}


# Text


def say(text, stop=(), **options):
    tokenizer = byte_tokenizer()
    model = scripted_model(tokenizer.encode(text), tokenizer.vocab_size)
    pieces = list(stream(model, "x", tokenizer=tokenizer, stop=stop, sampling=GREEDY, **options))
    return [piece.text for piece in pieces], pieces[-1]


def test_end_of_text_ends_and_is_not_part_of_the_text():
    texts, last = say(f"héllo{END}never", max_new_tokens=50)
    assert "".join(texts) == "héllo"
    assert last.finish_reason == "end"


def test_a_character_is_never_cut_in_half():
    texts, last = say("a€🙂", max_new_tokens=8)
    assert [t for t in texts if t] == ["a", "€", "🙂"]
    assert last.finish_reason == "length"
    assert "".join(say("a€", max_new_tokens=3)[0]) == "a\ufffd"


def test_a_stop_string_across_token_borders_is_never_shown():
    texts, last = say("one\nUsed two\nUser: three", stop=["\nUser:"], max_new_tokens=60)
    assert "".join(texts) == "one\nUsed two"
    assert last.finish_reason == "stop"
    assert not any("\nUser" in t for t in texts)


def test_what_was_held_back_comes_at_the_end():
    assert "".join(say("ab\nUs", stop="\nUser:", max_new_tokens=5)[0]) == "ab\nUs"
    assert "".join(say(f"ab\nUs{END}", stop="\nUser:", max_new_tokens=50)[0]) == "ab\nUs"


def test_a_stop_string_that_completes_with_the_last_token_counts():
    texts, last = say("ab##", stop="##", max_new_tokens=4)
    assert ("".join(texts), last.finish_reason) == ("ab", "stop")


def test_generate_is_stream_collected():
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=257)
    options = {"tokenizer": tokenizer, "max_new_tokens": 12, "seed": 4, "num_logprobs": 2}
    options["eos_ids"] = []  # what ends a text is not shown in it
    rows = generate(model, ["ab", "c"], **options)
    pieces = list(stream(model, ["ab", "c"], **options))
    for i, row in enumerate(rows):
        mine = [piece for piece in pieces if piece.row == i]
        assert row.token_ids == [piece.token_id for piece in mine]
        assert row.text == "".join(piece.text for piece in mine)
        assert row.text == tokenizer.decode(row.token_ids)
        assert row.logprobs == [piece.logprob for piece in mine]


def test_an_empty_prompt_begins_at_end_of_text():
    model, tokenizer = tiny_model(vocab_size=257), byte_tokenizer()
    empty = generate(model, "", tokenizer=tokenizer, max_new_tokens=5, seed=0)
    begun = generate(model, [256], max_new_tokens=5, seed=0)
    assert tokens(empty) == tokens(begun)


def test_a_token_the_tokenizer_does_not_know_is_shown_as_unknown():
    model = scripted_model([97, 259, 98], 260)
    rows = generate(model, [97], tokenizer=byte_tokenizer(), max_new_tokens=3, sampling=GREEDY)
    assert rows[0].text == "a\ufffdb"


# Log-probabilities


def test_logprobs_are_the_models_own_before_any_filter():
    model = tiny_model()
    sampling = Sampling(temperature=0.3, top_k=2, repetition_penalty=1.4)
    [row] = generate(model, [5, 9], sampling=sampling, max_new_tokens=6, num_logprobs=3, seed=0)
    ids = [5, 9]
    for entry in row.logprobs:
        with torch.no_grad():
            table = model(torch.tensor([ids]))[0, -1].double().log_softmax(-1)
        assert entry.logprob == pytest.approx(table[entry.token_id].item(), abs=1e-5)
        values, best = table.topk(3)
        assert [i for i, _ in entry.best] == best.tolist()
        assert [v for _, v in entry.best] == pytest.approx(values.tolist(), abs=1e-5)
        ids.append(entry.token_id)
    assert ids[2:] == row.token_ids


def test_without_asking_there_are_no_logprobs():
    [row] = generate(tiny_model(), [5], max_new_tokens=2, seed=0)
    assert row.logprobs is None
    [row] = generate(tiny_model(), [5], max_new_tokens=2, seed=0, num_logprobs=0)
    assert all(entry.best == () for entry in row.logprobs)


# Errors


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one prompt"),
        ([[]], {}, "at least one token"),
        ("text", {}, "needs a tokenizer"),
        ([61], {}, r"token id must lie in \[0, 61\); got 61"),
        ([-1], {}, r"token id must lie in \[0, 61\); got -1"),
        ([1.5], {}, "a prompt must be text or token ids; got 1.5"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1; got 0"),
        ([1], {"max_new_tokens": 48}, r"must fit context_length=48; got 1 \+ 48"),
        ([1] * 48, {}, r"must fit context_length=48; got 48 \+ 1"),
        ([1], {"past_context": "wrap"}, "past_context must be one of error, slide; got 'wrap'"),
        ([1], {"past_context": "slide"}, "max_new_tokens must be given"),
        ([1], {"stop": ["x"]}, "stop strings need a tokenizer"),
        ([1], {"seed": [1, 2]}, "seed must be one for all or one for each of 1 rows; got 2"),
        ([1], {"seed": 1.5}, "seed must be of type int; got 1.5"),
        ([1], {"sampling": "greedy"}, "sampling must be of type Sampling"),
        ([1], {"num_logprobs": 62}, r"num_logprobs must lie in \[0, 61\]; got 62"),
        ([1], {"sampling": Sampling(logit_bias={61: 1.0})}, r"logit_bias must name tokens in"),
    ],
)
def test_a_wrong_argument_is_one_line_and_comes_before_any_work(prompts, options, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        stream(tiny_model(), prompts, **options)
    assert "\n" not in str(caught.value)


def test_a_model_gone_wrong_is_an_error_not_a_text():
    model = build(dataclasses.replace(FAMILIES["plain"]))
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ValueError, match="nothing to choose from"):
        generate(model, [1], max_new_tokens=2, sampling=GREEDY)
