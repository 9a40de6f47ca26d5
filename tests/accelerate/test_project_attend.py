"""Projection and attention in one kernel: who takes it, and, on a Hopper GPU, it itself.

Nothing interprets it on a CPU; `compile_gluon.py` compiles it there.
"""

import pytest
import torch

from accelerate.gpu import on_hopper, relative_error
from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels.triton.decode_tiles import (
    CLUSTER_KEYS,
    CLUSTER_WIDTH,
    MAX_CLUSTERS,
    Spread,
)
from scratchlm.config import Attention, LayerNorm, ModelConfig, NoPositions, Rotary
from scratchlm.inference.decoder import GraphDecoder
from scratchlm.model import TransformerLM, fused
from scratchlm.ops import CausalMask, reference

CUDA = torch.cuda.is_available()
PLAIN = ModelConfig(101, 2 * CLUSTER_KEYS, 128, 1, 2, 96)


def launched(config, rows=1, dtype=torch.bfloat16, capacity=64):
    """Return the kernels of a step of this model on a Hopper GPU."""
    names = []

    class Recorder(fused.FusedStep):
        def _launch(self, kernel, grid, *args, **options):
            names.append(kernel.__name__)

    model = TransformerLM(config, dtype=dtype)
    step = Recorder(model, model.new_cache(rows, capacity))
    step.clusters = True
    step.run()
    return names


def is_taken(*args, **options):
    names = launched(*args, **options)
    two = names.count("norm_project") == 2 and "attend" in names  # the other is the head
    one = names.count("norm_project") == 1 and "attend" not in names
    assert two != one
    assert ("project_attend" in names) == one
    return one


def test_one_row_of_a_plain_model_of_low_precision_takes_it():
    assert is_taken(PLAIN)
    assert is_taken(PLAIN, dtype=torch.float16)
    assert is_taken(PLAIN, capacity=CLUSTER_KEYS)
    assert is_taken(PLAIN.replace(positions=NoPositions()))
    assert is_taken(PLAIN.replace(positions=Rotary(layout="half")))
    assert is_taken(PLAIN.replace(d_model=CLUSTER_WIDTH, num_heads=16, num_kv_heads=16))


@pytest.mark.parametrize(
    "change",
    [
        {"attention": Attention(qk_norm=True)},
        {"attention": Attention(sliding_window=8)},
        {"attention": Attention(bias="qkv")},
        {"norm": LayerNorm()},
        {"num_kv_heads": 1},
        {"d_head": 32},
        {"num_heads": MAX_CLUSTERS + 1, "num_kv_heads": MAX_CLUSTERS + 1},
        {"d_model": 2 * CLUSTER_WIDTH},
    ],
    ids=str,
)
def test_models_of_other_shapes_take_two_kernels(change):
    assert not is_taken(PLAIN.replace(**{"d_head": 64, **change}))


def test_more_rows_long_rows_and_full_precision_take_two_kernels():
    assert not is_taken(PLAIN, rows=2)
    assert not is_taken(PLAIN, dtype=torch.float32)
    assert not is_taken(PLAIN, capacity=CLUSTER_KEYS + 1)


def test_no_cpu_is_taken_for_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    model = TransformerLM(PLAIN, dtype=torch.bfloat16)
    assert not fused.FusedStep(model, model.new_cache(1, 8)).clusters


# On a Hopper GPU


def by_formula(step, x, length):
    """Return the first layer's attention of x at `length`, and its key and value, in float64."""
    layer = step.layers[0]
    attn, cache = layer.attn, step.cache
    h = reference.rms_norm(x.double(), layer.ln1.weight.double(), layer.ln1.eps)
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    q, k, v = ((part.weight.double() @ h).view(-1, 1, 64) for part in projections)
    if attn.rope is not None:
        cos, sin = (table[length, None].double() for table in (attn.rope.cos, attn.rope.sin))
        q, k = (reference.rope(part, cos, sin, attn.rope.layout) for part in (q, k))
    k, v = (part.to(cache.keys.dtype).double() for part in (k, v))  # as the cache gives them back
    keys, values = (
        torch.cat([kept[0, 0, :, :length].double(), new], dim=1)[None]
        for kept, new in ((cache.keys, k), (cache.values, v))
    )
    mixed = reference.attention(q[None], keys, values, CausalMask(start=length))
    return mixed.flatten(), k[:, 0], v[:, 0]


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("length", [0, 1, 31, 200, 255, 256, 700, 1023])
@pytest.mark.parametrize("positions", [Rotary(), Rotary(layout="half"), NoPositions()], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(2, 128), (12, 768), (16, 1024), (3, 200)])
@torch.inference_mode()
def test_it_is_its_formula(heads, width, positions, length):
    config = PLAIN.replace(
        d_model=width, num_heads=heads, num_kv_heads=heads, d_head=64, positions=positions
    )
    dtype = torch.float16 if heads == 3 else torch.bfloat16
    model = TransformerLM(config, device="cuda", dtype=dtype)
    model.layers[0].ln1.weight.normal_()
    cache = model.new_cache(1, 256 if length < 256 else CLUSTER_KEYS)
    cache.keys.normal_()
    cache.values.normal_()
    cache.keys[:, :, :, length:] = float("nan")  # nobody may look there
    cache.values[:, :, :, length:] = float("nan")
    step = fused.FusedStep(model, cache)
    assert step.clusters
    assert not fused.FusedStep(model, cache, spread=Spread(16, 4, 4)).clusters  # said how
    step.lengths.fill_(length)
    step.x[0].normal_()
    layer = step.layers[0]
    expected, key, value = by_formula(step, step.x[0, 0], length)
    projections = [layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj]
    assert step._clusters_take(layer.attn, layer.ln1)
    step._project_attend(step.x[0], layer.ln1, projections, layer.attn)
    assert relative_error(step.a[0], expected) < 6e-3
    assert relative_error(cache.keys[0, 0, :, length], key) < 2e-3
    assert relative_error(cache.values[0, 0, :, length], value) < 2e-3
    assert cache.keys[:, :, :, length + 1 :].isnan().all()


@pytest.mark.cuda
@on_hopper
@torch.inference_mode()
def test_recorded_steps_are_those_of_two_kernels(monkeypatch):
    """Over the border between short rows and long ones, early starts and all."""
    config = PLAIN.replace(d_model=1024, num_heads=16, num_kv_heads=16, num_layers=3)
    model = TransformerLM(config, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(config.vocab_size, (1, 262), device="cuda")
    found = []
    for is_one in (True, False):
        if not is_one:
            monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
        cache = model.new_cache(1, 300)
        model.hidden(ids[:, :252], cache=cache)
        decoder = GraphDecoder(model, cache)
        assert decoder.fused.clusters == is_one
        logits = torch.cat([decoder.step(ids[:, i]).clone() for i in range(252, 262)])
        found.append((logits, cache.keys[:, :, :, :262], cache.values[:, :, :, :262]))
    for got, expected in zip(*found, strict=True):
        assert relative_error(got, expected) < 6e-3
