"""The LM head's GEMM with a fused exponential, on a Hopper GPU.

Nothing interprets it on a CPU: `compile_gluon.py` compiles it there, and in
`test_lm_head_loss.py` a formula stands in.
"""

import pytest
import torch

from acceleration.gpu import on_hopper, relative_error
from scratchlm.accelerate.kernels.hopper.lm_head_exp import CAP, lm_head_exp

SIZES = [(128, 64, 128), (640, 320, 200), (1000, 104, 328), (4096, 768, 2304)]


def draw(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize(("rows", "d", "columns"), SIZES)
def test_exponentials_and_sums_equal_their_formula(rows, d, columns, programs):
    x, w = draw(rows, d), draw(columns, d, scale=d**-0.5)
    references = torch.randn(rows, device="cuda")
    references[0] = -100  # everything in this row is clamped
    x[1] = float("nan")
    vocab = columns - 3
    out = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    sums = lm_head_exp(x, w, references, vocab, out, programs)
    power = (x.double() @ w.double().t() - references.double()[:, None]).clamp(max=CAP)
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
        lm_head_exp(x, w, references, vocab, again, programs)
        assert torch.equal(again[2:], out[2:])
