"""The optimizers are their formulas; torch's own, and a float64 loop, say so."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scratchlm import ModelConfig, TransformerLM
from scratchlm.config import Learned, MoE
from scratchlm.training import AdamW, Muon, clip_grad_norm, make_optimizers
from scratchlm.training.optimizers import newton_schulz

SIZES = {"vocab_size": 17, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2}


def parameters_after(optimizer_of, shapes, steps=25, dtype=torch.float32):
    """Follow the same noisy gradients with any optimizer; the first gradient is missing once."""
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]
    optimizer = optimizer_of(params)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=dtype) * 0.1 + p.detach()
        if step == 3:
            params[0].grad = None
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3},
        {"weight_decay": 0.0, "betas": (0.0, 0.5)},
    ],
)
def test_adamw_equals_torchs(choice, fused):
    shapes = [(3, 4), (5,), (2, 3, 2), ()]
    ours = parameters_after(lambda ps: AdamW(ps, **choice), shapes)
    theirs = parameters_after(lambda ps: torch.optim.AdamW(ps, **choice, fused=fused), shapes)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def test_adamw_equals_its_formula_in_plain_numbers():
    lr, b1, b2, eps, decay = 0.01, 0.9, 0.99, 1e-8, 0.1
    theta, m, v = 1.5, 0.0, 0.0
    p = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    optimizer = AdamW([p], lr, (b1, b2), eps, decay)
    for t in range(1, 50):
        g = math.sin(t) + theta
        p.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        theta -= lr * decay * theta
        theta -= lr * (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps)
        assert p.item() == pytest.approx(theta, rel=1e-13)


def test_a_first_moment_in_bfloat16_is_rounded_once_a_step_and_moves_nearly_alike():
    shapes, made = [(3, 4), (5,)], []

    def low(params):
        made.append(AdamW(params, lr=0.1, moment=torch.bfloat16))
        return made[-1]

    ours = parameters_after(low, shapes)
    truth = parameters_after(lambda ps: AdamW(ps, lr=0.1), shapes)
    for a, b in zip(ours, truth, strict=True):
        assert 0 < (a - b).abs().max() < 0.05
    p = nn.Parameter(torch.zeros(3))
    optimizer = AdamW([p], betas=(0.9, 0.95), moment=torch.bfloat16)
    exact = torch.zeros(3)
    for g in ([1.0, 0.3, 1e-3], [0.1, -0.7, 2.0], [0.11, 5.0, -1e-3]):
        p.grad = torch.tensor(g)
        optimizer.step()
        exact = (0.9 * exact + 0.1 * p.grad).bfloat16().float()
    assert torch.equal(optimizer.state[p]["exp_avg"], exact.bfloat16())
    again = AdamW([p], moment=torch.bfloat16)
    again.load_state_dict(optimizer.state_dict())  # which widens, and is narrowed again
    assert torch.equal(again.state[p]["exp_avg"], exact.bfloat16())
    assert again.state[p]["exp_avg"].dtype == torch.bfloat16


def test_muon_equals_torchs():
    shapes = [(6, 4), (4, 6), (5, 5)]
    choice = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    ours = parameters_after(lambda ps: Muon(ps, **choice), shapes)
    theirs = parameters_after(
        lambda ps: torch.optim.Muon(ps, **choice, adjust_lr_fn="match_rms_adamw"), shapes
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-3)  # both work in bfloat16 inside


def test_muon_on_a_stack_of_experts_moves_each_as_if_alone():
    stack = parameters_after(lambda ps: Muon(ps, lr=0.02), [(1, 1), (3, 6, 4)])[1]
    assert stack.shape == (3, 6, 4)
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(3, 6, 4, generator=generator)
    together = newton_schulz(g, dtype=torch.float64)
    alone = torch.stack([newton_schulz(m, dtype=torch.float64) for m in g])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4)])
def test_newton_schulz_keeps_singular_vectors_and_evens_the_values(shape):
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    inside = u.T @ newton_schulz(g, dtype=torch.float64) @ vh.T
    values = inside.diagonal()
    assert (values > 0.5).all()
    assert (values < 1.5).all()
    torch.testing.assert_close(inside, torch.diag(values), atol=1e-9, rtol=0)


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match=r"matrices only; got shape \(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and >= 0; got lr=-1.0"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\)"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": math.inf}, "weight_decay must be"),
    ],
)
def test_adamw_refuses_what_makes_no_sense(choice, message):
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.zeros(3))], **choice)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("fast", [True, False])
def test_decay_acts_on_matrices_only_and_every_parameter_is_moved_by_one_optimizer(kind, fast):
    config = ModelConfig(**SIZES, positions=Learned(), ffn=MoE(4, 2))
    model = TransformerLM(config)
    optimizers = make_optimizers(model, kind, weight_decay=0.5, fast=fast)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    seen = [id(p) for group in groups for p in group["params"]]
    assert sorted(seen) == sorted(id(p) for p in model.parameters())
    for group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.5 if p.ndim >= 2 else 0.0)
    if kind == "muon":
        hidden = {id(p) for group in optimizers[-1].param_groups for p in group["params"]}
        outer = [model.token_embeddings.weight, model.lm_head.weight]
        assert not hidden & {id(p) for p in outer}
        assert id(model.layers[0].attn.q_proj.weight) in hidden


def test_fast_and_written_out_optimizers_train_a_model_alike():
    losses = {}
    for kind in ("adamw", "muon"):
        for fast in (True, False):
            torch.manual_seed(0)
            model = TransformerLM(ModelConfig(**SIZES))
            optimizers = make_optimizers(model, kind, lr=3e-3, fast=fast)
            ids = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(0))
            for _ in range(20):
                loss = model.loss(ids[:, :-1], ids[:, 1:])
                model.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            losses[kind, fast] = loss.item()
    assert losses["adamw", True] == pytest.approx(losses["adamw", False], rel=1e-4)
    assert losses["muon", True] == pytest.approx(losses["muon", False], rel=1e-2)
    assert max(losses.values()) < 2.3  # from ln 17 = 2.83: they do learn


# Clipping


@settings(max_examples=60, deadline=None)
@given(
    max_norm=st.floats(1e-3, 1e3),
    scale=st.floats(1e-3, 1e3),
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4),
)
def test_clipping_equals_torchs(max_norm, scale, shapes):
    def make():
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.zeros(s)) for s in [*shapes, (2,)]]
        for p in params[:-1]:  # the last has no gradient
            p.grad = torch.randn(p.shape, generator=generator) * scale
        return params

    ours, theirs = make(), make()
    norm = clip_grad_norm(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert ours[-1].grad is None


def test_clipping_leaves_small_gradients_bit_for_bit_and_works_in_place():
    p = nn.Parameter(torch.zeros(2))
    p.grad = grad = torch.tensor([0.3, 0.4])
    before = grad.clone()
    assert clip_grad_norm([p], 1.0).item() == pytest.approx(0.5)
    assert p.grad is grad
    assert torch.equal(grad, before)
    clip_grad_norm(iter([p]), 0.1)
    assert p.grad is grad
    expected = 0.1 / (0.5 + 1e-6)
    torch.testing.assert_close(grad, before * expected)


def test_clipping_nothing_is_zero_and_a_silly_bound_is_refused():
    assert clip_grad_norm([nn.Parameter(torch.zeros(2))], 1.0) == 0
    with pytest.raises(ValueError, match="max_norm must be greater than 0; got 0"):
        clip_grad_norm([], 0)
