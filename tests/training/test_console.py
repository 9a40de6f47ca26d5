"""The bar shows what matters; where there is no terminal, lines do."""

import io
import math
import re

import pytest
from rich.console import Console

from scratchlm.cli.training_console import TrainingConsole

CLOCK = {"seconds": 9.0, "tokens_per_second": 2048.0, "memory_bytes": 3 * 2**30}
RECORD = {"step": 40, "loss": 1.25, "lr": 3e-4, "grad_norm": 0.5, "tokens": 40_960, "clock": CLOCK}


def shown(terminal, width=160, **clock):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, highlight=False)
    with TrainingConsole(100, 1024, console=console) as training:
        training.stepped({**RECORD, "clock": {**CLOCK, **clock}})
        training.bar.refresh()
        text = file.getvalue()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("terminal", [True, False])
def test_loss_lr_throughput_mfu_memory_and_time_left_are_shown(terminal):
    text = shown(terminal, mfu=0.42, mfu_convention="full")
    for fact in ("loss 1.2500", "lr 3.00e-04", "2,048 tok/s", "MFU 42.0% (full)", "3.00 GiB"):
        assert fact in text
    assert "30.0 s left" in text  # 60 steps of 1,024 tokens at 2,048 a second
    assert ("40/100" in text) is True


def test_the_throughput_of_several_ranks_is_told_of_each_as_well():
    assert "2,048 tok/s (512 a rank)" in shown(False, ranks=4)


def test_without_a_measured_peak_there_is_no_mfu():
    assert "MFU" not in shown(True)


def test_a_narrow_terminal_keeps_the_loss():
    text = shown(True, width=70, mfu=0.42, mfu_convention="full")
    assert "loss 1.2500" in text
    assert "GiB" not in text


def test_plain_lines_are_rate_limited_and_evaluations_are_not():
    file = io.StringIO()
    console = Console(file=file, force_terminal=False, width=200)
    training = TrainingConsole(1_000, 1024, console=console)
    for step in range(1, 200):
        training.stepped({**RECORD, "step": step})
    figures = {"val_loss": 1.5, "val_perplexity": 4.48, "bits_per_byte": 2.1, "best": True}
    training.evaluated({"step": 199, **figures})
    training.evaluated({"step": 199, **figures, "val_loss": None})
    training.sampled({"step": 199, "samples": ["[red]one\ntwo"]})
    lines = file.getvalue().splitlines()
    assert 1 <= sum(line.startswith("step ") and "tok/s" in line for line in lines) < 20
    assert "step 199: held-out 1.5000  perplexity 4.48  2.1000 bits/byte  best so far" in lines
    assert "step 199: the held-out loss is not finite" in lines
    assert lines[-1] == "  | [red]one two"  # what a model writes is not markup
    training.sampled({"step": 199, "samples": ["seven77 " * 20]})
    assert file.getvalue().splitlines()[-1] == "  | " + ("seven77 " * 12).rstrip()  # whole words


def test_an_evaluation_is_one_line_of_80_columns():
    file = io.StringIO()
    training = TrainingConsole(20_000, 1024, console=Console(file=file, width=200))
    for step, loss, best in ((0, 6.9755, True), (20_000, 4.5, True), (20_000, 4.75, False)):
        figures = {"val_loss": loss, "val_perplexity": math.exp(loss), "bits_per_byte": 2.1}
        training.evaluated({"step": step, **figures, "best": best})
    lines = file.getvalue().splitlines()
    assert lines[-1].endswith("best +0.2500")
    assert max(map(len, lines)) <= 80, lines
