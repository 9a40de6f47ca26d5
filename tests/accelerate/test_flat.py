"""The flat step on a CPU is the model: every supported family, rows equal and ragged, in a row."""

import pytest
import torch

from scratchlm import TransformerLM
from scratchlm.config import MoE
from scratchlm.inference import prefill
from scratchlm.model.flat import FlatStep, why_not_flat
from scratchlm.ops import fast
from tiny_models import FAMILIES, build, ids

FLAT = [
    name for name in FAMILIES if why_not_flat(build(FAMILIES[name], dtype=torch.float32)) is None
]


def test_most_families_can_be_flat():
    assert {"plain", "llama", "qwen3", "gpt2"} <= set(FLAT)


def both(family, prompts, joined):
    """Return the flat step and the model, each with a cache that holds the prompts."""
    model = build(FAMILIES[family], dtype=torch.float32).eval()
    if joined:
        for layer in model.layers:
            layer.lay_weights_side_by_side()
    caches = []
    for _ in range(2):
        cache = model.new_cache(len(prompts), 16)
        prefill(model, prompts, cache)
        caches.append(cache)
    return model, FlatStep(model, caches[0]), caches


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "side by side"])
@pytest.mark.parametrize("lengths", [[3], [4, 4], [5, 2, 1]], ids=str)
@pytest.mark.parametrize("family", FLAT)
def test_the_flat_step_gives_the_models_logits(family, lengths, joined):
    prompts = [ids(1, n)[0].tolist() for n in lengths]
    model, flat, (ours, theirs) = both(family, prompts, joined)
    for step in range(4):
        tokens = [(7 * step + row) % 29 for row in range(len(lengths))]
        with torch.inference_mode():
            expected = model(torch.tensor(tokens)[:, None], cache=theirs)[:, -1]
        torch.testing.assert_close(flat(tokens), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.lengths, theirs.lengths)
    used = int(ours.lengths.max())
    torch.testing.assert_close(ours.keys[:, :, :, :used], theirs.keys[:, :, :, :used])


def test_it_goes_on_when_rows_have_gone():
    prompts = [[1, 2, 3], [4, 5], [6]]
    model, flat, (ours, theirs) = both("llama", prompts, True)
    flat([7, 8, 9])
    with torch.inference_mode():
        model(torch.tensor([[7], [8], [9]]), cache=theirs)
        for cache in (ours, theirs):
            cache.select_rows(torch.tensor([0, 2]))
        expected = model(torch.tensor([[3], [4]]), cache=theirs)[:, -1]
    torch.testing.assert_close(flat([3, 4]), expected, atol=1e-5, rtol=1e-5)


def test_what_it_cannot_do_is_refused_with_the_reason():
    model = build(FAMILIES["plain"], dtype=torch.float64)
    assert why_not_flat(model) == "weights that are not float32"
    with pytest.raises(ValueError, match="does not take weights that are not float32"):
        FlatStep(model, model.new_cache(1))
    hooked = build(FAMILIES["plain"], dtype=torch.float32)
    hooked.layers[0].attn.v_proj.register_forward_hook(lambda *_: None)
    assert why_not_flat(hooked) == "a model with hooks"

    class Other(TransformerLM):
        pass

    assert why_not_flat(Other(FAMILIES["plain"])) == "a model of another class"
    experts = FAMILIES["plain"].replace(ffn=MoE(2, 1))
    assert why_not_flat(build(experts, dtype=torch.float32)) == "a mixture of experts"


def test_an_id_outside_the_vocabulary_is_refused():
    _, flat, _ = both("plain", [[1, 2]], True)
    with pytest.raises(ValueError, match="token id must lie in"):
        flat([29])


def test_weights_side_by_side_keep_their_values_and_are_read_as_one():
    model = build(FAMILIES["llama"], dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attn = model.layers[0].attn
    maps = [attn.q_proj, attn.k_proj, attn.v_proj]
    assert fast.as_one_matrix([m.weight for m in maps]) is None
    model.layers[0].lay_weights_side_by_side()
    whole = fast.as_one_matrix([m.weight for m in maps])
    torch.testing.assert_close(whole, torch.cat([m.weight for m in maps]))
    assert whole.data_ptr() == attn.q_proj.weight.data_ptr()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_neighbours_by_chance_are_not_read_as_one():
    block = torch.randn(6, 4)
    first, second = block[:3].clone(), block[3:].clone()
    assert fast.as_one_matrix([first, second]) is None
    assert fast.as_one_matrix([block[3:], block[:3]]) is None
    assert torch.equal(fast.as_one_matrix([block[:2], block[2:5]]), block[:5])


def test_a_replaced_or_hooked_projection_is_called():
    """Somebody's own layer in place of ours must not be passed by."""
    model = build(FAMILIES["plain"], dtype=torch.float32)
    tokens, seen = ids(1, 4), []
    plain = model(tokens)
    model.layers[0].attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model(tokens), plain)
    assert seen == [1]

    class Zero(torch.nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    model.layers[0].attn.v_proj = Zero()
    assert not torch.allclose(model(tokens), plain)
