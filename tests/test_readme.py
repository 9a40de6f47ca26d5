"""The papers say what is true now: tree, rooms, commands, links, code, version."""

import importlib
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import typer.main

import scratchlm
from forked import run_forked
from scratchlm.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
]
WITH_PYTHON = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def named(page):
    return str(page.relative_to(ROOT))


def test_the_tree_is_the_files_as_they_are():
    spec = importlib.util.spec_from_file_location("make_tree", ROOT / "docs" / "make_tree.py")
    make_tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_tree)
    on_file = make_tree.PAGE.read_text(encoding="utf-8")
    assert make_tree.page() == on_file, "run: python docs/make_tree.py"


def test_the_readme_names_every_room_once():
    (rooms,) = re.findall(r"```text\nsrc/scratchlm/\n(.*?)\n\S", README, re.S)
    there = {
        path.name + "/"
        for path in (ROOT / "src" / "scratchlm").iterdir()
        if (path / "__init__.py").exists()
    }
    assert sorted(line.split()[0] for line in rooms.splitlines()) == sorted(there)


def test_the_readme_fits_on_two_screens():
    assert len(README.splitlines()) <= 130


def test_every_file_says_what_it_is():
    for path in (ROOT / "src").rglob("*.py"):
        assert re.match(r'r?"""\S', path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("page", PAGES, ids=named)
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


def test_the_workflow_tests_what_people_have_by_targets_there_are():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    assert matrix["python"] == ["3.11", "3.12", "3.13"]  # texts: 3.10 as a number is 3.1
    run = "\n".join(step.get("run", "") for step in job["steps"])
    targets = re.findall(r"(?m)^make ([a-z-]+)", run)
    assert targets == re.findall(r"(?m)^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text())
    assert all(re.search(rf"(?m)^{name}:", (ROOT / "Makefile").read_text()) for name in targets)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert re.search(r'"(torch.*)"', run)[1] in project["dependencies"]


COMMANDS = sorted(
    {
        line.partition("  #")[0].strip()
        for page in PAGES
        for block in re.findall(r"```(?:sh|text)\n(.*?)```", page.read_text("utf-8"), re.S)
        for line in re.findall(r"(?m)^scratchlm (?!.*COMMAND).*$", block)
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_on_a_line_are_understood(line):
    """Parsed with their arguments and options, and not run."""
    command = typer.main.get_command(app)
    words = shlex.split(line)
    context = command.make_context(words[0], words[1:])
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_commands_that_are_named_exist():
    known = typer.main.get_command(app).commands
    for page in PAGES:
        for command in re.findall(r"`scratchlm ([a-z]+)", page.read_text(encoding="utf-8")):
            assert command in known, f"{page.name}: scratchlm {command}"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_the_python_of_a_page_runs(page, tmp_path):
    """All blocks of a page are one program, run in a process of its own."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks), encoding="utf-8")

    def work():
        os.chdir(tmp_path)
        sys.argv = [str(program)]
        warnings.resetwarnings()
        runpy.run_path(str(program), run_name="__main__")
        return 0

    log = tmp_path / "log"
    assert run_forked(work, log) == 0, log.read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert project["version"] == scratchlm.__version__
    released = [name for name in re.findall(r"(?m)^## (\S+)", changelog) if name != "Unreleased"]
    assert released[0] == scratchlm.__version__


def test_the_site_has_every_page_and_documents_what_exists():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", text.partition("\nnav:")[2]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w/-]+\.md)\)", home)) == pages - {"index.md"}
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    names = re.findall(r"(?m)^::: (\S+)\.(\w+)$", page)
    assert len(names) > 10
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for name in scratchlm.__all__:
        assert re.search(rf"(?m)^::: scratchlm\.[\w.]+\.{name}$|`{name}`", page), name


_LOCAL = r'(?:href|src)="(?![a-z]+:|//|#)([^"#?]+)'


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is missing")
def test_the_site_is_built_without_a_warning_and_every_link_in_it_leads_to_a_file(tmp_path):
    """As a folder: no server makes a page of a directory."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = [page for page in tmp_path.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 30
    for page in pages:
        for link in re.findall(_LOCAL, page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file(), f"{page.relative_to(tmp_path)}: {link}"
    python = (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    for field in ("vocab_size", "batch_size", "top_k"):  # of dataclasses, in their signatures
        assert f">{field}<" in python, field
