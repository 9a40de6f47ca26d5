"""The README says what is true now: its tree, its commands, its links."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tree_is_the_files_as_they_are():
    spec = importlib.util.spec_from_file_location("make_tree", ROOT / "docs" / "make_tree.py")
    make_tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_tree)
    assert make_tree.with_tree(README) == README, "run: python docs/make_tree.py"


def test_every_file_says_what_it_is():
    for path in (ROOT / "src").rglob("*.py"):
        assert re.match(r'r?"""\S', path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", page.read_text(), re.M):
            name = next(filter(None, target))
            assert re.search(rf"^{name}:", makefile, re.M), f"{page.name}: make {name}"


def test_commands_that_are_named_exist():
    out = subprocess.run(
        [sys.executable, "-c", "from scratchlm.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
    ).stdout
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"scratchlm ([a-z]+)", text):
            if command not in ("is", "and", "as", "import"):
                assert re.search(rf"│ {command} ", out), f"{page.name}: scratchlm {command}"


def test_the_first_python_example_runs():
    (example,) = re.findall(r"```python\n(# A model.*?)```", README, re.S)
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
