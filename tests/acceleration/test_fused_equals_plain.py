"""A fusion computes what its modules compute: values and gradients, fusion by fusion and whole.

Without a GPU the Triton kernels run in the interpreter, and a CPU is taken for a GPU
(`as_gpu.py`). Those in Gluon need a Hopper GPU: each has tests of its own, and one here.
"""

import contextlib
import copy

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from acceleration.as_gpu import DEVICE, take_for_a_gpu
from acceleration.gpu import on_hopper
from scratchlm import ModelConfig
from scratchlm import config as c
from scratchlm.accelerate import FUSIONS, accelerate, explain, plain
from scratchlm.accelerate.shadow_weights import ShadowWeights
from scratchlm.errors import ScratchLMError
from scratchlm.inference import GREEDY, generate
from scratchlm.model import QuestionAnswering, SequenceClassifier
from scratchlm.training import Learner, TrainConfig
from tiny_models import FAMILIES, PLAIN, build, ids

NAMES = [fusion.name for fusion in FUSIONS]
ODD = PLAIN.replace(
    d_model=20, num_layers=1, num_heads=3, num_kv_heads=1, d_head=6, d_ff=13, vocab_size=31
)
QWEN3 = ODD.replace(attention=c.Attention(qk_norm=True), positions=c.Rotary(1e4, "half"))
BIASED = ODD.replace(attention=c.Attention(bias="all"), ffn=c.SwiGLU(bias=True))
GPT2 = ODD.replace(norm=c.LayerNorm(), ffn=c.MLP(bias=True), positions=c.Learned())

# fusion -> configs with what it takes over; the sides are odd
CASES = {
    "qkv_norm_rope": {"plain": ODD, "qwen3": QWEN3, "biases": BIASED},
    "qkv_joined": {"gpt2": GPT2, "no positions": BIASED.replace(positions=c.NoPositions())},
    "embedding": {"plain": ODD, "learned": GPT2, "tied": ODD.replace(tie_embeddings=True)},
    "rms_norm": {"plain": ODD, "post-norm": ODD.replace(norm_placement="post"), "qwen3": QWEN3},
    "swiglu_gate": {"plain": ODD, "biases": BIASED},
    "add_rms_norm": {"plain": ODD, "qwen3": QWEN3},
    "chunked_lm_head_loss": {"plain": ODD, "tied": GPT2.replace(tie_embeddings=True)},
}
SHADOWED = {
    "bf16_shadow_linear": {"plain": ODD, "gpt2": GPT2},
    "swiglu_joined": {"plain": ODD, "biases": BIASED},
    "qkv_joined": {"plain": ODD, "gpt2": GPT2},
}
ELSEWHERE = {
    "fp8_linear": "tests/acceleration/test_fp8.py",
    "fp8_swiglu": "tests/acceleration/test_fp8.py",
    "qkv_rope_attention": "needs a Hopper GPU",
    "swiglu_gemm": "needs a Hopper GPU",
    "cpu_quantized_linear": "tests/acceleration/test_quantized_cpu.py",
    "cpu_quantized_experts": "tests/acceleration/test_quantized_cpu.py",
    "cpu_quantized_head": "tests/acceleration/test_quantized_cpu.py",
    "gpu_quantized_linear": "tests/acceleration/test_quantized_gemv_kernel.py",
    "gpu_quantized_head": "tests/acceleration/test_quantized_gemv_kernel.py",
}
# Of layers that only a quantised model has.
QUANTIZED = {name for name in NAMES if "_quantized_" in name}


def test_every_fusion_of_the_table_is_tested():
    assert set(NAMES) <= {*CASES, *SHADOWED, *ELSEWHERE}
    assert len(NAMES) == len(set(NAMES))


def gradients(model, tokens, around=contextlib.nullcontext, **options):
    """The loss, the logits, and every parameter's gradient, by name."""
    model.zero_grad()
    with around():
        loss = model.loss(tokens, tokens.roll(-1, 1), **options)
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def errors(got, expected):
    """How far each value is off, against its size or what is small beside the largest of all.

    Some gradients are 0 but for rounding: a key's bias changes no attention.
    """
    assert got.keys() == expected.keys()
    sizes = {n: float(v.double().square().mean().sqrt()) for n, v in expected.items()}
    small = 0.01 * max(sizes.values())
    off = {n: (got[n].double() - v.double()).square().mean().sqrt() for n, v in expected.items()}
    return {n: float(error) / (sizes[n] + small) for n, error in off.items()}


def assert_equal(got, expected, most=1e-4):
    for name, error in errors(got, expected).items():
        assert error < most, f"{name}: {error:.1e}"


def one_by_one(cases):
    return [
        pytest.param(name, config, id=f"{name}-{of}")
        for name, configs in cases.items()
        for of, config in configs.items()
        if name in NAMES
    ]


@pytest.mark.parametrize("shape", [(1, 1), (2, 5)], ids=str)
@pytest.mark.parametrize(("name", "config"), one_by_one(CASES))
def test_a_fusion_alone_gives_the_same(monkeypatch, ran, name, config, shape):
    model, tokens = build(config, dtype=torch.float32).to(DEVICE), ids(*shape, config).to(DEVICE)
    expected = gradients(model, tokens)
    take_for_a_gpu(monkeypatch)
    accelerate(model, without=set(NAMES) - {name})
    got = gradients(model, tokens)
    assert set(ran) == {name}
    assert_equal(got, expected)


@pytest.mark.parametrize("name", [name for name in CASES if name in NAMES])
def test_a_fusion_in_bfloat16_is_as_near_the_truth_as_its_modules(monkeypatch, ran, name):
    config = next(iter(CASES[name].values()))
    model, tokens = build(config, dtype=torch.bfloat16).to(DEVICE), ids(2, 5, config).to(DEVICE)
    truth = gradients(copy.deepcopy(model).double(), tokens)
    by_modules = errors(gradients(model, tokens), truth)
    take_for_a_gpu(monkeypatch)
    accelerate(model, without=set(NAMES) - {name})
    fused = gradients(model, tokens)
    assert set(ran) == {name}
    assert {n: v.dtype for n, v in fused.items() if n != "loss"} == dict.fromkeys(
        (n for n, _ in model.named_parameters()), torch.bfloat16
    )
    for n, error in errors(fused, truth).items():
        assert error < 2 * by_modules[n] + 0.01, f"{n}: {error:.3f}, without {by_modules[n]:.3f}"


@pytest.mark.parametrize("name", [name for name in CASES if name in NAMES])
def test_float64_is_exact_and_has_no_kernel(monkeypatch, ran, name):
    config = next(iter(CASES[name].values()))
    model, tokens = build(config).to(DEVICE), ids(2, 9, config).to(DEVICE)
    expected = gradients(model, tokens)
    take_for_a_gpu(monkeypatch)
    assert_equal(gradients(accelerate(model), tokens), expected, 1e-9)
    assert set(ran) <= {"chunked_lm_head_loss"}  # which is torch's own products


@pytest.mark.parametrize(("name", "config"), one_by_one(SHADOWED))
def test_shadow_weights_give_what_autocast_gives(ran, name, config):
    model, tokens = build(config, dtype=torch.float32).to(DEVICE), ids(2, 9, config).to(DEVICE)

    def autocast():
        return torch.autocast(DEVICE, torch.bfloat16)

    expected = gradients(model, tokens, autocast)
    accelerate(model, without=set(NAMES) - {name})
    shadows = ShadowWeights(model)

    @contextlib.contextmanager
    def visible():
        with shadows.visible(), autocast():
            yield

    got = gradients(model, tokens, visible)
    assert set(ran) == {name}
    assert_equal(got, expected, 0.1)


# Whole models


@st.composite
def configs(draw, most_layers=2):
    heads = draw(st.sampled_from([1, 2, 4]))
    norm = draw(st.sampled_from([c.RMSNorm(), c.RMSNorm(1e-6), c.LayerNorm(), c.NoNorm()]))
    positions = draw(
        st.sampled_from(
            [
                c.Rotary(),
                c.Rotary(1e5, "half"),
                c.Rotary(1e4, "half", c.YarnScaling(4.0, 8)),
                c.Learned(),
                c.Sinusoidal(),
                c.NoPositions(),
            ]
        )
    )
    ffn = st.sampled_from(
        [c.SwiGLU(), c.SwiGLU(True), c.MLP("relu"), c.MLP("gelu", True), c.MoE(3, 2)]
    )
    attention = c.Attention(
        qk_norm=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 3])),
        bias=draw(st.sampled_from(["none", "qkv", "all"])),
    )
    return ModelConfig(
        vocab_size=draw(st.integers(5, 40)),
        context_length=24,
        d_model=draw(st.sampled_from([10, 16, 22])),
        num_layers=draw(st.integers(1, most_layers)),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([h for h in (1, 2, 4) if heads % h == 0])),
        d_head=draw(st.sampled_from([2, 6, 8])),
        d_ff=draw(st.sampled_from([7, 16])),
        positions=positions,
        ffn=draw(ffn),
        norm=norm,
        attention=attention,
        norm_placement=draw(st.sampled_from(["pre", "post"])),
        tie_embeddings=draw(st.booleans()),
    )


@st.composite
def calls(draw, most_tokens=12):
    """A batch and what may come with it: documents, padding, ignored targets, z-loss."""
    batch, seq = draw(st.integers(1, 3)), draw(st.integers(1, most_tokens))
    options = {"z_loss": draw(st.sampled_from([0.0, 1e-2]))}
    kind = draw(st.sampled_from(["plain", "documents", "padding"]))
    if kind == "documents":
        options["document_ids"] = (torch.arange(seq) // 3).expand(batch, seq).to(DEVICE)
    if kind == "padding":
        first = torch.arange(batch)[:, None] % seq
        options["attention_mask"] = (torch.arange(seq) >= first).to(DEVICE)
    return batch, seq, options


@settings(max_examples=15)
@given(config=configs(), call=calls())
def test_an_accelerated_model_is_the_plain_one(config, call):
    batch, seq, options = call
    model = build(config, dtype=torch.float32).to(DEVICE)
    tokens = ids(batch, seq, config).to(DEVICE)
    with torch.no_grad():
        logits = model(tokens)
    expected = gradients(model, tokens, **options)
    names, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    accelerate(model)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), logits, rtol=1e-4, atol=1e-5)
    assert_equal(gradients(model, tokens, **options), expected)
    plain(model)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == names
    assert_equal(gradients(model, tokens, **options), expected, 1e-6)


@pytest.mark.skipif(DEVICE == "cuda", reason="the test above runs the kernels themselves")
@settings(max_examples=6, phases=[Phase.generate])  # the interpreter takes its time
@given(config=configs(most_layers=1), call=calls(most_tokens=5))
def test_so_is_one_that_trains_by_kernels(config, call):
    batch, seq, options = call
    model = build(config, dtype=torch.float32)
    tokens = ids(batch, seq, config)
    expected = gradients(model, tokens, **options)
    with pytest.MonkeyPatch.context() as patch:
        take_for_a_gpu(patch)
        got = gradients(accelerate(model), tokens, **options)
    assert_equal(got, expected)


@settings(max_examples=10)
@given(config=configs(), data=st.data())
def test_accelerated_generation_is_plain_generation(config, data):
    model = build(config, dtype=torch.float32).to(DEVICE)
    rows = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    prompts = [ids(1, length, config, seed=length)[0].tolist() for length in rows]
    options = {"max_new_tokens": 5, "sampling": GREEDY, "eos_ids": (), "num_logprobs": 0}
    slow = generate(model, prompts, accelerate=False, **options)
    fast = generate(model, prompts, accelerate=True, **options)
    for one, other in zip(slow, fast, strict=True):
        assert one.token_ids == other.token_ids
        logprobs = [[said.logprob for said in row.logprobs] for row in (one, other)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize("kind", [QuestionAnswering, lambda config: SequenceClassifier(config, 3)])
def test_heads_of_other_tasks_are_accelerated_and_the_same(monkeypatch, kind):
    model, tokens = kind(QWEN3).to(DEVICE), ids(2, 9, QWEN3).to(DEVICE)
    targets = (torch.tensor([1, 2], device=DEVICE),) * (2 if kind is QuestionAnswering else 1)

    def run():
        model.zero_grad()
        loss = model.loss(tokens, *targets)
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}

    expected = run()
    take_for_a_gpu(monkeypatch)
    accelerate(model)
    assert any(row.reason is None for row in explain(model))
    assert_equal(run(), expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-residual"])
def test_a_precision_means_the_same_with_and_without(precision):
    """The residual stream between layers, and what comes of it."""
    found = []
    for accelerated in (False, True):
        model = build(ODD, dtype=torch.float32).to(DEVICE)
        settings = TrainConfig(steps=1, batch_size=2, precision=precision, accelerate=accelerated)
        learner, streams = Learner(model, settings), []
        model.layers[0].register_forward_pre_hook(
            lambda module, given, streams=streams: streams.append(given[0].dtype)
        )
        tokens = ids(2, 9, ODD).to(DEVICE)
        with learner.autocast():
            loss = learner.loss(tokens, tokens)
        found.append((streams, loss.item()))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=2e-3)


@pytest.mark.parametrize("family", ["plain", "gpt2"])
def test_second_derivatives_are_right_or_refused(family):
    def second(model):
        loss = model.loss(tokens, tokens.roll(-1, 1))
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    config = FAMILIES[family]
    tokens = ids(2, 5, config)
    expected = second(build(config, "reference"))
    try:
        got = second(accelerate(build(config)))
    except RuntimeError:
        return
    assert_equal(got, expected, 1e-6)


# In place, and back


@pytest.mark.parametrize("family", FAMILIES)
def test_accelerate_and_plain_leave_all_but_the_classes(family):
    model = build(FAMILIES[family], dtype=torch.float32)
    classes = [type(m) for m in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    assert accelerate(model) is model
    assert accelerate(model) is model  # twice is once
    assert [type(m) for m in model.modules()] != classes
    assert [id(p) for p in model.parameters()] == identities
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    for kind, module in zip(classes, model.modules(), strict=True):
        assert isinstance(module, kind)
    assert plain(model) is model
    assert [type(m) for m in model.modules()] == classes
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_a_copy_of_an_accelerated_model_is_accelerated(monkeypatch):
    take_for_a_gpu(monkeypatch)
    model = accelerate(build(QWEN3, dtype=torch.float32))
    twice = copy.deepcopy(model)
    assert explain(twice) == explain(model)
    assert any(row.reason is None for row in explain(twice))


def test_a_fusion_that_was_left_out_stays_out(monkeypatch):
    take_for_a_gpu(monkeypatch)
    model = accelerate(build(ODD, dtype=torch.float32), without=["swiglu_gate"])
    generate(model, [[1, 2]], max_new_tokens=1, sampling=GREEDY, eos_ids=())
    reasons = {row.reason for row in explain(model) if row.fusion == "swiglu_gate"}
    assert len(reasons) == 1
    assert "left out" in reasons.pop()


def test_an_unknown_fusion_is_refused_by_name():
    with pytest.raises(ScratchLMError, match=r"'swiglue'.*swiglu_gate"):
        accelerate(build(ODD), without=["swiglue"])


def test_a_subclass_made_after_acceleration_outlives_it():
    model = accelerate(build(ODD, dtype=torch.float32))
    layer = model.layers[0].ffn

    class Louder(type(layer)):
        def forward(self, x):
            return 2 * super().forward(x)

    layer.__class__ = Louder
    tokens = ids(2, 5, ODD)
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(plain(model)(tokens), expected)
        layer.__class__ = type(plain(build(ODD)).layers[0].ffn)
        assert not torch.allclose(model(tokens), expected, rtol=1e-3)


# What `explain` says


def test_explain_gives_a_reason_wherever_a_fusion_does_not_run():
    model = build(QWEN3.replace(num_layers=2), dtype=torch.float32)
    assert {row.reason for row in explain(model) if row.layer} == {"not accelerated"}
    accelerate(model)
    rows = explain(model)
    assert {row.fusion for row in rows} >= set(NAMES) - QUANTIZED
    for row in rows:
        assert row.reason is None or row.reason.strip()
        if row.layer:
            model.get_submodule(row.layer)
    assert {row.layer for row in rows} >= {"layers.0", "layers.1.attn", "layers.1.ffn"}


def test_explain_says_what_then_runs(monkeypatch, ran):
    take_for_a_gpu(monkeypatch)
    for config in (QWEN3, GPT2, ODD.replace(norm_placement="post"), FAMILIES["mixtral"]):
        model = accelerate(build(config.replace(num_layers=1), dtype=torch.float32))
        gradients(model, ids(1, 3, config))
        seen = set(ran)
        said = {row.fusion for row in explain(model, batch=1, seq=3) if row.reason is None}
        assert seen == said & set(NAMES), config
        ran.clear()


def test_explain_names_the_layer_that_is_hooked(monkeypatch):
    take_for_a_gpu(monkeypatch)
    model = accelerate(build(QWEN3.replace(num_layers=2), dtype=torch.float32))
    before = {(row.layer, row.fusion): row.reason for row in explain(model)}
    model.layers[1].ffn.w3.register_forward_hook(lambda *_: None)
    after = {(row.layer, row.fusion): row.reason for row in explain(model)}
    changed = {key for key in after if after[key] != before[key]}
    assert ("layers.1.ffn", "swiglu_gate") in changed
    assert "w3" in after["layers.1.ffn", "swiglu_gate"]
    assert {layer for layer, _ in changed} <= {"layers.1.ffn", ""}  # "": the decoders


# Gluon


@on_hopper
@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["heads", "grouped heads"])
@pytest.mark.parametrize("name", [n for n in NAMES if "Hopper" in ELSEWHERE.get(n, "")])
def test_a_hopper_fusion_gives_the_same(ran, name, heads):
    config = ModelConfig(
        vocab_size=512,
        context_length=256,
        d_model=256,
        num_layers=2,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        d_ff=512,
    )
    model = build(config, dtype=torch.float32).to("cuda")
    tokens = ids(33, 256, config).to("cuda")  # enough heads to fill the multiprocessors

    def autocast():
        return torch.autocast("cuda", torch.bfloat16)

    expected = gradients(model, tokens, autocast)
    accelerate(model, without=set(NAMES) - {name})
    got = gradients(model, tokens, autocast)
    assert set(ran) == {name}
    assert_equal(got, expected, 0.1)
