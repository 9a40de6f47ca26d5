"""docs/learn.md, walked from nothing to a trained model: what it shows is what is printed."""

import ast
import math
import re
import shlex
from pathlib import Path

import pytest

from check.command import run

PAGE = Path(__file__).parents[2] / "docs" / "learn.md"
BLOCK = re.compile(r"```(python|sh|text)\n(.*?)```", re.S)


def put(file, code):
    """Write the functions and classes of a block into a file, in the place of their stubs."""
    for node in ast.parse(code).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        text = "\n".join(code.splitlines()[node.lineno - 1 : node.end_lineno])
        lines = file.read_text(encoding="utf-8").splitlines()
        old = [n for n in ast.parse("\n".join(lines)).body if getattr(n, "name", "") == node.name]
        if old:
            lines[old[0].lineno - 1 : old[0].end_lineno] = text.splitlines()
        else:
            lines += ["", "", *text.splitlines()]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def walk(page):
    """Yield what the page says a command prints, and what it printed."""
    said = None
    for kind, text in BLOCK.findall(page):
        if kind == "python":
            put(Path("my_ops.py"), text)
        elif kind == "sh":
            lines = text.strip().splitlines()
            said = text.strip(), "".join(run(*shlex.split(line)[1:]).stdout for line in lines)
        else:
            yield said[0], text, said[1]


def matches(said, printed):
    """Say whether a text is the page's: … stands for anything, and losses may differ by 2 %."""
    number = re.compile(r" *\d+\.\d{4,}")
    pattern = ".*".join(re.escape(part) for part in number.sub("#", said).split("…"))
    if re.fullmatch(pattern, number.sub("#", printed)) is None:
        return False
    pairs = zip(number.findall(said), number.findall(printed), strict=False)
    return all(math.isclose(float(a), float(b), rel_tol=0.02) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_walk_prints_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = 0
    for command, said, printed in walk(PAGE.read_text(encoding="utf-8")):
        assert matches(said, printed), f"{command}\n{printed}"
        seen += 1
    assert seen >= 10
    assert list(tmp_path.glob("runs/mine/checkpoints/step-*/model.safetensors"))
    assert (tmp_path / "runs" / "mine" / "curves.png").stat().st_size > 10_000


def test_the_page_ends_with_everything_right():
    page = PAGE.read_text(encoding="utf-8")
    assert "18 of 18 right" in page
    assert "the same to the bit, in all 40 steps" in page
