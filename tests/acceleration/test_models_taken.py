"""Which models runners take: by an explicit list, with the reason for all others."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm import config as kinds
from scratchlm.accelerate import accelerate, plain
from scratchlm.accelerate.cpu_runner import CPURunner
from scratchlm.accelerate.decoding import (
    EXPERTS,
    HANDLED,
    make_runner,
    why_not_config,
    why_not_cpu,
)
from scratchlm.accelerate.joined_weights import as_one_matrix, join_weights
from scratchlm.inference import GREEDY, Engine, generate, stream
from scratchlm.ops import OPS
from scratchlm.paged import PagedCache
from tiny_models import FAMILIES, PLAIN, build, ids

TAKEN = [
    name for name in FAMILIES if why_not_cpu(build(FAMILIES[name], dtype=torch.float32)) is None
]


def test_only_these_families_are_not_taken():
    assert FAMILIES.keys() - TAKEN == {"post-norm"}


# Models that change while a request is decoded


class Zero(torch.nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


def zero_values(module, inputs, output):
    return torch.zeros_like(output)


def zero_forward(x):
    return torch.zeros_like(x)


CHANGES = {
    "hooked": lambda attn: attn.v_proj.register_forward_hook(zero_values),
    "replaced": lambda attn: setattr(attn, "v_proj", Zero()),
    "patched": lambda attn: setattr(attn.v_proj, "forward", zero_forward),
}


def logprobs(model, change=None, **options):
    """The log-probabilities of eight tokens; the model changes after the fourth."""
    pieces = stream(
        model, [[1, 2, 3]], max_new_tokens=8, sampling=GREEDY, eos_ids=(), num_logprobs=0, **options
    )
    found = [next(pieces).logprob.logprob for _ in range(4)]
    if change is not None:
        change(model.layers[0].attn)
    return [*found, *(piece.logprob.logprob for piece in pieces)]


@pytest.mark.parametrize("how", CHANGES)
def test_a_module_changed_between_two_tokens_is_called(how):
    untouched = logprobs(build(PLAIN, dtype=torch.float32))
    fast = logprobs(build(PLAIN, dtype=torch.float32), CHANGES[how])
    slow = logprobs(build(PLAIN, dtype=torch.float32), CHANGES[how], accelerate=False)
    assert fast == pytest.approx(slow, abs=1e-5)
    assert fast[:4] == pytest.approx(untouched[:4], abs=1e-5)
    assert fast[5:] != pytest.approx(untouched[5:], abs=1e-3)


def test_global_hooks_are_called():
    model, called = build(PLAIN, dtype=torch.float32), []
    expected = logprobs(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
    try:
        assert why_not_cpu(model) == "global hooks"
        found = logprobs(model)
    finally:
        hook.remove()
    assert len(called) >= 8
    assert found == pytest.approx(expected, abs=1e-5)


# What is not taken


def test_a_model_that_is_not_taken_is_refused_with_the_reason():
    model = build(PLAIN, dtype=torch.float64)
    assert why_not_cpu(model) == "weights that are not all bfloat16, all float16 or all float32"
    cache = PagedCache(PLAIN, 1, 16, dtype=torch.float64)
    assert make_runner(model, cache, max_rows=1, exact=False) is None
    hooked = build(PLAIN, dtype=torch.float32)
    hooked.layers[0].attn.v_proj.register_forward_hook(lambda *_: None)
    assert "layers.0.attn.v_proj that is hooked" in why_not_cpu(hooked)

    class Other(TransformerLM):
        pass

    assert "a model that is hooked, replaced" in why_not_cpu(Other(PLAIN))
    assert why_not_config(PLAIN.replace(ffn=kinds.MoE(2, 1))) == "MoE in the config"  # a GPU's
    assert why_not_cpu(build(FAMILIES["post-norm"], dtype=torch.float32)) == "post-norm blocks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_the_engine_reads_a_checkpoint_of_any_dtype_in_c(dtype):
    for name in ("llama", "gpt2"):
        engine = Engine(build(FAMILIES[name], dtype=dtype), num_pages=4)
        assert isinstance(engine.runner, CPURunner)
        assert engine.cache.keys.dtype == dtype


def test_user_provided_ops_are_called():
    for ops in ("reference", OPS["fast"].replace(silu=torch.relu)):
        assert "user-provided ops" in why_not_cpu(build(PLAIN, ops, dtype=torch.float32))
    model = build(PLAIN, dtype=torch.float32)
    model.layers[1].ffn.ops = OPS["fast"].replace(silu=torch.relu)
    assert why_not_cpu(model) == "user-provided ops in layers.1.ffn"


def test_weights_that_are_no_plain_parameters_are_not_taken():
    model = build(PLAIN, dtype=torch.float32)
    weight = model.layers[0].attn.q_proj.weight
    weight.data = weight.data.T.contiguous().T
    assert "contiguous" in why_not_cpu(model)
    mixed = build(PLAIN, dtype=torch.float32)
    mixed.ln_final.bfloat16()
    assert "all bfloat16" in why_not_cpu(mixed)
    parametrised = build(PLAIN, dtype=torch.float32)
    torch.nn.utils.parametrizations.weight_norm(parametrised.layers[0].attn.q_proj)
    assert "parametrised" in why_not_cpu(parametrised)


def config_classes():
    """Return every class that a model's config may be made of."""
    found = {ModelConfig}
    for name in kinds.__all__:
        kind = getattr(kinds, name)
        if dataclasses.is_dataclass(kind):
            found.add(kind)
    return found


def test_every_field_of_a_config_is_handled_or_refused_by_name():
    """Whoever adds a field must say whether decoders know it."""
    scalings = {kind for kind in config_classes() if kind.__name__.endswith("Scaling")}
    on_cpu = HANDLED | EXPERTS
    assert config_classes() - on_cpu.keys() == scalings
    assert EXPERTS.keys() == {kinds.MoE}  # which a GPU refuses by its type
    for kind, handled in on_cpu.items():
        names = {field.name for field in dataclasses.fields(kind)}
        assert names == handled, kind
    for family in FAMILIES.values():
        post = family.norm_placement == "post"
        assert (why_not_config(family, on_cpu) is not None) == post
        refused = isinstance(family.ffn, kinds.MoE) or post
        assert (why_not_config(family) is not None) == refused


@pytest.mark.parametrize("part", ["attention", "ffn", "norm", "positions", "model"])
def test_a_new_field_is_refused_by_name(part, monkeypatch):
    kind = ModelConfig if part == "model" else type(getattr(PLAIN, part))

    @dataclass(frozen=True)
    class Extended(kind):
        logit_softcap: float = 30.0

    old = PLAIN if part == "model" else getattr(PLAIN, part)
    new = Extended(**{f.name: getattr(old, f.name) for f in dataclasses.fields(old) if f.init})
    config = new if part == "model" else dataclasses.replace(PLAIN, **{part: new})
    assert why_not_config(config) == "Extended in the config"
    monkeypatch.setitem(HANDLED, Extended, HANDLED[kind])  # or, a field of our own class
    assert why_not_config(config) == "the config's field logit_softcap, which it does not know"


# Weights side by side


def test_joined_weights_keep_their_values_and_are_read_as_one():
    model = build(FAMILIES["llama"], dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attn = model.layers[0].attn
    linears = [attn.q_proj, attn.k_proj, attn.v_proj]
    assert as_one_matrix([m.weight for m in linears]) is None
    join_weights(model)
    whole = as_one_matrix([m.weight for m in linears])
    torch.testing.assert_close(whole, torch.cat([m.weight for m in linears]))
    assert whole.data_ptr() == attn.q_proj.weight.data_ptr()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_neighbours_by_chance_are_not_read_as_one():
    block = torch.randn(6, 4)
    first, second = block[:3].clone(), block[3:].clone()
    assert as_one_matrix([first, second]) is None
    assert as_one_matrix([block[3:], block[:3]]) is None
    assert torch.equal(as_one_matrix([block[:2], block[2:5]]), block[:5])


@pytest.mark.parametrize("how", [accelerate, plain])
def test_a_replaced_or_hooked_projection_is_called(how):
    model = how(build(PLAIN, dtype=torch.float32))
    tokens, called = ids(1, 4), []
    expected = model(tokens)
    model.layers[0].attn.k_proj.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(model(tokens), expected)
    assert called == [1]
    model.layers[0].attn.v_proj = Zero()
    assert not torch.allclose(model(tokens), expected)


def test_a_bias_on_one_projection_and_two_epsilons_fall_back_to_the_model():
    biased = build(FAMILIES["llama"], dtype=torch.float32)
    biased.layers[0].attn.k_proj.bias = torch.nn.Parameter(torch.ones(8))
    normed = build(FAMILIES["qwen3"], dtype=torch.float32)
    normed.layers[1].attn.k_norm.eps = 0.5
    for model, what in ((biased, "a bias on some"), (normed, "two different ε")):
        assert what in why_not_cpu(model)
        steps = {"max_new_tokens": 8, "seed": 0}
        fast, slow = (generate(model, [[1, 2, 3]], use_cache=c, **steps) for c in (True, False))
        assert fast[0].token_ids == slow[0].token_ids
