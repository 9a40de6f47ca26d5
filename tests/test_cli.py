"""The command line as a whole: quick to answer, one line for a mistake, a traceback for a bug."""

import importlib
import json
import mmap
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchlm.cli import main
from scratchlm.cli.errors import is_for_the_user, one_line
from scratchlm.cli.interrupts import interrupts_between_steps
from scratchlm.config import PRESETS
from scratchlm.errors import ScratchLMError


def scratchlm_process(*arguments):
    command = [sys.executable, "-c", "from scratchlm.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def scratchlm(monkeypatch, capsys):
    """Run a command in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["scratchlm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, said.out, said.err)

    return run


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
        ["explain", "gpt3"],
        ["explain", "gpt2", "--batch", "0"],
        ["generate", "no-such-model", "--prompt", "x"],
    ],
    ids=" ".join,
)
def test_what_a_user_gets_wrong_exits_with_2_and_no_traceback(
    arguments, tmp_path, scratchlm, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = scratchlm(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "--ouput", "x"), "No such option: --ouput. Did you mean --out?"),
        (("generate", "m", "--num-smaples", "3"), "Did you mean --num-samples?"),
        (("train", "--batch-size", "3"), "No such option: --batch-size. Did you mean train.batch_"),
        (("finetune", "--lr", "3"), "No such option: --lr. Did you mean train.lr=…?"),
        (("generate", "m", "--lr", "3"), "No such option: --lr; see scratchlm generate --help"),
        (("train", "--verbose"), "No such option: --verbose; see scratchlm train --help"),
        (("train", "x", "--steps", "abc"), "error: --steps must be a whole number; got 'abc'; see"),
        (("generate", "m", "--top-p=x"), "error: --top-p must be a number; got 'x'; see scratch"),
        (("serve", "m", "--port", "99999"), "--port must be at most 65535; got '99999'; see scra"),
        (("import", "a", "b", "--dtype", "x"), "for '--dtype': 'x' is not one of 'float64', 'fl"),
        (("trian",), "No such command 'trian'. Did you mean 'train'? See scratchlm --help"),
        (("generate", "m", "--prompt"), "requires an argument; see scratchlm generate --help"),
        (("xyzzy",), "No such command 'xyzzy'; see scratchlm --help"),
        (("merge", "m", "--out", "x"), "No such option: --out; see scratchlm merge --help"),
        (("inspect",), "error: Missing argument MODEL; see scratchlm inspect --help"),
        (("explain",), "error: Missing argument MODEL; see scratchlm explain --help"),
        (("demo", "--out", __file__), f"error: {__file__} is a file; a run needs a folder"),
        (("finetune", "nowhere", "x.jsonl"), "error: nowhere: no such run, checkpoint or Hugging"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_a_name_is_suggested_only_where_one_is_near(arguments, told, scratchlm):
    result = scratchlm(*arguments)
    assert result.returncode == 2
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["runs/mine", "path/that/does/not/exist", "./gpt2x"])
def test_account_takes_a_path_for_a_path(name, scratchlm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = scratchlm("account", name)
    told = f"error: {name}: no such run, checkpoint, config or model directory\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", told)


def test_config_prints_what_config_reads(tmp_path, scratchlm):
    text = scratchlm("config", "llama3.2-1b").stdout
    path = tmp_path / "model.toml"
    path.write_text(text)
    assert scratchlm("config", str(path)).stdout == text
    path = tmp_path / "model.json"
    path.write_text(scratchlm("config", "llama3.2-1b", "--json").stdout)
    assert scratchlm("config", str(path)).stdout == text


def test_explain_names_every_fusion_with_the_reason_why_it_does_not_run(scratchlm, tmp_path):
    model = tmp_path / "model.toml"
    text = re.sub(r"(?m)^vocab_size = .*", "vocab_size = 64", scratchlm("config", "gpt2").stdout)
    model.write_text(text)
    text = scratchlm("explain", str(model), "--device", "cpu", "--context", "128").stdout
    rows = json.loads(scratchlm("explain", str(model), "--device", "cpu", "--json").stdout)
    reasons = {row["fusion"]: row["reason"] for row in rows}
    assert {"qkv_rope_attention", "qkv_joined", "cpu_runner", "gpu_runner"} <= reasons.keys()
    assert reasons["chunked_lm_head_loss"] is None
    assert reasons["cpu_runner"] is None
    assert reasons["qkv_norm_rope"] == "no current CUDA device with Triton"
    assert reasons["gpu_runner"] == "a model on cpu"
    assert all(name in text for name in reasons)
    assert "no current CUDA device with Triton" in text
    assert "layers.0" not in text  # the first layer stands for all


def test_explain_draws_no_weight(scratchlm, monkeypatch):
    """Drawing the embeddings of a real vocabulary takes half a minute and gigabytes."""
    from torch import nn

    drawn, draw = [], nn.init.trunc_normal_

    def note(weight, *args, **kwargs):
        drawn.append(weight.device.type)
        return draw(weight, *args, **kwargs)

    monkeypatch.setattr(nn.init, "trunc_normal_", note)
    assert scratchlm("explain", "gpt2", "--device", "cpu").returncode == 0
    assert set(drawn) == {"meta"}


def test_presets_names_them_all(scratchlm):
    from scratchlm.config import PRESETS

    out = scratchlm("presets").stdout
    assert all(name in out for name in PRESETS)


def test_traceback_is_shown_to_who_asks():
    result = scratchlm_process("--traceback", "config", "gpt3")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


@given(st.text())
def test_every_error_fits_on_a_line(text):
    assert "\n" not in one_line(ValueError(text))
    assert "\n" not in one_line(OSError(2, "No such file", text))


# Errors for the user and bugs

OURS = """
import json
from scratchlm.errors import ScratchLMError

def raises(error):
    raise error

def raises_from(error):
    try:
        int("x")
    except ValueError as cause:
        raise error from cause

def cleans_up_and_raises_again(error):
    try:
        with open(__file__):
            raises(error)
    except ValueError:
        raise

def reports_a_library_error():
    try:
        json.loads("{")
    except ValueError as error:
        raise ValueError(f"a.json: {error}") from None

def converts():
    return int("x")

def converts_and_raises_again():
    try:
        int("x")
    except ValueError as error:
        raise error

def reads_json():
    return json.loads("{")

def calls_torch():
    import torch
    return torch.zeros(2).reshape("x")

def adds():
    return 1 + "1"

def unpacks():
    a, b = (1,)

def calls(function):
    return function()
"""


@pytest.fixture(scope="module")
def ours():
    """Return functions that stand in a module of this package."""
    names = {"__name__": "scratchlm.made_up", "__file__": __file__}
    exec(OURS, names)
    return names


def error_of(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


@pytest.mark.parametrize("name", ["raises", "raises_from", "cleans_up_and_raises_again"])
@pytest.mark.parametrize("kind", [ValueError, TypeError, ScratchLMError])
def test_an_error_raised_on_purpose_is_for_the_user(ours, name, kind):
    assert is_for_the_user(error_of(ours[name], kind("d_model must be positive")))


def test_a_library_error_we_report_in_our_words_is_for_the_user(ours):
    assert is_for_the_user(error_of(ours["reports_a_library_error"]))


@pytest.mark.parametrize(
    "name",
    ["converts", "converts_and_raises_again", "reads_json", "calls_torch", "adds", "unpacks"],
)
def test_an_error_nobody_raised_on_purpose_is_a_bug(ours, name):
    error = error_of(ours[name])
    assert isinstance(error, (ValueError, TypeError))
    assert not is_for_the_user(error)


def test_an_error_raised_by_code_of_others_is_a_bug(ours):
    def of_others():
        raise ValueError("raised outside the package")

    assert not is_for_the_user(error_of(ours["calls"], of_others))


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), AssertionError("x")])
def test_other_kinds_of_errors_are_bugs(ours, error):
    assert not is_for_the_user(error_of(ours["raises"], error))


def test_memory_that_the_system_does_not_map_is_for_the_user():
    error = error_of(mmap.mmap, -1, 1 << 62)
    assert is_for_the_user(error)
    assert one_line(error).startswith("not enough memory")


def test_an_error_about_a_file_is_for_the_user(tmp_path):
    assert is_for_the_user(error_of(open, tmp_path / "missing.txt"))
    assert is_for_the_user(OSError(28, "No space left on device"))
    assert not is_for_the_user(OSError(9, "Bad file descriptor"))


def test_a_bug_shows_its_traceback_and_exits_with_1():
    code = (
        "from scratchlm import cli, config\n"
        "def broken(name): return int(name)\n"
        "config.preset = broken\n"
        "cli.main()"
    )
    command = [sys.executable, "-c", code, "account", "gpt3"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "invalid literal" in result.stderr


def test_presets_fit_80_columns_and_no_name_is_cut(scratchlm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = scratchlm("presets").stdout
    assert max(map(len, text.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines()[1:]}
    assert list(rows) == list(PRESETS)
    assert rows["gpt2"] == "124M"  # what people mean by it
    assert rows["cs336-gpt2"] == "190M"
    table = json.loads(scratchlm("presets", "--json").stdout)
    assert table["gpt2"]["parameters"] == 124_439_808


def test_an_old_name_of_a_preset_still_works_with_a_line(scratchlm):
    done = scratchlm_process("config", "openai-gpt2")
    assert done.stderr == "warning: the preset openai-gpt2 is now called gpt2\n"
    assert done.stdout == scratchlm("config", "gpt2").stdout


def interrupt_soon():
    time.sleep(0.0003)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_never_leaves_a_lock_held():
    # with Python's own handler a third of these do
    condition, interrupted = threading.Condition(), 0
    with interrupts_between_steps():
        for _ in range(30):
            sender = threading.Thread(target=interrupt_soon)
            try:
                sender.start()
                while True:
                    with condition:
                        pass
            except KeyboardInterrupt:
                interrupted += 1
            sender.join()
            assert not condition._is_owned()
    assert interrupted == 30
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_never_cuts_an_import_short(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(99): len('')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with interrupts_between_steps(), pytest.raises(KeyboardInterrupt):
        importlib.import_module("slow_to_import") and time.sleep(10)
    assert "slow_to_import" in sys.modules


@pytest.mark.parametrize("where", ["import scratchlm.cli", "atexit"])
def test_ctrl_c_shows_no_traceback_while_python_starts_or_ends(where, tmp_path):
    interrupt = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    if where == "atexit":
        code = f"import atexit\n@atexit.register\ndef ends():\n    {interrupt}\n"
    else:  # the first module that the command line imports
        (tmp_path / "typer.py").write_text(interrupt)
        code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from scratchlm.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "presets"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert bool(done.stdout) == (where == "atexit")
