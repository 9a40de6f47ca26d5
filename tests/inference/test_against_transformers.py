"""Token for token what transformers' `generate` gives, greedy and beam, left-padded batches too."""

import pytest
import torch

from interop.hf_models import hf_model
from scratchlm.inference import GREEDY, Sampling, beam_search, generate
from scratchlm.inference.loading import load_model

FAMILIES = ["llama 2", "llama 3.1", "qwen3", "gpt2", "qwen2", "mistral", "mixtral", "qwen3 moe"]
PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8], [44, 4]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            directory = tmp_path_factory.mktemp("hf")
            theirs = hf_model(family).float()
            theirs.save_pretrained(directory)
            made[family] = theirs, load_model(directory).model
        return made[family]

    return get


def theirs_generate(model, prompts, **options):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options)
    return out[:, longest:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_token_for_token_theirs(pair, family):
    theirs, ours = pair(family)
    for prompt in PROMPTS:
        expected = theirs_generate(theirs, [prompt], max_new_tokens=24)
        assert [generate(ours, prompt, sampling=GREEDY, max_new_tokens=24)[0].token_ids] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_in_left_padded_batches_is_token_for_token_theirs(pair, family):
    theirs, ours = pair(family)
    expected = theirs_generate(theirs, PROMPTS, max_new_tokens=24)
    rows = generate(ours, PROMPTS, sampling=GREEDY, max_new_tokens=24)
    assert [row.token_ids for row in rows] == expected


def test_greedy_with_an_end_token_and_a_penalty_is_theirs(pair):
    theirs, ours = pair("llama 2")
    sampling = Sampling(temperature=0.0, repetition_penalty=1.3)
    free = generate(ours, PROMPTS[0], sampling=sampling, max_new_tokens=24)[0].token_ids
    [row] = generate(ours, PROMPTS[0], sampling=sampling, max_new_tokens=24, eos_ids=[free[9]])
    expected = theirs_generate(
        theirs, PROMPTS[:1], max_new_tokens=24, repetition_penalty=1.3, eos_token_id=free[9]
    )
    assert [row.token_ids] == expected


@pytest.mark.parametrize(
    ("family", "length_penalty", "early_stopping"),
    [
        ("llama 2", 1.0, False),
        ("llama 2", 1.0, True),
        ("llama 2", 2.0, "never"),
        ("llama 2", 0.0, "never"),
        ("llama 2", -0.5, False),
        ("gpt2", 2.0, True),
    ],
)
def test_beam_search_is_token_for_token_theirs(pair, family, length_penalty, early_stopping):
    theirs, ours = pair(family)
    for prompt, ends in zip(PROMPTS, ([], [13], [3, 40, 41], list(range(20, 40))), strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            pad_token_id=0,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=9,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=ends or None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        beams = beam_search(
            ours,
            prompt,
            num_beams=4,
            max_new_tokens=9,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_ids=ends,
        )
        for beam, row, score in zip(
            beams, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
        ):
            generated = row[len(prompt) :]
            at = [i for i, token in enumerate(generated) if token in ends]
            assert generated[: at[0] + 1 if at else None] == beam.token_ids  # behind it is padding
            assert beam.score == pytest.approx(score, abs=1e-4)
