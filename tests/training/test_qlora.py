"""An adapter beside a base in few bits: it learns what it would beside the rounded weights."""

import pytest
import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.config.lora import LoRA
from scratchlm.errors import ScratchLMError
from scratchlm.quantization.convert import quantize_base, recompute_matrices, round_weights
from scratchlm.quantization.layers import QuantizedLayer
from scratchlm.quantization.rule import choose_base
from scratchlm.training.lora import apply_lora, merge, set_adapters
from scratchlm.training.tuning import Tuning

CONFIG = ModelConfig(vocab_size=90, context_length=16, d_model=64, num_layers=2, num_heads=4)
IDS = torch.randint(90, (2, 12), generator=torch.Generator().manual_seed(0))


def base(to=None):
    """The same random model: as it is, or with its layers in few bits."""
    model = TransformerLM(CONFIG)
    model.reset_parameters(torch.Generator().manual_seed(0))
    if to is not None:
        quantize_base(model, to)
    return model


def learn(model, lora, steps=3):
    """Take a few steps; return the losses and what was learnt."""
    apply_lora(model, lora)
    model.train()
    learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(learnt.values(), lr=1e-2)
    torch.manual_seed(5)  # for dropout
    losses = []
    for _ in range(steps):
        loss = model.loss(IDS[:, :-1], IDS[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, learnt


@pytest.mark.parametrize(
    "lora", [LoRA(4), LoRA(4, dora=True), LoRA(4, dropout=0.3, rslora=True)], ids=str
)
@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_it_learns_what_it_would_beside_the_rounded_weights(to, lora):
    rounded = base()
    before = rounded(IDS)
    round_weights(rounded.state_dict(), choose_base(CONFIG, to))
    assert (rounded(IDS) - before).abs().max() > 1e-3
    quantised = base(to)
    kinds = [module.format.name for module in quantised.modules() if hasattr(module, "format")]
    assert kinds == [to] * 14  # seven matrices in each layer; the head and the table stay wide
    losses, learnt = learn(quantised, lora)
    expected, others = learn(rounded, lora)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < losses[0]
    assert learnt.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(learnt[name], tensor, atol=1e-6, rtol=1e-5)


def kept_matrices(model):
    """Count the matrices that are kept for the backward pass."""
    shapes, found = {(64, 64), (64, 256), (256, 64), (64, 192), (192, 64)}, []

    def note(tensor):
        found.extend([tensor.shape] if tuple(tensor.shape) in shapes else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.loss(IDS[:, :-1], IDS[:, 1:])
    return len(found)


def test_no_matrix_is_kept_wide_for_the_backward_pass():
    model = base("nf4")
    apply_lora(model, LoRA(4))
    assert kept_matrices(model) == 0
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.recomputes = False
    assert kept_matrices(model) == 11  # q, k, v: the first layer's input asks for no gradient
    recompute_matrices(model)
    assert kept_matrices(model) == 0


def test_a_fresh_adapter_changes_no_bit_and_does_not_merge_into_few_bits():
    model = base("int8")
    before, state = model(IDS), set(model.state_dict())
    apply_lora(model, LoRA(4))
    assert torch.equal(model(IDS), before)
    assert state < set(model.state_dict())
    with pytest.raises(ScratchLMError, match="cannot be put into quantised weights"):
        merge(model)
    set_adapters(model, [])  # nothing was merged half
    assert torch.equal(model(IDS), before)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="beside nf4 or int8; got 'q4_k'"):
        choose_base(CONFIG, "q4_k")
    narrow = ModelConfig(90, 16, d_model=32, num_layers=1, num_heads=4, d_ff=96)
    with pytest.raises(ValueError, match="whole blocks of 64: no matrix has them"):
        choose_base(narrow, "nf4")
    with pytest.raises(ValueError, match="got quantize='nf4' without lora"):
        Tuning(quantize="nf4")
    assert Tuning.from_dict(Tuning(LoRA(), "nf4").to_dict()) == Tuning(LoRA(), "nf4")
