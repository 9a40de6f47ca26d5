"""A file runs apart: whatever it does is one plain line, and the rest goes on."""

import os
import select
from pathlib import Path
from types import SimpleNamespace

import pytest

from scratchlm.check import TASKS, check_file, find_task, runner
from scratchlm.check.outcomes import pack, unpack
from scratchlm.errors import ScratchLMError
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check a source. Its time runs only once it calls `hangs()`: a busy machine takes longer."""
    note = tmp_path / "hangs"

    def select_patiently(pipes, _, __, limit):
        ready = []

        def came():
            ready.extend(select.select(pipes, [], [], 0.01)[0])
            return ready or note.exists()

        wait_until(came)
        if not ready:
            note.unlink()
            ready, _, _ = select.select(pipes, [], [], limit)
        return ready, [], []

    monkeypatch.setattr(runner, "select", SimpleNamespace(select=select_patiently))
    begin = (
        f"import torch, os, sys, time; from pathlib import Path; hangs = Path({str(note)!r}).touch"
    )

    def run(source, *names, **options):
        path = tmp_path / "my_ops.py"
        path.write_text(f"{begin}\n{source}", encoding="utf-8")
        return check_file(path, [find_task(name) for name in names], **options)

    return run


SILU = "def run_silu(x):\n    {}\n    return x * torch.sigmoid(x)\n"
AFTER = "def run_softmax(x, dim):\n    return torch.softmax(x, dim)\n"


@pytest.mark.parametrize(
    ("does", "line"),
    [
        ("hangs()\n    while True: pass", "does not return within 0.5 s"),
        ("hangs(); time.sleep(9999)", "does not return within 0.5 s"),
        ("sys.exit(0)", "calls exit()"),
        ("os._exit(7)", "ends the process (exit status 7)"),
        ("os.kill(os.getpid(), 11)", "ends the process (SIGSEGV)"),
        ("input()", "waits for input"),
        ("x += 1", "changes its input in_features in place"),
        ("return 3.0", "returns a float; expected a tensor"),
        ("return None", "returns None; expected a tensor"),
        ("return x[:1]", "got shape (1,); expected shape (5,)"),
        ("return run_silu(x)", "RecursionError: maximum recursion depth exceeded"),
        ("raise KeyError('w')", "KeyError: 'w' (line 3)"),
        ("raise NotImplementedError", "is not written yet (NotImplementedError)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: (line 3)"),
    ],
)
def test_what_a_function_does_is_one_plain_line(check, does, line):
    if does.startswith("raise NotImpl"):
        does = "if True: " + does
    silu, softmax = check(SILU.format(does) + AFTER, "silu", "softmax", limit=0.5)
    assert silu.state == "wrong"
    assert line in " ".join(silu.first.text.split())
    assert "\n" not in silu.first.text
    assert softmax.state == "right"  # the next one goes on


def test_a_print_is_noted_and_changes_nothing(check, capfd):
    (silu,) = check(SILU.format("print('here', x.shape)"), "silu")
    assert silu.state == "right"
    assert silu.note.startswith("here torch.Size([5])")
    assert capfd.readouterr().out == ""


def test_what_a_file_changes_stays_in_its_process(check):
    (silu,) = check("torch.sigmoid = None\n" + SILU.format("pass"), "silu")
    assert silu.state == "wrong"
    (silu,) = check(SILU.format("pass"), "silu")
    assert silu.state == "right"


def test_processes_that_a_file_starts_end_with_it(check, tmp_path):
    note = tmp_path / "started"
    does = f"os.system('sleep 9999 & echo $! > {note}'); hangs()\n    while True: pass"
    check(SILU.format(does), "silu", limit=0.5)
    state = Path(f"/proc/{int(note.read_text())}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] in "ZX")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def f(:", "my_ops.py:2: "),
        ("import no_such_module", "does not load: ModuleNotFoundError: No module named"),
        ("1 / 0", "does not load: ZeroDivisionError: division by zero (line 2)"),
        ("sys.exit(3)", "does not load: SystemExit: 3 (line 2)"),
        ("hangs()\nwhile True: pass", "does not load: it does not return within 0.5 s"),
    ],
)
def test_a_file_that_does_not_load_is_one_line(check, source, line):
    with pytest.raises(ScratchLMError) as error:
        check(source + "\n" + SILU.format("pass"), "silu", limit=0.5)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_functions_are_borrowed(check):
    """The order is free: a block may be written before its parts."""
    source = """
def run_silu(in_features):
    raise NotImplementedError
def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    a = run_linear(d_model, d_ff, w1_weight, in_features)
    b = run_linear(d_model, d_ff, w3_weight, in_features)
    return run_linear(d_ff, d_model, w2_weight, run_silu(a) * b)
"""
    linear, silu, swiglu = check(source, "linear", "silu", "swiglu")
    assert [linear.state, silu.state, swiglu.state] == ["missing", "missing", "right"]


def test_functions_may_come_from_another_file(check, tmp_path):
    (tmp_path / "layers.py").write_text(
        "def run_linear(a, b, w, x):\n    return x @ w.T\n"
        "def run_silu(in_features):\n    raise NotImplementedError\n"
    )
    linear, silu, softmax = check("from layers import *\n", "linear", "silu", "softmax")
    assert [linear.state, softmax.state] == ["right", "missing"]
    assert silu.first.text == "is not written yet (NotImplementedError)"


def test_a_copied_weight_is_told(check):
    source = """
def run_linear(d_in, d_out, weights, in_features):
    layer = torch.nn.Linear(d_in, d_out, bias=False, dtype=weights.dtype)
    layer.weight.data = weights
    return layer(in_features)
"""
    (linear,) = check(source, "linear")
    assert linear.mistake.name == "no gradient arrives: the function works on a copy"
    assert linear.first.what == "gradient of weights"
    (linear,) = check(source, "linear", course=True)  # as the course's adapters do
    assert linear.state == "right"


def test_outcomes_go_through_json_bit_for_bit():
    import json

    import torch

    for task in TASKS:
        for case in task.cases:
            outcome = task.drive(task.definition, case)
            back = unpack(json.loads(json.dumps(pack(outcome))))
            assert back.keys() == outcome.keys()
            for name, value in outcome.items():
                if isinstance(value, torch.Tensor):
                    assert back[name].dtype == value.dtype
                    assert torch.equal(back[name].nan_to_num(), value.nan_to_num())
                else:
                    assert back[name] == value


def test_nothing_is_left_behind(check):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        check(SILU.format("hangs()\n    while True: pass"), "silu", limit=0.3)
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after <= before + 1
