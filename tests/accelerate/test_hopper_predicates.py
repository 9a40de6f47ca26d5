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


def given(*shape, cuda=True, **more):
    size, device = torch.Size(shape), SimpleNamespace(index=0)
    return SimpleNamespace(shape=size, is_cuda=cuda, device=device, numel=size.numel, **more)


def test_swiglu_is_for_bfloat16_and_whole_tiles_on_a_hopper_gpu(gpu):
    def takes(*shape, d_ff=200, dtype=torch.bfloat16, cuda=True):
        return hopper.takes_gate(given(*shape, cuda=cuda), torch.empty(shape[-1], d_ff), dtype)

    assert takes(128, 64)
    assert takes(2, 64, 128)
    assert not takes(127, 64)
    assert not takes(0, 64)
    assert not takes(128, 96)
    assert not takes(128, 64, d_ff=204)
    assert not takes(128, 64, dtype=torch.float16)
    assert not takes(128, 64, cuda=False)
    gpu["is hopper"] = False
    assert not takes(128, 64)


def test_qkv_rope_is_for_bfloat16_heads_of_64_and_whole_tiles_on_a_hopper_gpu(gpu):
    assert hopper.takes_tables(given(128, 32))
    assert hopper.takes_tables(given(2, 1, 64, 32))
    assert not hopper.takes_tables(given(64, 32))
    assert not hopper.takes_tables(given(0, 32))
    assert not hopper.takes_tables(given(128, 64))
    assert not hopper.takes_tables(given(128, 32, cuda=False))
    gpu["is hopper"] = False
    assert not hopper.takes_tables(given(128, 32))
    x = torch.empty(2, 64, 128)
    assert hopper.takes_heads(x, torch.bfloat16)
    assert not hopper.takes_heads(x, torch.float16)
    assert not hopper.takes_heads(x[:, :63], torch.bfloat16)
    assert not hopper.takes_heads(x[:0], torch.bfloat16)
    assert not hopper.takes_heads(x[..., :96], torch.bfloat16)


def test_attention_is_for_whole_blocks_and_heads_that_occupy_the_gpu(monkeypatch):
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    deterministic = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: bool(deterministic))

    def takes(batch, seq, heads, kv_heads=None):
        x = given(batch, seq, 64 * heads)
        return hopper.takes_attention(x, (heads, heads if kv_heads is None else kv_heads))

    assert takes(32, 1024, 12)
    assert takes(8, 1024, 25)  # 200 of 264
    assert takes(8, 1024, 13)  # 104 of 132
    assert not takes(8, 1024, 12)  # 96
    assert not takes(9, 1024, 15)  # 135 of 264
    assert not takes(32, 1000, 12)
    assert takes(32, 2048, 12)
    assert not takes(32, 3072, 12)
    assert takes(1, 4096, 9)  # 288 blocks of keys, for 264
    assert not takes(1, 4096, 8)
    assert takes(1, 16384, 16)
    assert not takes(1, 16448, 16)
    deterministic.append(True)
    assert takes(32, 1024, 12)
    assert not takes(1, 16384, 16)


def test_the_lm_head_is_for_bfloat16_and_enough_tiles_on_a_hopper_gpu(gpu):
    def takes(rows, d, columns, dtype=torch.bfloat16, cuda=True):
        x = given(rows, d, cuda=cuda, dtype=dtype)
        return hopper.takes_head(x, torch.empty(columns, d, dtype=dtype, device="meta"))

    assert takes(2048, 64, 50_304)
    assert takes(2050, 104, 50_264)  # of any length: what lies outside a matrix is dropped
    assert not takes(2048, 64, 1024)
    assert not takes(16, 64, 50_304)
    assert not takes(2048, 60, 50_304)
    assert not takes(2048, 64, 50_257)
    assert not takes(2048, 64, 50_304, dtype=torch.float32)
    assert not takes(2048, 64, 50_304, cuda=False)
    gpu["is hopper"] = False
    assert not takes(2048, 64, 50_304)
