"""Delete `accelerate/` and everything still works, slower.

Another process runs the public functions and the command line: once as they are, once with the
room's import blocked, once from a copy of the library without the room's files.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import scratchlm

PROGRAM = Path(__file__).with_name("without.py")
LIBRARY = Path(scratchlm.__file__).parent


def run(directory, *words, library=LIBRARY.parent):
    tests = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (library, tests)))}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(directory), *words],
        env=env,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return run(tmp_path_factory.mktemp("usual"))


GONE = [pytest.param("import blocked", marks=pytest.mark.slow), "files deleted"]


@pytest.fixture(scope="module", params=GONE)
def without(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("without")
    if request.param == "import blocked":
        return run(directory, "block")
    unwanted = shutil.ignore_patterns("accelerate", "__pycache__")
    shutil.copytree(LIBRARY, directory / "src" / "scratchlm", ignore=unwanted)
    return run(directory, library=directory / "src")


def test_the_room_is_used_unless_it_is_gone(usual, without):
    assert usual["room"]
    assert not without["room"]


def test_every_other_module_is_imported_without_the_room(usual, without):
    assert usual["cannot be imported"] == []
    about_it = {"scratchlm.training.kernel_adamw", "scratchlm.accounting.verify"}  # its kernels
    assert set(without["cannot be imported"]) <= about_it


def test_training_and_generation_give_the_same(usual, without):
    for family, expected in usual["functions"].items():
        got = without["functions"][family]
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-4), family
        assert got["losses"][1] < got["losses"][0], family
        assert got["generated"] == expected["generated"], family
        assert got["beams"] == expected["beams"], family


COMMANDS = (
    "train",
    "resume",
    "evaluate",
    "generate",
    "export",
    "generate from the export",
    "import",
    "account",
    "left out",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_works(usual, without, name):
    for found in (usual, without):
        done = found["commands"][name]
        assert done["status"] == 0, done["err"]
        assert done["out"]
        assert "Traceback" not in done["err"]


def test_what_commands_give_is_the_same(usual, without):
    expected, got = usual["commands"], without["commands"]
    for name in ("generate", "account"):
        assert got[name]["out"] == expected[name]["out"], name
    losses = [json.loads(found["evaluate"]["out"])["loss"] for found in (expected, got)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_acceleration_asked_for_by_name_is_refused_or_reported_in_one_line(usual, without):
    assert usual["commands"]["asked for"]["status"] == 0, usual["commands"]["asked for"]["err"]
    done = without["commands"]["asked for"]
    lines = [line for line in done["err"].splitlines() if "accelerat" in line]
    assert len(lines) == 1, done["err"]
    assert done["status"] == 0 or (done["status"] == 2 and lines[0].startswith("error: "))
    assert "Traceback" not in done["err"]


@pytest.mark.parametrize("name", ["explain", "verify"])
def test_what_is_about_acceleration_says_that_there_is_none(usual, without, name):
    assert usual["commands"][name]["status"] == 0, usual["commands"][name]["err"]
    done = without["commands"][name]
    if name == "verify" and done["status"] == 0:
        return  # it may also verify the plain model
    assert done["status"] == 2, done["err"]
    assert re.fullmatch(r"error: .*accelerat.*", done["err"].strip()), done["err"]
