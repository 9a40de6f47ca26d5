"""Which models runners take: by an explicit list, with the reason for all others."""

import copy
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
from scratchlm.model import (
    MLP,
    Embedding,
    LayerNorm,
    Linear,
    MoE,
    MultiHeadSelfAttention,
    RotaryEmbedding,
    SwiGLU,
)
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


# Modules of ours that are not those of the config


def other(kind, *sizes, **options):
    torch.manual_seed(1)
    return kind(*sizes, **options)


def with_setting(module, name, value):
    setattr(module, name, value)


def method_patched(module, name):
    method = getattr(module, name)
    setattr(module, name, lambda *given, **named: method(*given, **named) * 1.5)


def layers_of(model, *layers):
    model.layers = torch.nn.ModuleList(layers)


QK_NORMS = ("q_norm", "k_norm")
OF_OURS = {  # what happens to a model of two layers
    "a norm of no kind": lambda m, a, b: setattr(b, "ln2", torch.nn.Identity()),
    "no last norm": lambda m, a, b: setattr(m, "ln_final", torch.nn.Identity()),
    "another norm": lambda m, a, b: setattr(a, "ln1", LayerNorm(16)),
    "another kind of FFN": lambda m, a, b: setattr(a, "ffn", other(MLP, 16, 40, "relu")),
    "a narrower FFN": lambda m, a, b: setattr(a, "ffn", other(SwiGLU, 16, 8)),
    "experts in one layer": lambda m, a, b: setattr(b, "ffn", other(MoE, 16, 8, 4, 2)),
    "more heads": lambda m, a, b: setattr(
        b, "attn", other(MultiHeadSelfAttention, 16, 8, 4, 4, rope=m.rope, layer=1)
    ),
    "norms of heads": lambda m, a, b: [setattr(b.attn, n, LayerNorm(4)) for n in QK_NORMS],
    "no RoPE in one layer": lambda m, a, b: setattr(b.attn, "rope", None),
    "another RoPE": lambda m, a, b: setattr(b.attn, "rope", RotaryEmbedding(7.0, 4, 24)),
    "another setting": lambda m, a, b: with_setting(b, "post_norm", True),
    "a layer less": lambda m, a, b: layers_of(m, a),
    "a layer twice": lambda m, a, b: layers_of(m, a, a),
    "layers exchanged": lambda m, a, b: layers_of(m, b, a),
    "a layer more": lambda m, a, b: layers_of(m, a, b, copy.deepcopy(a)),
    "a larger vocabulary": lambda m, a, b: setattr(m, "token_embeddings", other(Embedding, 40, 16)),
    "a method patched": lambda m, a, b: method_patched(b.attn, "attend"),
    "another window": lambda m, a, b: with_setting(b.attn, "sliding_window", 2),
    "another epsilon": lambda m, a, b: with_setting(a.ln1, "eps", 0.5),
}


@pytest.mark.parametrize("when", ["before", "while an engine runs"])
@pytest.mark.parametrize("what", OF_OURS)
def test_a_layer_of_ours_that_the_config_does_not_name_runs_as_it_is(what, when):
    """The runner would read it by the config's sizes: past its end, or by another formula."""
    models = [build(PLAIN, dtype=torch.float32) for _ in range(2)]
    running = Engine(models[0], num_pages=8)
    for model in models:
        OF_OURS[what](model, *model.layers)
    model, untouched = models[0], build(PLAIN, dtype=torch.float32)
    prompt, told = [1, 2, 3], {"max_new_tokens": 5, "sampling": GREEDY, "eos_ids": ()}
    if when == "before" or len(model.layers) > PLAIN.num_layers:  # the running one has no room
        running = Engine(model, num_pages=8)
    found = running.submit(prompt, num_logprobs=0, **told).result()
    ids = torch.tensor([prompt + found.token_ids])
    with torch.no_grad():
        logits, before = (m(ids)[0, 2:-1] for m in (models[1], untouched))
    assert not torch.allclose(logits, before, atol=1e-3)
    assert found.token_ids == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).amax(-1).tolist()
    assert [one.logprob for one in found.logprobs] == pytest.approx(expected, abs=1e-4)


def test_a_router_with_a_bias_and_changed_settings_of_experts_are_not_taken():
    for change in (
        lambda ffn: setattr(ffn, "router", other(Linear, 16, 4, True)),
        lambda ffn: with_setting(ffn, "experts_per_token", 1),
        lambda ffn: with_setting(ffn, "renormalize", False),
    ):
        model = build(FAMILIES["mixtral"], dtype=torch.float32)
        assert why_not_cpu(model) is None
        change(model.layers[1].ffn)
        assert why_not_cpu(model) is not None


@pytest.mark.parametrize("how", [accelerate, plain])
def test_a_class_that_is_patched_is_called(how, monkeypatch):
    model = how(build(PLAIN, dtype=torch.float32))
    before, runner = logprobs(model), Engine(model, num_pages=1).runner
    assert runner.unchanged
    forward = SwiGLU.forward
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: forward(self, x) * 2)
    assert not runner.unchanged
    kind = "SwiGLU" if how is plain else "AcceleratedSwiGLU"
    assert why_not_cpu(model) == f"a class {kind} that is patched"
    assert logprobs(model) == pytest.approx(logprobs(model, accelerate=False), abs=1e-5)
    assert logprobs(model) != pytest.approx(before, abs=1e-3)
