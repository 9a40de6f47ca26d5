"""An adapter beside a base in few bits: it learns what it would beside the rounded weights."""

import pytest
import torch

from acceleration.gpu import relative_error
from scratchlm import ModelConfig, TransformerLM
from scratchlm.config.lora import LoRA
from scratchlm.data import Batch
from scratchlm.errors import ScratchLMError
from scratchlm.quantization.convert import quantize_base, recompute_matrices, round_weights
from scratchlm.quantization.layers import QuantizedLayer
from scratchlm.quantization.rule import choose_base
from scratchlm.training.learner import Learner
from scratchlm.training.lora import apply_lora, merge, set_adapters
from scratchlm.training.settings import TrainConfig
from scratchlm.training.step import take_step
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


def gradients(config, to, lora, device, dtype, **settings):
    """Take steps by a learner; return the losses, the last gradients, and what was warned of."""
    model = TransformerLM(config, device=device, dtype=dtype)
    model.reset_parameters(torch.Generator(device).manual_seed(0))
    quantize_base(model, to)
    apply_lora(model, lora)
    warned = []
    learner = Learner(model, TrainConfig(batch_size=2, **settings), warn=warned.append)
    ids = torch.randint(config.vocab_size, (2, 129), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    matrices = {module.shape for module in model.modules() if isinstance(module, QuantizedLayer)}

    def see(tensor):
        assert tensor.shape not in matrices, "a matrix is kept for the backward pass"
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        losses = [take_step(learner, batch, 1, 1e-3).loss]
    losses += [take_step(learner, batch, step, 1e-3).loss for step in range(2, 6)]
    return losses, {name: p.grad.clone() for name, p in learner.parameters.items()}, warned, learner


def test_compiled_blocks_learn_the_same_without_a_break():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = CONFIG.replace(context_length=128), "nf4", LoRA(4, dora=True), "cpu", torch.float32
    losses, grads, warned, _ = gradients(*options, precision="fp32", compile="block")
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    expected, others, _, _ = gradients(*options, precision="fp32")
    assert not warned
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, grad in grads.items():
        assert relative_error(grad, others[name]) < 1e-4, name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_on_a_gpu_steps_are_compiled_and_recorded(to, dora):
    config = ModelConfig(512, 128, 384, 2, 6, 1024)  # no width is the number of tokens, 256
    options = config, to, LoRA(8, dora=dora), "cuda", torch.bfloat16
    losses, grads, warned, learner = gradients(*options)
    assert not warned
    assert learner.recorded is not None
    assert learner.recorded._graph is not None
    plain, others, _, _ = gradients(*options, compile="off", cuda_graph=False)
    assert losses == pytest.approx(plain, rel=2e-3)
    for name, grad in grads.items():
        assert relative_error(grad, others[name]) < 0.05, name
