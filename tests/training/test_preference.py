"""Direct preference optimization against its formula."""

import math

import numpy as np
import pytest
import torch

from interop.hf_models import hf_model, import_model
from scratchlm import ModelConfig, TransformerLM
from scratchlm.data.conversations import Example
from scratchlm.data.examples import write_examples
from scratchlm.errors import ScratchLMError
from scratchlm.training.preference import (
    PreferenceBatches,
    PreferenceValidation,
    dpo_loss,
    pair_loss,
    sequence_logps,
)


def test_the_loss_is_its_formula_and_pulls_the_pair_apart():
    chosen, rejected, first, second = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    loss = dpo_loss(chosen, rejected, first, second, beta=0.3)
    expected = 0.0
    for c, r, c0, r0 in zip(*(x.tolist() for x in (chosen, rejected, first, second)), strict=True):
        expected += math.log(1 + math.exp(-0.3 * ((c - c0) - (r - r0)))) / 6
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    even = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    dpo_loss(even, torch.zeros(2), torch.zeros(2), torch.zeros(2), beta=0.3).backward()
    torch.testing.assert_close(even.grad, torch.full((2,), -0.3 / 2 / 2, dtype=torch.float64))


def test_log_probabilities_are_summed_over_the_answer_alone():
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(30, 16, d_model=16, num_layers=1, num_heads=2))
    inputs = torch.randint(30, (3, 9))
    targets = torch.randint(30, (3, 9))
    targets[0, :4] = targets[1, 2:] = targets[2, 0] = -100
    logps = model(inputs).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = logps.masked_fill(targets == -100, 0).sum(-1)
    torch.testing.assert_close(sequence_logps(model, inputs, targets), expected)


def test_loss_and_gradients_are_those_of_transformers_logits(tmp_path):
    """The policy and π₀ are two models of theirs; pairs of several lengths, padded to the right."""
    theirs, first = hf_model("llama 3.2"), hf_model("llama 3.2", seed=2)
    theirs.save_pretrained(tmp_path / "policy")
    ours = import_model(tmp_path / "policy")
    made = [
        Example([3, 4, 5, 6, 7], [False, False, True, True, True]),
        Example([3, 4, 8], [False, False, True]),
        Example([9, 2, 1], [False, True, True]),
        Example([9, 5, 5, 5], [False, True, True, True]),
    ]

    def logp(model, example):
        """Return the log-probability of an answer, token by token, read alone."""
        logits = model(torch.tensor([example.ids])).logits[0].log_softmax(-1)
        places = [i for i, learns in enumerate(example.learns) if learns]
        return sum(logits[i - 1, example.ids[i]] for i in places)

    with torch.no_grad():
        reference = [float(logp(first, example)) for example in made]
    chosen, rejected = ([logp(theirs, one) for one in made[which::2]] for which in (0, 1))
    expected = 0.0
    for pair in (0, 1):
        margin = (chosen[pair] - reference[2 * pair]) - (rejected[pair] - reference[2 * pair + 1])
        expected = expected + torch.log1p(torch.exp(-0.2 * margin)) / 2
    expected.backward()
    examples = write_examples(tmp_path / "pairs", made, "t")
    (batch,) = PreferenceValidation(examples, 6, 4, reference=np.array(reference))
    loss = pair_loss(ours, batch, 0.2)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    pairs = (
        (ours.layers[0].ffn.w2, theirs.model.layers[0].mlp.down_proj),
        (ours.layers[1].attn.v_proj, theirs.model.layers[1].self_attn.v_proj),
        (ours.token_embeddings, theirs.model.embed_tokens),
    )
    for mine, other in pairs:
        assert other.weight.grad.abs().max() > 1e-3
        torch.testing.assert_close(mine.weight.grad, other.weight.grad, atol=1e-6, rtol=1e-4)


def test_pairs_stay_together_through_shuffling_and_cutting(tmp_path):
    made = [
        Example([pair, 20 + which, which], [False, True, True])
        for pair in range(7)
        for which in (0, 1)
    ]
    examples = write_examples(tmp_path / "pairs", made, "t")
    reference = np.arange(14, dtype=np.float64)
    batches = PreferenceBatches(examples, 4, 6, 0, reference=reference)
    seen = []
    for step in range(7):
        batch = batches.batch(step)
        assert batch.num_targets() == 3
        for piece in batch.cut(2):
            assert piece.inputs[0, 0] == piece.inputs[1, 0]  # one prompt
            assert piece.inputs[:, 1].tolist() == [20, 21]  # chosen, then rejected
            assert piece.reference.tolist() == [2 * piece.inputs[0, 0], 2 * piece.inputs[0, 0] + 1]
            seen.append(int(piece.inputs[0, 0]))
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))
    held_out = PreferenceValidation(examples, 4, 4, reference=reference)
    assert sum(batch.num_targets() for batch in held_out) == 7
    with pytest.raises(ScratchLMError, match="even batch_size"):
        PreferenceBatches(examples, 4, 3, 0, reference=reference)
