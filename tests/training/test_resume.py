"""A run that is stopped, in whatever way, goes on as if it had not been."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from checkpoint.ranks import cut_all, with_ranks
from scratchlm.checkpoint import (
    TRAINING_STATE,
    checkpoint_path,
    find_checkpoints,
    newest_valid,
    read_config,
    read_manifest,
    read_tensors,
    step_of,
    verify_checkpoint,
    write_sharded,
)
from scratchlm.config import MoE
from scratchlm.errors import ScratchLMError
from scratchlm.training import Run, TrainConfig, Watcher, hold_run, read_metrics
from training.tiny import (
    MODEL,
    SETTINGS,
    assert_same_state,
    log_of,
    make_learner,
    run_training,
    write_data,
)

VARIANTS = {
    "adamw": (SETTINGS, MODEL),
    "written out": (replace(SETTINGS, fast_optimizer=False), MODEL),
    "moment in bfloat16": (replace(SETTINGS, moment="bf16"), MODEL),
    "muon": (replace(SETTINGS, optimizer="muon"), MODEL),
    "average, micro-batches": (replace(SETTINGS, ema=0.9, micro_batch_size=3), MODEL),
    "experts, wsd": (replace(SETTINGS, schedule="wsd"), MODEL.replace(ffn=MoE(4, 2))),
    "not accelerated": (replace(SETTINGS, accelerate=False), MODEL),
    "shares": (replace(SETTINGS, shares=2), MODEL),
    "tied": (SETTINGS, MODEL.replace(tie_embeddings=True)),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


class StopAt(Watcher):
    """Ask for a stop after some steps, as Ctrl-C does."""

    def __init__(self, *steps):
        self.steps, self.asked = set(steps), False

    def stepped(self, record):
        self.asked |= record["step"] in self.steps

    def __call__(self):
        return self.asked


def interrupted(directory, data, *steps, **choice):
    stop = StopAt(*steps)
    return run_training(directory, data, watchers=(stop,), should_stop=stop, **choice)


@pytest.mark.parametrize("name", VARIANTS)
def test_resume_is_bit_identical(tmp_path, data, name):
    settings, model = VARIANTS[name]
    choice = {"settings": settings, "model": model}
    ended, whole = run_training(tmp_path / "whole", data, **choice)
    assert ended == "finished"
    for stop in (1, 9, 10, 24, 59):
        assert interrupted(tmp_path / "parts", data, stop, **choice)[0] == "interrupted"
    ended, parts = run_training(tmp_path / "parts", data, **choice)
    assert ended == "finished"
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    assert_same_state(parts, whole)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_goes_on_alike_from_what_several_ranks_wrote(tmp_path, data, ranks):
    whole = run_training(tmp_path / "whole", data)[1]
    interrupted(tmp_path / "parts", data, 24)
    path = newest_valid(tmp_path / "parts")
    model, state = read_tensors(path), read_tensors(path, file=TRAINING_STATE)
    config, metadata = read_config(path), read_manifest(path)["metadata"]
    model, state = ({n: t.clone() for n, t in some.items()} for some in (model, state))
    shutil.rmtree(path)

    def write(exchange):
        pieces, more = (cut_all(some, exchange.rank, ranks) for some in (model, state))
        return write_sharded(
            path,
            exchange=exchange,
            model=pieces,
            training_state=more,
            config=config,
            metadata=metadata,
        )

    assert with_ranks(ranks, write) == [path] * ranks
    ended, parts = run_training(tmp_path / "parts", data)
    assert ended == "finished"
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    assert_same_state(parts, whole)


def test_two_runs_are_bit_identical_and_another_seed_is_not(tmp_path, data):
    _, one = run_training(tmp_path / "one", data)
    _, two = run_training(tmp_path / "two", data)
    run_training(tmp_path / "other", data, replace(SETTINGS, seed=1))
    assert_same_state(one, two)
    assert log_of(tmp_path / "one") == log_of(tmp_path / "two")
    assert log_of(tmp_path / "one") != log_of(tmp_path / "other")


def test_the_log_has_a_line_a_step_and_one_an_evaluation(tmp_path, data):
    run_training(tmp_path, data, sample=lambda model, step: [f"at {step}"])
    lines = read_metrics(tmp_path)
    steps = [line["step"] for line in lines if "loss" in line]
    evaluated = [line["step"] for line in lines if "val_loss" in line]
    samples = [line["samples"] for line in lines if "samples" in line]
    assert steps == list(range(1, 61))
    assert evaluated == list(range(0, 61, 10))
    assert samples == [[f"at {step}"] for step in evaluated]
    assert {"step", "loss", "lr", "grad_norm", "tokens", "clock"} == set(lines[2])
    clock = lines[2]["clock"]
    assert {"seconds", "tokens_per_second", "memory_bytes"} <= set(clock)
    values = [line["val_loss"] for line in lines if "val_loss" in line]
    assert values[-1] < values[0] - 0.5  # it learns
    best = [line["best"] for line in lines if "best" in line]
    assert best == [value == min(values[: i + 1]) for i, value in enumerate(values)]


def test_a_finished_run_is_left_as_it_is(tmp_path, data):
    run_training(tmp_path, data)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert run_training(tmp_path, data)[0] == "finished"
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names


def test_the_last_and_the_best_checkpoints_stay(tmp_path, data):
    # A rate that rises without end: the loss is best early.
    settings = replace(SETTINGS, lr=3.0, warmup_steps=60, keep_last=2, clip=0.0)
    run_training(tmp_path, data, settings)
    lines = [line for line in read_metrics(tmp_path) if line.get("best")]
    best = lines[-1]["step"]
    steps = [step_of(path) for path in find_checkpoints(tmp_path)]
    assert 0 < best < 50
    assert steps == sorted({best, 56, 60})
    for path in find_checkpoints(tmp_path):
        verify_checkpoint(path)


def test_where_saving_is_dear_the_best_step_is_written_with_the_last(tmp_path, data, monkeypatch):
    """Its weights are those of the best step, not of the moment it was written at."""
    settings = replace(SETTINGS, lr=3.0, warmup_steps=60, clip=0.0, save_every=0)
    run_training(tmp_path / "often", data, settings)
    saved = []
    monkeypatch.setattr(Run, "may_save", property(lambda run: False))
    watcher = Watcher()
    watcher.saved = lambda path: saved.append(step_of(path))
    run_training(tmp_path / "late", data, settings, watchers=(watcher,))
    best = read_manifest(find_checkpoints(tmp_path / "often")[-1])["metadata"]["reached"][
        "best_step"
    ]
    assert 0 < best < 60
    assert saved == [best, 60]
    for name in ("model.safetensors", "training_state.safetensors"):
        often, late = (checkpoint_path(tmp_path / run, best) / name for run in ("often", "late"))
        assert often.read_bytes() == late.read_bytes()


def test_saving_takes_its_share_of_the_time_and_no_more(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("scratchlm.training.run.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Run, "_write", lambda *_: now.__setitem__(0, now[0] + 2.0))
    monkeypatch.setattr(Run, "is_saved", False)
    run = Run(tmp_path, {})
    assert run.may_save
    assert not run.is_overdue
    run.save(make_learner())  # two seconds, of which a session of forty has one twentieth
    assert not run.may_save
    now[0] = 1039.0
    assert not run.may_save
    now[0] = 1040.0
    assert run.may_save
    assert not run.is_overdue
    now[0] = 1303.0
    assert run.is_overdue


def test_early_stop_stops_and_stays_stopped(tmp_path, data):
    settings = replace(SETTINGS, lr=0.3, warmup_steps=60, patience=2, clip=0.0)
    ended, _ = run_training(tmp_path, data, settings)
    assert ended == "early stop"
    lines = [line for line in read_metrics(tmp_path) if "best" in line]
    assert [line["best"] for line in lines][-3:] == [True, False, False]
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert run_training(tmp_path, data, settings)[0] == "early stop"
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("step", [20, SETTINGS.steps])
def test_an_interrupted_evaluation_is_repeated_on_resume(tmp_path, data, step):
    run_training(tmp_path / "whole", data)
    calls = 0

    def stop_in_the_evaluation():
        nonlocal calls
        lines = log_of(tmp_path / "parts")
        calls += bool(lines) and lines[-1]["step"] == step
        return calls > 1

    ended, _ = run_training(tmp_path / "parts", data, should_stop=stop_in_the_evaluation)
    assert ended == "interrupted"
    assert log_of(tmp_path / "parts")[-1].keys() >= {"step", "loss"}
    assert step_of(find_checkpoints(tmp_path / "parts")[-1]) == step
    assert run_training(tmp_path / "parts", data)[0] == "finished"
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")


def test_resume_falls_back_from_a_damaged_checkpoint_with_an_identical_log(tmp_path, data):
    run_training(tmp_path / "whole", data)
    interrupted(tmp_path / "parts", data, 30)
    newest = find_checkpoints(tmp_path / "parts")[-1]
    (newest / "training_state.safetensors").write_bytes(b"junk")
    warnings = []
    ended, _ = run_training(tmp_path / "parts", data, warn=warnings.append)
    assert ended == "finished"
    assert len(warnings) == 1
    assert "step-00000030/training_state.safetensors is damaged" in warnings[0]
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path, data):
    interrupted(tmp_path, data, 30)
    for path in find_checkpoints(tmp_path):
        (path / "model.safetensors").unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ScratchLMError, match="checkpoints are damaged"):
        run_training(tmp_path, data, warn=lambda message: None)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("tail", [b'{"step": 99, "lo', b"\x00\x00\x00", b'{"step": 31}'])
def test_a_truncated_last_log_line_is_dropped(tmp_path, data, tail):
    run_training(tmp_path / "whole", data)
    interrupted(tmp_path / "parts", data, 30)
    with open(tmp_path / "parts" / "metrics.jsonl", "ab") as file:
        file.write(tail)
    assert read_metrics(tmp_path / "parts")[-1]["step"] == 30
    run_training(tmp_path / "parts", data)
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")


def test_a_second_trainer_on_the_same_run_is_refused(tmp_path, data):
    with (
        hold_run(tmp_path),
        pytest.raises(ScratchLMError, match=f"another trainer .process {os.getpid()}. is at work"),
    ):
        run_training(tmp_path, data)
    run_training(tmp_path, data, replace(SETTINGS, steps=1))


def test_a_token_file_that_changed_is_refused_and_the_checkpoint_stays(tmp_path, data):
    mine = tmp_path / "data"
    shutil.copytree(data, mine)
    interrupted(tmp_path / "run", mine, 20)
    write_data(mine, seed=1)
    with pytest.raises(
        ScratchLMError, match="the train token file has changed since step-00000020"
    ):
        run_training(tmp_path / "run", mine)
    verify_checkpoint(find_checkpoints(tmp_path / "run")[-1])


def test_another_model_or_optimizer_is_refused(tmp_path, data):
    interrupted(tmp_path, data, 20)
    with pytest.raises(ScratchLMError, match="another model"):
        run_training(tmp_path, data, model=MODEL.replace(num_layers=2))
    with pytest.raises(ScratchLMError, match=r"train\.ema is 0\.5 in config\.toml and was 0\.0"):
        run_training(tmp_path, data, settings=replace(SETTINGS, ema=0.5))


def test_a_nan_leaves_the_last_checkpoint_whole_and_writes_no_line(tmp_path, data):
    class Poison(Watcher):
        def stepped(self, record):
            if record["step"] == 16:
                weight = self.learner.model.lm_head.weight
                weight.data[0, 0] = torch.nan

    poison = Poison()
    from training import tiny

    make = tiny.make_learner

    def made(*args, **options):
        poison.learner = make(*args, **options)
        return poison.learner

    tiny.make_learner = made
    try:
        with pytest.raises(ScratchLMError, match="step 17: the loss is nan; stopped before"):
            run_training(tmp_path, data, watchers=(poison,))
    finally:
        tiny.make_learner = make
    newest = find_checkpoints(tmp_path)[-1]
    assert step_of(newest) == 14
    verify_checkpoint(newest)
    assert log_of(tmp_path)[-1]["step"] == 16


def test_training_state_round_trips_through_disk_in_every_dtype(tmp_path, data):
    _, learner = run_training(tmp_path, data, replace(SETTINGS, steps=3))
    manifest = verify_checkpoint(find_checkpoints(tmp_path)[-1])
    assert manifest["metadata"]["reached"]["step"] == 3
    assert manifest["metadata"]["train"] == learner.settings.to_dict()
    assert TrainConfig.from_dict(json.loads(json.dumps(manifest["metadata"]["train"])))
