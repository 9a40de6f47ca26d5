"""What a run goes on with is what it was begun with, or is refused by name."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from rewriting import rewrite
from scratchlm.checkpoint import find_checkpoints, step_of
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer import load_tokenizer, train_bpe
from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.training import (
    DataFiles,
    Plan,
    Run,
    TrainConfig,
    read_metrics,
    read_plan,
    run_plan,
    write_report,
)
from scratchlm.training.plan import write_plan
from scratchlm.training.run import WRITTEN, hold_run
from scratchlm.training.settings import CHANGEABLE
from training.tiny import MODEL, SETTINGS, log_of, run_training, write_data

TEXT = "the cat sat on the mat and the dog sat on the log. " * 60
SHORT = TrainConfig(steps=4, batch_size=2, eval_every=2, save_every=2, lr=3e-3, keep_last=1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare a text with a tokenizer of its own."""
    from scratchlm.data import prepare

    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text.txt").write_text(TEXT)
    vocab, merges = train_bpe(folder / "text.txt", 270, ["<|endoftext|>"])
    prepare([folder / "text.txt"], Tokenizer(vocab, merges, ["<|endoftext|>"]), folder / "data")
    return folder / "data"


@pytest.fixture
def plan(prepared, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    files = DataFiles(data / "train.bin", data / "val.bin", data / "tokenizer.json")
    return Plan(MODEL.replace(vocab_size=270), SHORT, files)


def permute_ids(file):
    """Exchange the ids of two tokens: still a tokenizer, another one."""
    table = json.loads(file.read_text())
    vocab = table["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(table, ensure_ascii=False))
    load_tokenizer(file)


# Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 1e-3),
        ("seed", 1),
        ("batch_size", 3),
        ("optimizer", "muon"),
        ("weight_decay", 0.0),
        ("clip", 0.5),
        ("steps", 6),
        ("keep_last", 2),
    ],
)
def test_a_setting_changed_by_hand_is_refused_by_name(tmp_path, plan, name, value):
    run = tmp_path / "run"
    run_plan(run, plan)
    before = (run / "metrics.jsonl").read_bytes()
    changed = read_plan(run)
    then = getattr(changed.train, name)
    changed = replace(changed, train=replace(changed.train, **{name: value}))
    write_plan(run, changed)
    with pytest.raises(ScratchLMError, match=rf"train\.{name} is {value!r} .* was {then!r}"):
        run_plan(run, read_plan(run), resume=True)
    assert (run / "metrics.jsonl").read_bytes() == before
    if name in CHANGEABLE:  # asked for, it is taken
        run_plan(run, replace(changed, changed=frozenset({(name, value)})), resume=True)
        run_plan(run, read_plan(run), resume=True)  # and remembered


def test_every_flipped_bit_of_a_runs_settings_is_seen(tmp_path, plan):
    """Each bit of config.toml's [train] table: refused, or it changes nothing."""
    run = tmp_path / "run"
    run_plan(run, plan)
    good, text = read_plan(run), (run / "config.toml").read_bytes()
    check, silent, tried = Run(run, {})._check_settings, 0, 0
    for at in range(text.index(b"[train]"), text.index(b"[data]"), 1):
        for bit in (0, 1, 4):
            tried += 1
            flipped = bytearray(text)
            flipped[at] ^= 1 << bit
            rewrite(run / "config.toml", flipped)
            try:
                found = read_plan(run)
            except ScratchLMError:
                continue
            if found == good:
                continue
            try:
                check(find_checkpoints(run)[-1], good.train.to_dict(), found.train.to_dict())
                silent += 1
            except ScratchLMError:
                continue
    assert tried > 1000
    assert silent == 0


# The tokenizer


def test_training_refuses_a_folder_prepared_with_another_tokenizer(tmp_path, plan):
    permute_ids(plan.data.tokenizer)
    with pytest.raises(ScratchLMError, match=r"another tokenizer than .*tokenizer\.json"):
        run_plan(tmp_path / "run", plan)
    assert not (tmp_path / "run" / "config.toml").exists()  # no run is left behind


def test_a_tokenizer_whose_ids_were_permuted_is_refused_on_resume(tmp_path, plan):
    run = tmp_path / "run"
    run_plan(run, plan)
    permute_ids(plan.data.tokenizer)
    with pytest.raises(ScratchLMError, match=r"another tokenizer than .*tokenizer\.json"):
        run_plan(run, read_plan(run), resume=True)


def test_a_tokenizer_that_vanishes_in_mid_run_is_in_every_checkpoint(tmp_path, plan):
    whole = plan.data.tokenizer.read_bytes()
    run = tmp_path / "run"
    run_plan(run, plan, on_begin=lambda *_: plan.data.tokenizer.unlink())
    newest = find_checkpoints(run)[-1]
    assert step_of(newest) == 4
    assert (newest / "tokenizer.json").read_bytes() == whole
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        run_plan(run, read_plan(run), resume=True)


# Checkpoints


def test_one_checkpoint_too_many_is_removed_on_resume(tmp_path, monkeypatch):
    """Killed between the last save and the pruning, as if."""
    from scratchlm.training import run as runs

    data = write_data(tmp_path / "data")
    settings = replace(SETTINGS, steps=14, save_every=7, keep_last=1, eval_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "prune_checkpoints", lambda *_: [])
        run_training(tmp_path / "run", data, settings)
    assert len(find_checkpoints(tmp_path / "run")) == 2
    run_training(tmp_path / "run", data, settings)
    assert [step_of(path) for path in find_checkpoints(tmp_path / "run")] == [14]


def test_a_linked_checkpoint_is_named_and_what_it_leads_to_stays(tmp_path):
    data = write_data(tmp_path / "data")
    settings = replace(SETTINGS, steps=7, save_every=7, keep_last=1, eval_every=0)
    run = tmp_path / "run"
    run_training(run, data, settings)
    [path] = find_checkpoints(run)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ScratchLMError, match="step-00000007 is a link"):
        run_training(run, data, settings)
    assert len(os.listdir(tmp_path / "elsewhere")) == 4


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_a_runs_folder_is_named_and_what_it_leads_to_stays(tmp_path, name):
    """A run from elsewhere with `metrics.jsonl` a link to a file of the user's: it was replaced."""
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    settings = replace(SETTINGS, steps=2, eval_every=0)
    run_training(run, data, settings)
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine)
    with pytest.raises(ScratchLMError, match=f"{name} is a link"):
        run_training(run, data, settings)
    assert mine.read_text() == "precious"


def test_a_lock_that_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ScratchLMError, match=r"\.lock: not a regular file"), hold_run(tmp_path):
        pass


# The log


def test_a_log_of_holes_is_refused_by_its_first_line(tmp_path):
    """A terabyte without a line's end would be read to its end."""
    (tmp_path / "metrics.jsonl").touch()
    os.truncate(tmp_path / "metrics.jsonl", 1 << 40)
    with pytest.raises(ScratchLMError, match=r"metrics\.jsonl: line 1: must be shorter than"):
        read_metrics(tmp_path)


GARBAGE = {
    "bytes": b"\x00\xff garbage\n",
    "step of text": b'{"step": "abc", "loss": 1.0}\n',
    "no lr": b'{"step": 9, "loss": 1.0, "tokens": 3, "clock": {}}\n',
    "deep": b'{"step":' + b"[" * 50_000 + b"\n",
    "a list": b"[]\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_in_the_middle_of_the_log_is_set_aside_and_the_good_lines_stay(tmp_path, name):
    data = write_data(tmp_path / "data")
    settings = replace(SETTINGS, steps=30, eval_every=0, save_every=10)
    run = tmp_path / "run"
    run_training(tmp_path / "whole", data, settings)
    run_training(run, data, settings)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:5], GARBAGE[name], *lines[5:]]))
    with pytest.raises(ScratchLMError, match=r"metrics\.jsonl: line 6: ") as caught:
        read_metrics(run)
    assert len(str(caught.value)) < 300
    warnings = []
    run_training(run, data, settings, warn=warnings.append)
    assert log_of(run) == log_of(tmp_path / "whole")  # 25 lines were lost here
    assert (run / "metrics.damaged").read_bytes() == GARBAGE[name]
    assert len(warnings) == 1
    assert "line 6" in warnings[0]
    assert "metrics.damaged" in warnings[0]


def test_a_log_damaged_in_mid_run_is_named_by_the_report(tmp_path, plan):
    run = tmp_path / "run"
    run_plan(run, plan)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": "abc"}\n')
    with pytest.raises(ScratchLMError, match="step must be a whole number"):
        write_report(run)
