"""An accelerated model that trains by kernels has the gradients of the plain model.

Without a GPU the kernels run in Triton's interpreter, and a CPU counts as a GPU.
"""

import pytest
import torch

from acceleration.gpu import register_on_cpu, use_kernels_on_cpu
from scratchlm.accelerate import accelerate
from scratchlm.accelerate.kernels.triton import qkv_norm_rope, rms_norm, swiglu_gate
from scratchlm.training.apply import apply_checkpointing
from tiny_models import FAMILIES, build, ids

register_on_cpu(
    {
        qkv_norm_rope.qk_norm_rope: qkv_norm_rope.launch_qk_norm_rope,
        qkv_norm_rope.qkv_norm_rope_backward: qkv_norm_rope.launch_qkv_norm_rope_backward,
        rms_norm.add_rms_norm: rms_norm.launch_add_rms_norm,
        rms_norm.add_rms_norm_backward: rms_norm.launch_add_rms_norm_backward,
        swiglu_gate.swiglu_gate: swiglu_gate.launch_swiglu_gate,
        swiglu_gate.swiglu_gate_backward: swiglu_gate.launch_swiglu_gate_backward,
    }
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {
    "rms_norm": rms_norm,
    "add_rms_norm": rms_norm,
    "qkv_norm_rope": qkv_norm_rope,
    "swiglu_gate": swiglu_gate,
}


def record_kernels(monkeypatch):
    """Return the names of the kernels called from now on, as they are called."""
    called = []
    for name, module in KERNELS.items():
        kernel = getattr(module, name)

        def recorded(*args, kernel=kernel, name=name):
            called.append(name)
            return kernel(*args)

        monkeypatch.setattr(module, name, recorded)
    return called


def gradients(family, accelerated, policy="none", compiled=False, **options):
    model = build(FAMILIES[family], dtype=torch.float32).to(DEVICE)
    if accelerated:
        accelerate(model)
    apply_checkpointing(model, policy)
    if compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    tokens = ids(2, 9).to(DEVICE)
    loss = model.loss(tokens, tokens, **options)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(got, expected):
    torch.testing.assert_close(got[0], expected[0])
    for name, gradient in expected[1].items():
        # Some are differences of much larger numbers; that of a key's bias without RoPE is 0.
        assert (got[1][name] - gradient).norm() < 5e-5 * gradient.norm() + 1e-7, name


NOT_CALLED = {  # what a family has no use for
    "gpt2": {"rms_norm", "add_rms_norm", "qkv_norm_rope", "swiglu_gate"},
    "sinusoidal": {"qkv_norm_rope", "swiglu_gate"},
    "no positions": {"qkv_norm_rope"},
    "mixtral": {"add_rms_norm", "swiglu_gate"},
    "post-norm": {"add_rms_norm"},
    "no norm": {"rms_norm", "add_rms_norm"},
}
ROWS = [[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1]]
DOCUMENTS = torch.tensor(ROWS, device=DEVICE)
CASES = [*((family, {}) for family in FAMILIES), ("plain", {"document_ids": DOCUMENTS})]


@pytest.mark.parametrize(("family", "options"), CASES, ids=[*FAMILIES, "documents"])
def test_gradients_by_kernels_equal_those_of_the_plain_model(monkeypatch, family, options):
    expected = gradients(family, accelerated=False, **options)
    use_kernels_on_cpu(monkeypatch)
    called = record_kernels(monkeypatch)
    assert_same_gradients(gradients(family, accelerated=True, **options), expected)
    assert set(called) == KERNELS.keys() - NOT_CALLED.get(family, set())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", ["attention", "ffn", "selective", "block"])
def test_so_do_those_of_a_checkpointed_model(monkeypatch, policy, compiled):
    expected = gradients("qwen3", accelerated=False)
    use_kernels_on_cpu(monkeypatch)
    torch.compiler.reset()
    called = None if compiled else record_kernels(monkeypatch)  # a side effect: not in a graph
    assert_same_gradients(gradients("qwen3", True, policy, compiled), expected)
    assert called is None or set(called) == KERNELS.keys()
