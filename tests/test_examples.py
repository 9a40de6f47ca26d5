"""The examples run, are short, and say what they are."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHORT = {
    "finetune_a_skill.py": ["4"],
    "induction_heads.py": ["4"],
}  # arguments with which an example takes seconds


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_runs(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *SHORT.get(script.name, [])])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    assert printed.getvalue().strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_a_page(script):
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (90 if script.stem == "induction_heads" else 60)  # that is a result
    assert lines[0].startswith('"""')


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_the_cells_of_a_notebook_run(notebook, monkeypatch, tmp_path):
    """One after the other in one name space; a notebook is stored without output."""
    import matplotlib

    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    names: dict[str, object] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(compile("".join(cell["source"]), f"{notebook.name}:{cell['id']}", "exec"), names)
    assert names["losses"][-1] < names["losses"][0]


def test_the_page_lists_every_example():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in [*SCRIPTS, *NOTEBOOKS]:
        assert f"]({path.name})" in page, path.name


@pytest.mark.slow
def test_fine_tuning_teaches_a_skill_that_nineteen_of_twenty_unseen_words_show(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["finetune_a_skill.py"])
    runpy.run_path(str(FOLDER / "finetune_a_skill.py"), run_name="__main__")
    shares = re.findall(r"(?:reverse|merged).* ([\d.]+)%", capsys.readouterr().out)
    assert len(shares) == 2
    assert min(map(float, shares)) >= 95
