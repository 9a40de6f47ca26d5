"""Ranks compute what one process computes, and checkpoints do not care how many there are."""

import json

import pytest

from parallel.launching import launch
from training.tiny import log_of, run_training, write_data

TOLERANCE = 2e-6  # of a loss near 4.8: a few units in the last place of float32
BIT_EQUAL = "zero1, 2"  # two ranks are two micro-batches


def check_curves(found, tolerance):
    alone = {}
    for path in found.glob("alone-*.json"):
        alone |= json.loads(path.read_text())
    together = json.loads((found / "together.json").read_text())
    assert alone.keys() == together.keys()
    assert sum(name.startswith(BIT_EQUAL) for name in alone) > 3
    for name, expected in alone.items():
        for (loss, norm), (ours, our_norm) in zip(expected, together[name], strict=True):
            assert ours == pytest.approx(loss, abs=tolerance), name
            assert our_norm == pytest.approx(norm, abs=tolerance), name
        if name.startswith(BIT_EQUAL) and "micro" not in name:
            assert together[name] == expected, name


def test_ranks_train_as_one_process_does(tmp_path):
    launch(4, "curves", tmp_path, worlds=10)
    check_curves(tmp_path, TOLERANCE)


@pytest.mark.slow
def test_curves_stay_together_over_fifty_steps(tmp_path):
    launch(8, "long-curves", tmp_path, worlds=10, timeout=1800)
    check_curves(tmp_path, 1e-4)


def test_precision_faults_and_generation_of_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    launch(2, "small", tmp_path, worlds=10)
    precision, faults, generation = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("precision", "faults", "generation")
    )
    for alone, together, _, updated in precision.values():
        assert all(abs(a[0] - b[0]) < 2e-3 for a, b in zip(alone, together, strict=True))
        assert updated == ["torch.float32"]
    low = {name for name, dtype in precision["zero1"][2].items() if dtype == "torch.bfloat16"}
    assert {"layers.0.attn.q_proj.weight", "lm_head.weight"} <= low
    assert not any("embeddings" in name or "ln" in name for name in low)

    assert "the loss of rank 1 is not finite" in faults["not finite"]
    assert faults["heads"] == "train.tp=2 must divide model.num_kv_heads=1"
    assert "train.ema does not go with several ranks" in faults["ema"]
    assert "train.optimizer=muon needs whole matrices" in faults["muon"]
    assert "width" not in faults  # 37 is cut into 18 and 19

    for expected, *answers in generation.values():
        assert answers == [expected, expected]


def check_resumes(found, whole):
    """State by hash where nothing was computed between; then the same log."""
    for name, (before, after, log) in found.items():
        assert after == before, name
        steps = [line["step"] for line in log if "loss" in line]
        assert steps == list(range(1, 9)), name  # no step twice, none left out
        for line, expected in zip(log, whole, strict=True):
            for key, value in expected.items():
                assert line[key] == pytest.approx(value, rel=1e-5), (name, line["step"], key)


@pytest.mark.parametrize(
    ("work", "ranks"),
    [("few-resumes", 3), pytest.param("resumes", 4, marks=pytest.mark.slow)],
)
def test_a_run_saved_by_n_ranks_goes_on_with_m(tmp_path, work, ranks):
    from parallel.saved import SAVED

    data = write_data(tmp_path / "data")
    run_training(tmp_path / "whole", data, SAVED)
    launch(ranks, work, tmp_path, worlds=60, timeout=1800)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == (2 if work == "few-resumes" else 24)
    check_resumes(found, log_of(tmp_path / "whole"))
