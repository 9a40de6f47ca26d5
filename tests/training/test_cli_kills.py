"""The real command, with real signals: what is stopped or killed goes on bit for bit."""

import signal
import sys
import time

import pytest

from forked import ForkedCommand
from scratchlm.checkpoint import find_checkpoints, step_of, verify_checkpoint
from scratchlm.cli import main
from scratchlm.training import run as run_module
from training.tiny import log_of, write_data

CONFIG = (
    "--steps", "300", "model.d_model=16", "model.num_heads=2", "model.num_layers=1",
    "model.context_length=8", "train.batch_size=4", "train.eval_every=50", "train.save_every=20",
)  # fmt: skip


def wait_for_step(run, step, process):
    """Wait until the run's log has come to a step."""
    log = run / "metrics.jsonl"
    while process.poll() is None:
        if log.exists() and log.read_bytes().count(b'"grad_norm"') >= step:
            return
        time.sleep(0.005)
    raise AssertionError(process.communicate()[1])


def in_this_process(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["scratchlm", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ctrl_c_sigterm_and_kill_leave_a_run_that_goes_on_bit_for_bit(
    tmp_path, monkeypatch, capsys
):
    data, run, whole = write_data(tmp_path / "data"), tmp_path / "run", tmp_path / "whole"
    assert in_this_process(monkeypatch, "train", data, "--out", whole, *CONFIG) == 0

    process = ForkedCommand("train", data, "--out", run, *CONFIG)
    wait_for_step(run, 30, process)
    process.send_signal(signal.SIGSTOP)  # hold the trainer while a second one tries
    capsys.readouterr()
    assert in_this_process(monkeypatch, "train", "--resume", "--out", run) == 2
    busy = f"another trainer (process {process.pid}) is at work on this run"
    assert busy in capsys.readouterr().err
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    stopped = step_of(find_checkpoints(run)[-1])
    assert f"stopped at step {stopped:,} and saved" in err
    assert log_of(run)[-1]["step"] == stopped

    process = ForkedCommand("train", "--resume", "--out", run)
    wait_for_step(run, min(stopped + 30, 280), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL

    process = ForkedCommand("train", "--resume", "--out", run)
    wait_for_step(run, min(stopped + 60, 290), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode in (143, 0), err  # 0: it was faster than the signal
    assert in_this_process(monkeypatch, "train", "--resume", "--out", run) == 0

    assert log_of(run) == log_of(whole)
    files = [verify_checkpoint(find_checkpoints(d)[-1])["files"] for d in (run, whole)]
    assert files[0] == files[1]


def save_slowly():
    run_module.write_checkpoint = lambda *args, **kwargs: time.sleep(600)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(tmp_path, second):
    data, out = write_data(tmp_path / "data"), tmp_path / "run"
    process = ForkedCommand("train", data, "--out", out, *CONFIG, prepare=save_slowly)
    wait_for_step(out, 5, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # it is saving, slowly
    process.send_signal(second)
    process.communicate()
    assert process.returncode == -second
