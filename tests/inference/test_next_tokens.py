"""Next-token tables are what the model computes."""

import pytest
import torch

from inference.tiny import byte_tokenizer, tiny_model
from scratchlm.inference import next_tokens


def test_the_next_token_table_is_the_softmax_in_descending_order():
    model = tiny_model(vocab_size=257)
    table = next_tokens(model, "The cat", tokenizer=byte_tokenizer(), best=257, temperature=0.7)
    ids = torch.tensor([byte_tokenizer().encode("The cat")])
    with torch.no_grad():
        exact = model.next_token_probabilities(ids, temperature=0.7)[0]
    assert [c.probability for c in table] == sorted((c.probability for c in table), reverse=True)
    assert sum(c.probability for c in table) == pytest.approx(1)
    for c in table:
        assert c.probability == pytest.approx(exact[c.token_id].item(), abs=1e-6)
        assert c.text == byte_tokenizer().decode([c.token_id])


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"best": 0}, r"best must lie in \[1, 61\]; got 0"),
        ([1], {"temperature": 0}, "temperature must be finite and at least 1e-06; got 0"),
        ([1] * 49, {}, "the prompt must not exceed context_length=48; got 49 tokens"),
        ([[1], [2]], {}, "one prompt at a time"),
    ],
)
def test_a_wrong_argument_is_one_line(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        next_tokens(tiny_model(), prompt, **options)
