"""Which inputs the Hopper kernels are for."""

from types import SimpleNamespace

import pytest
import torch

from scratchlm.accelerate import hopper


@pytest.fixture
def gpu(monkeypatch):
    gpu = {"is hopper": True}
    monkeypatch.setattr(hopper, "is_hopper", lambda device: gpu["is hopper"])
    return gpu


def fake_tensor(*shape, cuda=True, **more):
    size, device = torch.Size(shape), SimpleNamespace(index=0)
    return SimpleNamespace(shape=size, is_cuda=cuda, device=device, numel=size.numel, **more)


def test_swiglu_is_for_bfloat16_and_whole_tiles_on_a_hopper_gpu(gpu):
    def supports(*shape, d_ff=200, dtype=torch.bfloat16, cuda=True):
        w2 = torch.empty(shape[-1], d_ff)
        return hopper.why_no_swiglu(fake_tensor(*shape, cuda=cuda), w2, dtype) is None

    assert supports(128, 64)
    assert supports(2, 64, 128)
    assert not supports(127, 64)
    assert not supports(0, 64)
    assert not supports(128, 96)
    assert not supports(128, 64, d_ff=204)
    assert not supports(128, 64, dtype=torch.float16)
    assert not supports(128, 64, cuda=False)
    gpu["is hopper"] = False
    assert not supports(128, 64)


def test_qkv_rope_is_for_bfloat16_heads_of_64_and_whole_tiles_on_a_hopper_gpu(gpu):
    assert hopper.supports_rope_tables(fake_tensor(128, 32))
    assert hopper.supports_rope_tables(fake_tensor(2, 1, 64, 32))
    assert not hopper.supports_rope_tables(fake_tensor(64, 32))
    assert not hopper.supports_rope_tables(fake_tensor(0, 32))
    assert not hopper.supports_rope_tables(fake_tensor(128, 64))
    assert not hopper.supports_rope_tables(fake_tensor(128, 32, cuda=False))

    def supports(*shape, dtype=torch.bfloat16, cuda=True):
        return hopper.why_no_qkv_rope(fake_tensor(*shape, cuda=cuda), dtype) is None

    assert supports(2, 64, 128)
    assert not supports(2, 64, 128, dtype=torch.float16)
    assert not supports(2, 63, 128)
    assert not supports(0, 64, 128)
    assert not supports(2, 64, 96)
    assert not supports(2, 64, 128, cuda=False)
    gpu["is hopper"] = False
    assert not hopper.supports_rope_tables(fake_tensor(128, 32))
    assert not supports(2, 64, 128)


def test_attention_is_for_whole_blocks_and_heads_that_occupy_the_gpu(monkeypatch):
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    deterministic = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: bool(deterministic))

    def supports(batch, seq, heads):
        x = fake_tensor(batch, seq, 64 * heads)
        return hopper.why_no_attention(x, (heads, heads)) is None

    assert supports(32, 1024, 12)
    assert supports(8, 1024, 25)  # 200 of 264
    assert supports(8, 1024, 13)  # 104 of 132
    assert not supports(8, 1024, 12)  # 96
    assert not supports(9, 1024, 15)  # 135 of 264
    assert not supports(32, 1000, 12)
    assert supports(32, 2048, 12)
    assert not supports(32, 3072, 12)
    assert supports(1, 4096, 9)  # 288 blocks of keys, for 264
    assert not supports(1, 4096, 8)
    assert supports(1, 16384, 16)
    assert not supports(1, 16448, 16)
    deterministic.append(True)
    assert supports(32, 1024, 12)
    assert not supports(1, 16384, 16)
    monkeypatch.setattr(hopper, "_cudnn_is_enabled", lambda: False)
    assert not supports(32, 1024, 12)


def test_the_lm_head_is_for_bfloat16_and_enough_tiles_on_a_hopper_gpu(gpu):
    def supports(rows, d, columns, dtype=torch.bfloat16, cuda=True):
        x = fake_tensor(rows, d, cuda=cuda, dtype=dtype)
        return hopper.supports_lm_head_exp(x, torch.empty(columns, d, dtype=dtype, device="meta"))

    assert supports(2048, 64, 50_304)
    assert supports(2050, 104, 50_264)  # of any length: what lies outside a matrix is dropped
    assert not supports(2048, 64, 1024)
    assert not supports(16, 64, 50_304)
    assert not supports(2048, 60, 50_304)
    assert not supports(2048, 64, 50_257)
    assert not supports(2048, 64, 50_304, dtype=torch.float32)
    assert not supports(2048, 64, 50_304, cuda=False)
    gpu["is hopper"] = False
    assert not supports(2048, 64, 50_304)
