"""The product that writes exponentials: who takes it, and, on a Hopper GPU, it itself.

Nothing interprets it on a CPU: `test_linear_cross_entropy.py` has a formula in its place.
"""

from types import SimpleNamespace

import pytest
import torch

from accelerate.gpu import heard, loss_and_gradients, on_hopper, relative_error
from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels.hopper import lm_head_exp as exp_product
from scratchlm.config import ModelConfig
from scratchlm.model import TransformerLM

CUDA = torch.cuda.is_available()


def test_it_is_for_bfloat16_and_enough_tiles_on_a_hopper_gpu(monkeypatch):
    gpu = {"is hopper": True}
    monkeypatch.setattr(hopper, "is_hopper", lambda device: gpu["is hopper"])

    def takes(rows, d, columns, dtype=torch.bfloat16, cuda=True):
        shape, device = torch.Size((rows, d)), SimpleNamespace(index=0)
        x = SimpleNamespace(shape=shape, dtype=dtype, is_cuda=cuda, device=device)
        return hopper.takes_head(x, torch.empty(columns, d, dtype=dtype, device="meta"))

    assert takes(2048, 64, 50_304)
    assert takes(2050, 104, 50_264)  # of any length: what lies past an edge is cut off
    assert not takes(2048, 64, 1024)
    assert not takes(16, 64, 50_304)
    assert not takes(2048, 60, 50_304)
    assert not takes(2048, 64, 50_257)
    assert not takes(2048, 64, 50_304, dtype=torch.float32)
    assert not takes(2048, 64, 50_304, cuda=False)
    gpu["is hopper"] = False
    assert not takes(2048, 64, 50_304)


# On a Hopper GPU


SIZES = [(128, 64, 128), (640, 320, 200), (1000, 104, 328), (4096, 768, 2304)]


def draw(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize(("rows", "d", "columns"), SIZES)
def test_the_exponentials_are_their_formula(rows, d, columns, programs):
    x, w = draw(rows, d), draw(columns, d, scale=d**-0.5)
    references = torch.randn(rows, device="cuda")
    references[0] = -100  # everything in this row is cut off
    x[1] = float("nan")
    vocab = columns - 3
    out = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    sums = exp_product.exp_product(x, w, references, vocab, out, programs)
    power = (x.double() @ w.double().t() - references.double()[:, None]).clamp(max=exp_product.CAP)
    e = power.exp()
    e[:, vocab:] = 0
    assert (out[:, vocab:] == 0).all()
    assert out[1, :vocab].isnan().all()
    assert sums[:, 1].isnan().any()
    assert relative_error(out[0], e[0]) < 4e-3
    assert relative_error(out[2:], e[2:]) < 4e-3
    assert relative_error(sums.sum(dim=0)[2:], e.sum(dim=1)[2:]) < 1e-4
    again = torch.empty_like(out)
    for _ in range(3):  # a race would show
        exp_product.exp_product(x, w, references, vocab, again, programs)
        assert torch.equal(again[2:], out[2:])


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("scale", [1.0, 30.0])  # at 30, most rows are formed again
def test_a_model_learns_by_it_as_it_does_without(monkeypatch, scale):
    monkeypatch.setattr(hopper, "LEAST", 128 * 128)
    model = TransformerLM(ModelConfig(1001, 256, 128, 2, 2, 200)).cuda()
    model.ln_final.weight.data.mul_(scale)
    ids = torch.randint(1001, (4, 256), device="cuda")
    called = heard(monkeypatch, exp_product, "exp_product")
    ours = loss_and_gradients(model, ids)
    assert called
    called.clear()
    monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
    for got, expected in zip(ours, loss_and_gradients(model, ids), strict=True):
        assert relative_error(got, expected) < 3e-2
    assert not called
