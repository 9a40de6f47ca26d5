"""Triton launches on the current GPU, wherever tensors are: for others torch's ops are used."""

from types import SimpleNamespace

import pytest
import torch

from scratchlm.accelerate import conditions, fp8, hopper, kernels
from scratchlm.training import optimizers
from scratchlm.training.kernel_adamw import KernelAdamW


def on_gpu(index, dtype=torch.float32):
    return SimpleNamespace(
        is_cuda=True,
        device=SimpleNamespace(index=index),
        dtype=dtype,
        shape=torch.Size((2048, 64)),
        is_contiguous=lambda: True,
    )


@pytest.fixture(params=[0, 1])
def current(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda *_: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(hopper, "_KNOWN", True)
    return request.param


@pytest.mark.parametrize("index", [0, 1])
def test_kernels_are_for_tensors_on_the_current_gpu(current, index):
    x = on_gpu(index)
    head = torch.empty(50_304, 64, dtype=torch.bfloat16, device="meta")
    here = current == index
    assert kernels.launches_for(x) == here
    assert conditions.trains_by_kernel(x) == here
    assert fp8.runs_by_kernel(x) == here
    assert hopper.is_hopper(index) == here
    assert hopper.supports_lm_head_exp(on_gpu(index, torch.bfloat16), head) == here
    assert (optimizers._fast_adamw([on_gpu(current), x]) is KernelAdamW) == here


def test_without_triton_there_are_none(current, monkeypatch):
    monkeypatch.setattr(kernels, "_HAS_TRITON", False)
    assert not kernels.launches_for(on_gpu(current))


def test_a_compiler_treats_the_answer_as_a_constant(current):
    torch._dynamo.reset()  # it would not ask again

    def shift(x):
        return x + 1 if kernels.is_current(1) else x - 1

    got = torch.compile(shift, fullgraph=True, backend="eager")(torch.zeros(2))
    assert got.tolist() == [1.0 if current == 1 else -1.0] * 2
