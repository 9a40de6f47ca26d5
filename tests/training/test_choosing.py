"""Good defaults, and the settings a person may write."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from scratchlm import ModelConfig
from scratchlm.accounting import Setup, count_parameters, memory
from scratchlm.cli.starting import fine_tuning_settings
from scratchlm.config import preset
from scratchlm.errors import ScratchLMError
from scratchlm.training import (
    DataFiles,
    Plan,
    TrainConfig,
    read_plan,
    throughput,
    watch_signals,
    write_plan,
)
from scratchlm.training.ablations import ABLATIONS, ablate, is_ablated
from scratchlm.training.choosing import (
    Machine,
    choose_model,
    choose_settings,
    choose_vocab_size,
    fit_in_memory,
    model_of_size,
)
from scratchlm.training.settings import merge, parse_count, parse_overrides

LAPTOP, GPU = Machine(1e11), Machine(7.8e14, is_gpu=True, memory_bytes=139 * 2**30)


@pytest.mark.parametrize("params", [200_000, 1_000_000, 10_000_000, 124_000_000, 1_500_000_000])
def test_a_model_of_a_size_has_that_size(params):
    model = model_of_size(params, vocab_size=1_000, context_length=256)
    assert count_parameters(model).unique == pytest.approx(params, rel=0.12)


def test_a_size_that_the_vocabulary_alone_exceeds_is_refused():
    with pytest.raises(ValueError, match="no model of about 100,000 parameters with vocab_size=50"):
        model_of_size(100_000, vocab_size=50_257, context_length=256)


@pytest.mark.parametrize("machine", [LAPTOP, GPU])
@pytest.mark.parametrize("tokens", [200, 20_000, 300_000, 10_000_000, 10_000_000_000])
def test_chosen_defaults_fit_the_time_budget(machine, tokens):
    vocab = choose_vocab_size(4 * tokens, machine)
    model = choose_model(tokens, vocab, machine)
    settings = choose_settings(model, tokens, machine)
    assert tokens > model.context_length
    assert settings.steps >= 100
    from scratchlm.accounting import training_flops_per_token

    flops = float(training_flops_per_token(model, model.context_length))
    seconds = flops * settings.tokens_per_step(model) * settings.steps / machine.matmul_rate
    assert seconds < machine.budget_seconds
    more = choose_model(tokens * 10, vocab, machine)
    assert count_parameters(more).unique >= count_parameters(model).unique * 0.99


def test_a_batch_too_large_for_memory_is_split_into_micro_batches():
    model = preset("cs336-gpt2-xl")
    small = replace(GPU, memory_bytes=80 * 2**30)
    settings = fit_in_memory(model, TrainConfig(batch_size=64), small)
    rows = settings.micro_batch_size
    assert 1 <= rows < 64
    setup = Setup(phase="training", batch=rows, accumulate=True)
    assert memory(model, setup).training.value <= 0.85 * small.memory_bytes
    assert fit_in_memory(model, TrainConfig(batch_size=1), LAPTOP).micro_batch_size is None


def test_every_ablation_changes_the_model_and_none_twice():
    base = ModelConfig(vocab_size=99, context_length=16, d_model=64, num_layers=2, num_heads=2)
    for name in ABLATIONS:
        changed = ablate(base, name)
        assert changed != base
        assert is_ablated(changed, name)
        assert not is_ablated(base, name)
        with pytest.raises(ValueError, match=r"(changes nothing|needs a SwiGLU feed-forward)"):
            ablate(changed, name)
    counts = [count_parameters(model).unique for model in (base, ablate(base, "silu"))]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("text", "count"),
    [("10M", 10_000_000), ("1.5B", 1_500_000_000), ("300k", 300_000), ("5_000", 5_000), ("7", 7)],
)
def test_counts_with_suffixes_are_parsed(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "ten", "-3M", "0", "inf", "nan", "1e999"])
def test_invalid_counts_are_refused(text):
    with pytest.raises(ValueError, match="expected a count such as 10M"):
        parse_count(text)


def test_overrides_become_nested_values():
    texts = [
        *("model.d_model=256", "train.lr=1e-3", "model.ffn.type=moe", "train.betas=[0.9, 0.95]"),
        *('data.train = "a b.bin"', "train.schedule=wsd", "train.document_mask=true"),
    ]
    assert parse_overrides(texts) == {
        "model": {"d_model": 256, "ffn": {"type": "moe"}},
        "train": {"lr": 1e-3, "betas": [0.9, 0.95], "schedule": "wsd", "document_mask": True},
        "data": {"train": "a b.bin"},
    }
    with pytest.raises(ValueError, match="goes into 'ffn', which another override has set"):
        parse_overrides(["model.ffn=3", "model.ffn.type=moe"])
    base = {"ffn": {"type": "swiglu", "bias": True}, "d": 1}
    assert merge(base, {"ffn": {"bias": False}})["ffn"] == {"type": "swiglu", "bias": False}
    assert merge(base, {"ffn": {"type": "mlp"}})["ffn"] == {"type": "mlp"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be >= 1; got steps=0"),
        ({"steps": 1.5}, "steps must be a whole number; got steps=1.5"),
        ({"steps": True}, "steps must be a whole number"),
        ({"lr": -1}, "lr must be finite and >= 0; got lr=-1"),
        ({"lr": float("nan")}, "lr must be finite"),
        ({"ema": 1.0}, r"ema must be in \[0, 1\); got ema=1.0"),
        ({"betas": (0.9, 1)}, r"betas must be in \[0, 1\)"),
        ({"min_lr": 1.0}, "min_lr must not exceed lr"),
        ({"warmup_steps": 2_000}, "warmup_steps must not exceed steps"),
        ({"precision": "int8"}, "precision must be one of fp32, bf16-mixed, .*; got 'int8'"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, muon"),
        ({"document_mask": 1}, "document_mask must be true or false"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        TrainConfig(**change)


def test_a_plan_round_trips_through_its_file(tmp_path):
    model = preset("qwen3-0.6b")
    data = DataFiles(tmp_path / "data/train.bin", tmp_path.parent / "val.bin")
    plan = Plan(model, TrainConfig(lr=0.1 + 0.2).resolved("cpu"), data)
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan
    text = (tmp_path / "config.toml").read_text()
    assert 'train = "data/train.bin"' in text
    for damaged, message in (
        ("", r"no \[model\] table"),
        ("[model", "config.toml: "),
        (text.replace("lr = ", "lr_ = "), "unknown config key: train.lr_"),
        (text.replace('train = "data', 'trian = "data'), "unknown config key: data.trian"),
    ):
        (tmp_path / "config.toml").write_text(damaged)
        with pytest.raises(ScratchLMError, match=message):
            read_plan(tmp_path)


def test_signals_are_left_alone_outside_the_main_thread():
    seen = []

    def work():
        with watch_signals() as stop:
            seen.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_the_matmul_rate_counts_the_time_threads_ran_not_what_others_took(monkeypatch):
    passed, ran = itertools.count(step=0.15), itertools.count(step=0.5)
    clocks = SimpleNamespace(perf_counter=lambda: next(passed), process_time=lambda: next(ran))
    monkeypatch.setattr(throughput, "time", clocks)
    rate = throughput.measure_matmul_rate(torch.device("cpu"), "fp32")
    assert rate == 3 * 2 * 1024**3 / 0.5 * torch.get_num_threads()


def test_a_model_of_long_context_is_trained_on_from_in_rows_of_1024():
    """A row of a whole context is one step of many minutes on a CPU, and of 50 GB on a GPU."""
    machine = Machine(1e11)
    model = preset("llama3.2-1b")
    found = fine_tuning_settings(model, 300_000, machine)
    assert (found.row_length, found.batch_size) == (1024, 4)
    assert fine_tuning_settings(model, 300_000, machine, 4096).row_length == 4096
    assert fine_tuning_settings(preset("gpt2"), 300_000, machine).row_length is None
