"""The real command, with real signals: what is stopped or killed goes on bit for bit."""

import os
import signal
import time
from functools import partial

import pytest

from forked import ForkedCommand
from scratchlm.checkpoint import find_checkpoints, step_of, verify_checkpoint
from scratchlm.training import loop
from scratchlm.training import run as run_module
from training.tiny import log_of, write_data

CONFIG = (
    "--steps", "60", "model.d_model=16", "model.num_heads=2", "model.num_layers=1",
    "model.context_length=8", "train.batch_size=4", "train.eval_every=25", "train.save_every=7",
)  # fmt: skip


def stop_before(number):
    """Let this process stop itself before a step: whatever is done to it then is in time."""
    take_step = loop.take_step

    def stopping(learner, batch, step, lr):
        if step == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return take_step(learner, batch, step, lr)

    loop.take_step = stopping


def stopped_before(step, *arguments):
    """Return a command that stands before a step of its run."""
    process = ForkedCommand(*arguments, prepare=partial(stop_before, step))
    process.wait_until_stopped()
    return process


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ctrl_c_sigterm_and_kill_leave_a_run_that_goes_on_bit_for_bit(tmp_path, cli):
    data, run, whole = write_data(tmp_path / "data"), tmp_path / "run", tmp_path / "whole"
    assert cli("train", data, "--out", whole, *CONFIG)[0] == 0

    process = stopped_before(20, "train", data, "--out", run, *CONFIG)
    status, _, err = cli("train", "--resume", "--out", run)
    assert status == 2
    busy = f"another trainer (process {process.pid}) is at work on this run"
    assert busy in err
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert step_of(find_checkpoints(run)[-1]) == 20
    assert "stopped at step 20 and saved" in err
    assert log_of(run)[-1]["step"] == 20

    process = stopped_before(40, "train", "--resume", "--out", run)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL

    process = stopped_before(45, "train", "--resume", "--out", run)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 143, err
    assert cli("train", "--resume", "--out", run)[0] == 0

    assert log_of(run) == log_of(whole)
    files = [verify_checkpoint(find_checkpoints(d)[-1])["files"] for d in (run, whole)]
    assert files[0] == files[1]


def stop_in_saving():
    """Let this process stop itself before a step and again while it saves, which never ends."""
    stop_before(5)

    def write_checkpoint(*args, **more):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1e6)

    run_module.write_checkpoint = write_checkpoint


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(tmp_path, second):
    data, out = write_data(tmp_path / "data"), tmp_path / "run"
    process = ForkedCommand("train", data, "--out", out, *CONFIG, prepare=stop_in_saving)
    process.wait_until_stopped()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.wait_until_stopped()  # it saves
    process.send_signal(second)
    process.send_signal(signal.SIGCONT)
    process.communicate()
    assert process.returncode == -second
