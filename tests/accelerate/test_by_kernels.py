"""A whole model by the kernels that train, beside itself without them.

Without a GPU the kernels run in Triton's interpreter, and a CPU is taken for a GPU.
"""

import pytest
import torch

from scratchlm.accelerate.kernels.triton import qkv_norm_rope as heads
from scratchlm.accelerate.kernels.triton import rms_norm as add_norm
from scratchlm.accelerate.kernels.triton import swiglu_gate as gate
from scratchlm.ops import fast
from scratchlm.training.learner import apply_checkpointing
from tiny_models import FAMILIES, build, ids

OPERATIONS = {
    heads.qk_norm_rope: heads.launch_qk_norm_rope,
    heads.qkv_norm_rope_backward: heads.launch_qkv_norm_rope_backward,
    add_norm.add_rms_norm: add_norm.launch_add_rms_norm,
    add_norm.add_rms_norm_backward: add_norm.launch_add_rms_norm_backward,
    gate.swiglu_gate: gate.launch_swiglu_gate,
    gate.swiglu_gate_backward: gate.launch_swiglu_gate_backward,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    for operation, function in OPERATIONS.items():
        operation.register_kernel("cpu")(function)


@pytest.fixture
def expected(request, monkeypatch):
    """The gradients without kernels, for the arguments a test is parametrised with."""
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: False)
    family, given = request.param if isinstance(request.param, tuple) else (request.param, {})
    return family, given, gradients(family, **given)


def take_for_a_gpu(monkeypatch):
    """Let a CPU be taken for a GPU that trains."""
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: torch.is_grad_enabled())


def listen(monkeypatch):
    """Return the list of kernels called from now on."""
    called = []
    for module, name in (
        (heads, "qkv_norm_rope"),
        (add_norm, "add_rms_norm"),
        (gate, "swiglu_gate"),
    ):
        kernel = getattr(module, name)

        def listened(*given, kernel=kernel, name=name):
            called.append(name)
            return kernel(*given)

        monkeypatch.setattr(module, name, listened)
    return called


def gradients(family, policy="none", compiled=False, **given):
    model = build(FAMILIES[family], dtype=torch.float32).to(DEVICE)
    apply_checkpointing(model, policy)
    if compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    tokens = ids(2, 9).to(DEVICE)
    loss = model.loss(tokens, tokens, **given)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_alike(got, expected):
    torch.testing.assert_close(got[0], expected[0])
    for name, gradient in expected[1].items():
        error = (got[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 5e-5, name  # some are differences of much larger numbers


USES = {  # what trains on a GPU without one of the three kernels
    "gpt2": set(),
    "sinusoidal": {"add_rms_norm"},
    "no positions": {"add_rms_norm", "swiglu_gate"},
    "mixtral": {"qkv_norm_rope"},
    "post-norm": {"qkv_norm_rope", "swiglu_gate"},
    "no norm": {"qkv_norm_rope", "swiglu_gate"},
}
ROWS = [[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1]]
DOCUMENTS = torch.tensor(ROWS, device=DEVICE)
CASES = [*FAMILIES, ("plain", {"document_ids": DOCUMENTS})]


@pytest.mark.parametrize("expected", CASES, indirect=True)
def test_a_model_by_kernels_has_the_same_gradients(monkeypatch, expected):
    family, given, truth = expected
    take_for_a_gpu(monkeypatch)
    called = listen(monkeypatch)
    assert_alike(gradients(family, **given), truth)
    assert set(called) == USES.get(family, {"qkv_norm_rope", "add_rms_norm", "swiglu_gate"})


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", ["attention", "ffn", "selective", "block"])
@pytest.mark.parametrize("expected", ["qwen3"], indirect=True)
def test_so_has_one_that_recomputes(monkeypatch, expected, policy, compiled):
    take_for_a_gpu(monkeypatch)
    assert_alike(gradients("qwen3", policy, compiled), expected[2])
