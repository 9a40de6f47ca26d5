"""Q, K, V projection and attention of one token in one kernel, on a Hopper GPU.

Nothing interprets it on a CPU; `compile_gluon.py` compiles it there.
"""

from types import SimpleNamespace

import pytest
import torch

from acceleration.gpu import on_hopper, relative_error
from scratchlm.accelerate.kernels.hopper import decode_qkv_attention as kernel
from scratchlm.ops import reference

ROPE = {None: 0, "half": 1, "interleaved": 2}
EPS = 1e-5


@pytest.mark.parametrize(
    ("max_kv_len", "keys"), [(1, 4), (128, 4), (129, 8), (256, 8), (257, 16), (1024, 32)]
)
def test_a_clusters_32_warps_take_all_keys(max_kv_len, keys):
    assert kernel.keys_per_warp(max_kv_len) == keys


def draw_layer(heads, width, capacity, dtype):
    def draw(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    angle = torch.randn(capacity, 32, device="cuda")
    w_q, w_k, w_v = (draw(heads * 64, width, scale=width**-0.5) for _ in range(3))
    return SimpleNamespace(
        x=draw(width, dtype=torch.float32),
        norm_weight=draw(width),
        w_q=w_q,
        w_k=w_k,
        w_v=w_v,
        cos=angle.cos(),
        sin=angle.sin(),
        keys=draw(heads, capacity, 64),
        values=draw(heads, capacity, 64),
    )


def run_kernel(layer, length, layout):
    heads, capacity, _ = layer.keys.shape
    width = len(layer.x)
    out = torch.empty(heads * 64, device="cuda", dtype=layer.keys.dtype)
    lengths = torch.full((1,), length, device="cuda", dtype=torch.int32)
    # Pages of 16 positions, in a random order: (page, head, position, channel).
    order = torch.randperm(capacity // 16, device="cuda")
    pages = []
    for kept in (layer.keys, layer.values):
        cut = kept.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()
        pages.append(torch.empty_like(cut).index_copy_(0, order, cut))
    tables = (None, None) if layout is None else (layer.cos, layer.sin)
    kernel.decode_qkv_attention[(heads,)](
        *(layer.x, layer.norm_weight, layer.w_q, layer.w_k, layer.w_v, *tables),
        *(*pages, lengths, order.to(torch.int32), out),
        *(width, 1 << (width - 1).bit_length(), heads, 16, kernel.keys_per_warp(capacity)),
        *(EPS, ROPE[layout], 64**-0.5, False),
        num_warps=kernel.WARPS,
        num_ctas=kernel.CTAS,
    )
    for kept, cut in zip((layer.keys, layer.values), pages, strict=True):
        kept.copy_(cut[order].transpose(0, 1).flatten(1, 2))
    return out


def by_formula(layer, length, layout):
    """Return attention's output, and the new key and value, in float64."""
    h = reference.rms_norm(layer.x.double(), layer.norm_weight.double(), EPS)
    q, k, v = ((w.double() @ h).view(-1, 1, 64) for w in (layer.w_q, layer.w_k, layer.w_v))
    if layout is not None:
        cos, sin = (table[length, None].double() for table in (layer.cos, layer.sin))
        q, k = (reference.rope(t, cos, sin, layout) for t in (q, k))
    k, v = (t.to(layer.keys.dtype).double() for t in (k, v))  # as the cache returns them
    keys, values = (
        torch.cat([cached[:, :length].double(), new], dim=1)
        for cached, new in ((layer.keys, k), (layer.values, v))
    )
    weights = (q @ keys.transpose(-1, -2) / 8).softmax(-1)
    return (weights @ values).flatten(), k[:, 0], v[:, 0]


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("length", [0, 1, 31, 200, 255, 256, 700, 1023])
@pytest.mark.parametrize("layout", ROPE)
@pytest.mark.parametrize(("heads", "width"), [(2, 128), (12, 768), (16, 1024), (3, 200)])
@torch.inference_mode()
def test_the_kernel_equals_its_formula(heads, width, layout, length):
    dtype = torch.float16 if heads == 3 else torch.bfloat16
    layer = draw_layer(heads, width, 256 if length < 256 else 1024, dtype)
    layer.keys[:, length:] = float("nan")  # not to be read
    layer.values[:, length:] = float("nan")
    expected, key, value = by_formula(layer, length, layout)
    got = run_kernel(layer, length, layout)
    assert relative_error(got, expected) < 6e-3
    assert relative_error(layer.keys[:, length], key) < 2e-3
    assert relative_error(layer.values[:, length], value) < 2e-3
    assert layer.keys[:, length + 1 :].isnan().all()
    assert layer.values[:, length + 1 :].isnan().all()
