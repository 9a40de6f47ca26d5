"""The command line as a whole: quick to answer, one line for what a user gets wrong."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchlm.cli import one_line


def scratchlm(*arguments, **options):
    command = [sys.executable, "-c", "from scratchlm.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_help_waits_for_nothing_heavy():
    """0.3 s is a matter of what is imported: none of these may be."""
    code = (
        "import sys\nfrom scratchlm.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'regex', 'tokenizers', 'transformers', 'einops',"
        " 'jaxtyping', 'safetensors', 'pyarrow'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "HEAVY []" in result.stdout
    assert "Usage" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "gpt3"],
        ["config", "missing.toml"],
        ["nonsense"],
        ["config"],
        ["presets", "--colour"],
        ["account", "gpt3"],
        ["generate", "no-such-model", "--prompt", "x"],
    ],
    ids=" ".join,
)
def test_what_a_user_gets_wrong_exits_with_2_and_no_traceback(arguments, tmp_path):
    result = scratchlm(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_config_prints_what_config_reads(tmp_path):
    text = scratchlm("config", "llama3.2-1b").stdout
    path = tmp_path / "model.toml"
    path.write_text(text)
    assert scratchlm("config", str(path)).stdout == text
    path = tmp_path / "model.json"
    path.write_text(scratchlm("config", "llama3.2-1b", "--json").stdout)
    assert scratchlm("config", str(path)).stdout == text


def test_presets_names_them_all():
    from scratchlm.config import PRESETS

    out = scratchlm("presets").stdout
    assert all(name in out for name in PRESETS)


def test_traceback_is_shown_to_who_asks():
    result = scratchlm("--traceback", "config", "gpt3")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


@given(st.text())
def test_every_error_fits_on_a_line(text):
    assert "\n" not in one_line(ValueError(text))
    assert "\n" not in one_line(OSError(2, "No such file", "a.txt"))
