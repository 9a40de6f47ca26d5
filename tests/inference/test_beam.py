"""Beam search against exhaustive search, and greedy as its narrowest case."""

import itertools

import pytest
import torch

from inference.tiny import byte_tokenizer, tiny_model
from scratchlm.inference import GREEDY, beam_search, generate


def exhaustive(model, prompt, length, vocab, end):
    """Score every continuation: of `length` tokens, or shorter and ended."""
    scored = []
    for n in range(1, length + 1):
        for ids in itertools.product(range(vocab), repeat=n):
            ended = ids[-1] == end
            if end in ids[:-1] or (n < length and not ended):
                continue
            with torch.no_grad():
                table = model(torch.tensor([prompt + list(ids)])).double().log_softmax(-1)[0]
            positions = range(len(prompt) - 1, len(prompt) + n - 1)
            logprob = sum(
                table[position, token].item()
                for position, token in zip(positions, ids, strict=True)
            )
            scored.append((logprob, list(ids)))
    return sorted(scored, reverse=True)


def test_a_beam_wide_enough_finds_what_exhaustive_search_finds():
    model = tiny_model(vocab_size=4, seed=2)
    best = exhaustive(model, [1, 2], 3, 4, end=3)
    found = beam_search(
        model,
        [1, 2],
        num_beams=64,
        max_new_tokens=3,
        length_penalty=0.0,
        early_stopping="never",
        eos_ids=[3],
    )
    assert len(best) == len(found)
    assert [beam.token_ids for beam in found[:10]] == [ids for _, ids in best[:10]]
    assert [beam.logprob for beam in found] == pytest.approx([p for p, _ in best], abs=1e-4)


def test_one_beam_is_greedy():
    model = tiny_model()
    [beam] = beam_search(model, [5, 9], num_beams=1, max_new_tokens=15)
    assert (
        beam.token_ids == generate(model, [5, 9], sampling=GREEDY, max_new_tokens=15)[0].token_ids
    )


def test_ids_beyond_the_tokenizer_are_shown_as_unknown_by_beams_too():
    model, tokenizer = tiny_model(vocab_size=300), byte_tokenizer()
    [beam] = beam_search(model, [5, 9], num_beams=1, max_new_tokens=15, tokenizer=tokenizer)
    [row] = generate(model, [5, 9], sampling=GREEDY, max_new_tokens=15, tokenizer=tokenizer)
    assert max(beam.token_ids) >= tokenizer.vocab_size
    assert (beam.token_ids, beam.text) == (row.token_ids, row.text)


def test_more_beams_never_find_worse_when_nothing_ends():
    model = tiny_model()
    scores = [
        beam_search(model, [5, 9], num_beams=n, max_new_tokens=8)[0].logprob for n in (1, 8, 32)
    ]
    assert scores == sorted(scores)


def test_the_text_ends_before_the_end_token():
    model, tokenizer = tiny_model(vocab_size=257), byte_tokenizer()
    options = {"tokenizer": tokenizer, "num_beams": 3, "max_new_tokens": 6, "length_penalty": 0.0}
    end = beam_search(model, "ab", **options)[0].token_ids[1]
    beams = beam_search(model, "ab", eos_ids=[end], **options)
    for beam in beams:
        words = beam.token_ids[:-1] if beam.finish_reason == "end" else beam.token_ids
        assert beam.text == tokenizer.decode(words)
        assert end not in words
    assert any(beam.finish_reason == "end" for beam in beams)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams must be at least 1; got num_beams=0"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never'"),
        ({"max_new_tokens": 99}, "must fit context_length=48"),
    ],
)
def test_a_wrong_argument_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(tiny_model(), [1], **options)
    with pytest.raises(ValueError, match="one prompt at a time; got 2"):
        beam_search(tiny_model(), [[1], [2]])
