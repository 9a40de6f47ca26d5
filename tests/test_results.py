"""bench/RESULTS.md: what commands wrote and nothing else, and one command loses nothing."""

import importlib.util
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def results():
    spec = importlib.util.spec_from_file_location("results", BENCH / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write(results, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.delenv("OUT", raising=False)

    def write(title, body):
        results.write_section(title, "python bench/x.py", "a machine", "torch 2", body)
        return results.RESULTS.read_text(encoding="utf-8")

    return write


def test_a_benchmark_replaces_its_own_section_and_no_other_line(write):
    for title in ("one", "two, longer", "two"):
        before = write(title, f"| {title} |\n\nprose of {title}")
    after = write("two, longer", "| new |")
    changed = {"| two, longer |", "prose of two, longer"}
    assert set(before.splitlines()) - set(after.splitlines()) == changed
    assert set(after.splitlines()) - set(before.splitlines()) == {"| new |"}
    assert re.findall(r"(?m)^## (.*)$", after) == ["one", "two, longer", "two"]


def test_writing_a_section_again_changes_nothing(write):
    write("one", "| 1 |")
    assert write("two", "| 2 |") == write("one", "| 1 |") == write("two", "| 2 |")


def test_every_section_on_file_is_kept_by_a_run(results, write):
    text = (BENCH / "RESULTS.md").read_text(encoding="utf-8")
    results.RESULTS.write_text(text, encoding="utf-8")
    assert write("a new one", "| 1 |").startswith(text)


@pytest.mark.parametrize("body", ["a\n\n## b", "## b"])
def test_a_body_with_a_title_inside_is_refused(write, body):
    with pytest.raises(ValueError, match="holds no other"):
        write("one", body)


def test_results_hold_only_what_commands_write(results):
    text = (BENCH / "RESULTS.md").read_text(encoding="utf-8")
    preamble, *sections = re.split(r"(?m)^(?=## )", text)
    assert preamble.rstrip() == results.HEADER.rstrip()
    for section in sections:
        command = re.match(r"## .*\n\n`python (bench/\w+\.py)\b.*`, \d{4}-\d\d-\d\d, ", section)
        assert command, section[:80]
        assert (BENCH.parent / command[1]).exists(), command[1]
