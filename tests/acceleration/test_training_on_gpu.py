"""Training on a Hopper GPU by a Learner: with any fusions the same step, resumed the same bits."""

import pytest
import torch

from acceleration.gpu import on_hopper, relative_error
from scratchlm import ModelConfig
from scratchlm.accelerate import FUSIONS, accelerate, explain
from scratchlm.data import Batch
from scratchlm.training import Learner, TrainConfig, backward, build_model, take_step
from scratchlm.training.session import deterministic_kernels
from training.tiny import assert_same_state

pytestmark = [pytest.mark.cuda, on_hopper]

DEVICE = "cuda"
ROWS, SEQ = 16, 128  # with 8 heads each, they occupy 132 multiprocessors
CONFIG = ModelConfig(2048, SEQ, d_model=512, num_layers=2, num_heads=8, d_ff=1024)
NAMES = [fusion.name for fusion in FUSIONS if "quantized" not in fusion.name]
# Those that need a setting of their own, or another fusion left out, to run
SECOND_CHOICES = {
    *("qkv_norm_rope", "qkv_joined", "swiglu_gate", "swiglu_joined"),
    *("fp8_linear", "fp8_swiglu", "bf16_shadow_linear"),
}
LEFT_OUT = {
    "all run": (),
    **{f"without {name}": (name,) for name in NAMES},
    "qkv_joined runs": ("qkv_rope_attention", "qkv_norm_rope"),
    "swiglu_joined runs": ("swiglu_gemm", "swiglu_gate"),
    "none runs": tuple(NAMES),
}


def draw_batch(seed=0, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab_size, (rows, SEQ + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def make_learner(without=(), **settings):
    model = build_model(CONFIG, 0, DEVICE)
    accelerate(model, without=without)
    return Learner(model, TrainConfig(batch_size=ROWS, precision="bf16-mixed", **settings))


def loss_and_gradients(learner):
    """Return those of one batch; twice, since the first compiles and records."""
    for _ in range(2):
        loss = backward(learner, draw_batch())
    return {"loss": loss, **{name: p.grad for name, p in learner.parameters.items()}}


@pytest.fixture(scope="module")
def exact():
    """Loss and gradients of the plain model in float64, and how far bfloat16 is from them."""
    settings = {"batch_size": ROWS, "accelerate": False, "fast_optimizer": False}
    model = build_model(CONFIG, 0, DEVICE).double()
    truth = loss_and_gradients(Learner(model, TrainConfig(precision="fp32", **settings)))
    model = build_model(CONFIG, 0, DEVICE)
    plain = loss_and_gradients(Learner(model, TrainConfig(precision="bf16-mixed", **settings)))
    rounding = {name: relative_error(plain[name], truth[name]) for name in truth}
    assert 0 < max(rounding.values()) < 0.1
    return truth, rounding


def assert_within_rounding(found, exact):
    truth, rounding = exact
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        error = relative_error(found[name], expected)
        assert error < 2 * rounding[name] + 5e-3, (name, error, rounding[name])


def running(model):
    rows = explain(model, batch=ROWS, seq=SEQ, dtype=torch.bfloat16)
    return {row.fusion for row in rows if row.reason is None}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_whatever_fusions_are_left_out_a_step_is_the_plain_one(case, exact):
    learner = make_learner(LEFT_OUT[case])
    names = running(learner.model) & set(NAMES)
    if case == "all run":
        assert names == set(NAMES) - SECOND_CHOICES
    elif case.endswith(" runs"):
        assert case == "none runs" or case.removesuffix(" runs") in names | {"swiglu_joined"}
    assert not names & set(LEFT_OUT[case])
    assert_within_rounding(loss_and_gradients(learner), exact)


@pytest.mark.parametrize("compile_how", ["off", "block"])
@pytest.mark.parametrize("layers", [None, 1], ids=["all layers", "one layer"])
@pytest.mark.parametrize("policy", ["attention", "ffn", "selective", "block"])
def test_a_checkpointed_step_is_the_plain_one(policy, layers, compile_how, exact):
    torch._dynamo.reset()
    learner = make_learner(checkpointing=policy, checkpointed_layers=layers, compile=compile_how)
    assert_within_rounding(loss_and_gradients(learner), exact)


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "CUDA graph"])
@pytest.mark.parametrize("compile_how", ["off", "block", "model"])
def test_a_compiled_or_recorded_step_is_the_plain_one(compile_how, cuda_graph, exact):
    torch._dynamo.reset()
    learner = make_learner(compile=compile_how, cuda_graph=cuda_graph)
    for _ in range(2):  # the third and fourth are from a recording
        found = loss_and_gradients(learner)
    assert_within_rounding(found, exact)


# Resumption


def start_run(settings):
    """Build everything as a new process does."""
    torch._dynamo.reset()
    return make_learner(deterministic=True, **settings)


def evaluate(learner):
    """Run the model as an evaluation does, at another batch size."""
    batch = draw_batch(99, rows=3).to(learner.device)
    with torch.no_grad(), learner.autocast():
        return learner.loss(batch.inputs, batch.targets).item()


def train(learner, steps):
    return [take_step(learner, draw_batch(step), step, 1e-3).loss for step in steps]


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "CUDA graph"])
@pytest.mark.parametrize("compile_how", ["off", "block"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(compile_how, cuda_graph, policy):
    settings = {"compile": compile_how, "cuda_graph": cuda_graph, "checkpointing": policy}
    with deterministic_kernels(True):
        whole = start_run(settings)
        evaluate(whole)
        losses = train(whole, range(6))
        interrupted = start_run(settings)
        evaluate(interrupted)
        first = train(interrupted, range(3))
        saved = [
            {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            for tensors in (interrupted.model_tensors(), interrupted.training_state())
        ]
        del interrupted
        resumed = start_run(settings)
        resumed.load(*saved)
        assert [*first, *train(resumed, range(3, 6))] == losses
        assert_same_state(resumed, whole)
    assert len(set(losses)) == 6
