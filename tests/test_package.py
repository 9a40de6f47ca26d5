"""The package as it is installed: version, contents, and nothing but its run-time dependencies."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import scratchlm

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# asked for where they are used
OPTIONAL = {
    "pyarrow",
    "tensorboard",
    "triton",
    "setuptools",
    "jinja2",
    "lm_eval",
    "starlette",
    "uvicorn",
    "h11",
    "anyio",
}


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def test_the_version_is_the_one_the_command_prints():
    code = "from scratchlm.cli import main; main()"
    command = [sys.executable, "-c", code, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"scratchlm {scratchlm.__version__}\n"
    assert scratchlm.__version__ == PROJECT["version"]


def test_what_is_imported_at_run_time_is_a_run_time_dependency():
    needed = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names}:
                known = name in sys.stdlib_module_names or name in {"scratchlm", *OPTIONAL}
                assert known or name in needed, f"{path}: {name}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a copy of the sources, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, folder / "copy" / name, ignore=skip)
        else:
            shutil.copy(source, folder / "copy" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "-w", folder, folder / "copy"], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_what_the_package_needs(wheel):
    assert wheel.name == f"scratchlm-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        fields = Parser().parsestr(archive.read(metadata).decode())
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "scratchlm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources <= names
    assert not any(name.startswith("tests") for name in names)
    required = {name_of(r) for r in fields.get_all("Requires-Dist") if "extra ==" not in r}
    assert required == {name_of(requirement) for requirement in PROJECT["dependencies"]}


@pytest.mark.slow
def test_a_wheel_installs_and_works_with_run_time_dependencies_alone(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    bin_ = tmp_path / "env" / "bin"
    subprocess.run([bin_ / "pip", "install", "--quiet", wheel], check=True)
    (tmp_path / "my.txt").write_text("the cat sat on the mat. " * 200)
    for command in (
        ("--version",),
        ("presets",),
        ("account", "gpt2"),
        ("train", "my.txt", "--out", "run", "--steps", "3"),
        ("generate", "run", "--prompt", "the", "--max-new-tokens", "3"),
        ("export", "run", "hf"),
    ):
        done = subprocess.run(
            [bin_ / "scratchlm", *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
