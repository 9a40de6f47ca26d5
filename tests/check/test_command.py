"""`scratchlm check` as one types it: stubs, verdicts, hints, JSON, adapters, watching, time."""

import ast
import json
import os
import re
import resource
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from check.command import run
from check.test_learn import BLOCK, PAGE, put
from scratchlm.check import TASKS
from scratchlm.check.loading import read_source
from scratchlm.check.stubs import write_stubs
from waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
WRONG = "import torch\ndef run_silu(x):\n    return torch.sigmoid(x)\n"
LINE = "σ(x) alone: the factor x is missing"


@pytest.fixture
def solution(tmp_path):
    """The file at the end of docs/learn.md."""
    path = tmp_path / "my_ops.py"
    path.write_text(write_stubs(), encoding="utf-8")
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "python":
            put(path, text)
    return path


def test_init_writes_every_function_in_teaching_order(tmp_path):
    path = tmp_path / "mine.py"
    assert run("check", "--init", path).status == 0
    names = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert [n.name for n in names] == [task.name for task in TASKS]
    for node, task in zip(names, TASKS, strict=True):
        said = ast.get_docstring(node)
        assert task.where in said
        assert len(said.splitlines()) >= 3
    assert read_source(path).unwritten == {task.name for task in TASKS}
    assert all(len(line) <= 100 for line in path.read_text().splitlines())


def test_init_never_overwrites(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("mine")
    found = run("check", "--init", path)
    assert found.status == 2
    assert "exists already" in found.stderr
    assert path.read_text() == "mine"


def test_exit_status_is_0_only_when_all_that_is_asked_for_is_right(tmp_path):
    path = tmp_path / "my_ops.py"
    path.write_text("import torch\ndef run_silu(x):\n    return x * torch.sigmoid(x)\n")
    assert run("check", path, "silu").status == 0
    assert run("check", path, "silu", "softmax").status == 1  # not written
    path.write_text(WRONG)
    assert run("check", path, "silu").status == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["check"], "give a FILE"),
        (["check", "none.py"], "none.py is no file"),
        (["check", "here.py", "softmux"], "did you mean softmax"),
        (["check", "here.py", "--adapters", "here.py"], "not both"),
        (["check", "broken.py"], "broken.py:1:"),
        (["check", "here.py", "--train", "--json"], "--train and --json cannot"),
        (["check", "here.py", "--train"], "nothing is written yet"),
    ],
)
def test_what_is_typed_wrong_is_one_line_and_2(tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    Path("here.py").write_text("")
    Path("broken.py").write_text("def f(:")
    found = run(*arguments)
    assert found.status == 2
    assert line in found.stderr
    assert found.stderr.count("\n") == 1


def test_hints_come_one_by_one_and_only_when_asked(tmp_path):
    path = tmp_path / "my_ops.py"
    path.write_text(WRONG)
    shown = [run("check", path, "silu", *["--hint"] * n).stdout for n in range(4)]
    assert all(LINE in text for text in shown)
    for count, text in enumerate(shown):
        found = [name for name in ("a nudge: W", "a pointer: T", "the line: i") if name in text]
        assert len(found) == count
    assert "the line: in_features * torch.sigmoid(in_features)" in shown[3]


def test_json_holds_everything(tmp_path):
    path = tmp_path / "my_ops.py"
    path.write_text(WRONG)
    found = run("check", path, "silu", "softmax", "--json", "--from-scratch", "--hint")
    record = json.loads(found.stdout)
    assert (record["passed"], record["right"], record["wrong"], record["missing"]) == (
        False,
        0,
        1,
        1,
    )
    silu, softmax = record["functions"]
    assert silu["mistake"] == LINE
    assert silu["example"] == "in_features=[-2.0, -0.5, 0.0, 1.0, 3.0]"
    assert silu["difference"].startswith("[0] got 0.119203, expected -0.238406")
    assert silu["hints"] == ["What is SiLU of a large x?"]
    assert softmax == {"function": "run_softmax", "state": "missing"}
    assert record["refused"] == []


def test_from_scratch_fails_a_right_file_and_says_where(tmp_path):
    path = tmp_path / "my_ops.py"
    path.write_text("import torch\ndef run_silu(x):\n    return torch.nn.functional.silu(x)\n")
    assert run("check", path, "silu").status == 0
    found = run("check", path, "silu", "--from-scratch")
    assert found.status == 1
    assert f"not from scratch: {path}:3: torch.nn.functional.silu" in found.stdout


def test_the_courses_adapters_are_taken_as_they_are(tmp_path):
    """A project of the course's shape: layers that own float32 weights, adapters that fill them."""
    (tmp_path / "basics").mkdir()
    (tmp_path / "basics" / "__init__.py").write_text("")
    (tmp_path / "basics" / "layers.py").write_text(
        """
import torch
from torch import nn
class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W = nn.Parameter(torch.empty(d_out, d_in))
    def forward(self, x):
        return x @ self.W.T
class RMSNorm(nn.Module):
    def __init__(self, d, eps):
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(d)), eps
    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        return (x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.g).to(kind)
def softmax(x, dim):
    e = torch.exp(x - x.max(dim, keepdim=True).values)
    return e / e.sum(dim, keepdim=True)
"""
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("")
    adapters = tmp_path / "tests" / "adapters.py"
    adapters.write_text(
        """
from __future__ import annotations
import torch
from basics.layers import Linear, RMSNorm, softmax

def run_linear(d_in, d_out, weights, in_features):
    layer = Linear(d_in, d_out)
    layer.load_state_dict({"W": weights})
    return layer(in_features)

def run_rmsnorm(d_model, eps, weights, in_features):
    layer = RMSNorm(d_model, eps)
    layer.load_state_dict({"g": weights})
    return layer(in_features)

def run_softmax(in_features, dim):
    return softmax(in_features, dim)

def run_scaled_dot_product_attention(Q, K, V, mask=None):
    s = torch.einsum("...nk,...mk->...nm", Q, K) / Q.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(mask == 0, float("-inf"))
    return softmax(s, -1) @ V

def run_cross_entropy(inputs, targets):
    x = inputs - inputs.max(-1, keepdim=True).values
    return (x.exp().sum(-1).log() - x.gather(-1, targets[:, None])[:, 0]).mean()

def run_silu(in_features):
    raise NotImplementedError
"""
    )
    found = run("check", "--adapters", adapters)
    lines = dict(re.findall(r"(?m)^(\w+) +(right|WRONG|not written)", found.stdout))
    right = {"linear", "softmax", "attention", "cross_entropy"}
    assert {name for name, state in lines.items() if state == "right"} == right
    assert lines["silu"] == "not written"
    assert "rmsnorm       WRONG: the sum of squares, not their mean" in found.stdout
    out = tmp_path / "run"
    found = run("check", "--adapters", adapters, "--train", "--steps", 2, "--out", out)
    assert "training with 3 functions of yours" in found.stdout, found.stderr
    assert "borrowed: linear, embedding, silu, rmsnorm" in found.stdout  # they copy, or are missing
    assert "the same but for rounding" in found.stdout or "to the bit" in found.stdout


def cpu():
    """Seconds of this process and of its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


@pytest.mark.slow  # a measurement; its verdict is that of the next test's first round
def test_a_whole_check_takes_less_than_15_seconds_of_one_core(solution):
    """Processor time, all processes together, so that a busy machine does not decide."""
    began = cpu()
    code = "from scratchlm.cli import main; main()"
    command = [sys.executable, "-c", code, "check", str(solution)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.stdout.endswith("18 of 18 right\n"), found.stderr
    assert cpu() - began < 15


def test_watch_checks_after_a_save_what_has_changed_and_only_that(solution):
    code = "from scratchlm.cli import main; main()"
    command = [sys.executable, "-u", "-c", code, "check", str(solution), "--watch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # old bytecode may look like new
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        first = read_until(process, "waiting for a save")
        assert "18 of 18 right" in first
        was = solution.read_text(encoding="utf-8")
        edits = [
            (("* torch.sigmoid(in_features)", "+ torch.sigmoid(in_features)"), "silu"),
            (("math.sqrt(Q.shape[-1])", "1.0"), "attention"),
        ]
        for (old, new), short in edits:
            save(solution, was.replace(old, new))
            text = read_until(process, "waiting for a save")
            assert re.search(rf"(?m)^{short} +WRONG", text)
            assert "linear" not in text
            assert "17 of 18 right" in text
            save(solution, was)
            assert "18 of 18 right" in read_until(process, "waiting for a save")
        save(solution, "def f(:")
        assert "error: " in read_until(process, "error: ")
    finally:
        process.kill()
        process.communicate()


def save(path, text):
    """Write a file as an editor does: nobody sees a half of it."""
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def read_until(process, text):
    """Read what a process prints up to a text."""
    seen, until, pipe = "", time.monotonic() + PATIENCE, process.stdout.fileno()
    while text not in seen:
        ready, _, _ = select.select([pipe], [], [], max(0, until - time.monotonic()))
        assert ready, seen
        piece = os.read(pipe, 1 << 16)
        assert piece, seen
        seen += piece.decode("utf-8", errors="replace")
    return seen


def test_a_change_is_traced_to_the_functions_it_can_touch(tmp_path):
    path = tmp_path / "my_ops.py"
    text = (
        "import math\n"
        "def helper(x): return x\n"
        "def run_silu(x): return helper(x)\n"
        "def run_swiglu(x): return run_silu(x)\n"
        "def run_linear(x): return x\n"
    )
    path.write_text(text)
    before = read_source(path)

    def changed(new):
        path.write_text(new)
        return read_source(path).changed_since(before)

    assert changed(text + "\n# a comment\n") == set()
    assert changed(text.replace("run_linear(x): return x", "run_linear(x): return 2 * x")) == {
        "run_linear"
    }
    assert changed(text.replace("helper(x): return x", "helper(x): return -x")) == {
        "run_silu",
        "run_swiglu",
    }
    assert len(changed(text.replace("import math", "import torch"))) == len(TASKS)
