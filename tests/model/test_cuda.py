"""What only a GPU can show: wrong ids do not fault, nothing waits for the device, parity."""

import pytest
import torch

from tiny_models import FAMILIES, build, ids

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_wrong_ids_and_targets_give_nan_and_leave_the_device_usable():
    model = build(FAMILIES["plain"], dtype=torch.float32).cuda()
    wrong = torch.tensor([[3, 29, 4], [1, 2, 3]], device="cuda")
    logits = model(wrong)
    assert logits[0, 1:].isnan().all()
    assert logits[1].isfinite().all()
    assert model.loss(wrong.clamp(max=28), wrong).isnan()
    assert model(ids(1, 5).cuda()).isfinite().all()  # the device still answers


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_a_training_step_never_waits_for_the_device(family):
    model = build(FAMILIES[family], dtype=torch.float32).cuda()
    tokens = ids(2, 8).cuda()
    model.loss(tokens, tokens).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # from here on, whatever waits raises
    try:
        model.loss(tokens, tokens).backward()
        cache = model.new_cache(2)
        with torch.no_grad():
            model(tokens[:, :3], cache=cache)
            model(tokens[:, 3:4], cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_the_gpu_equals_itself_on_the_cpu(family):
    model, tokens = build(FAMILIES[family]), ids(2, 9)
    expected = model(tokens)
    got = model.cuda()(tokens.cuda()).cpu()
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)  # float32 tables of positions
