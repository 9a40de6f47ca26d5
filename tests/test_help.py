"""`--help` and its kin in a terminal of 80 columns: whole names, groups, examples, every key."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from scratchlm.accounting import SYMBOLS
from scratchlm.cli import app
from scratchlm.cli.help import COMMANDS, EXAMPLES, GROUPS
from scratchlm.cli.settings_help import data_keys, model_keys, train_keys
from scratchlm.cli.terminal import say, tell
from scratchlm.config import ModelConfig
from scratchlm.training import TrainConfig

ROOT = Path(__file__).parent.parent
TOP = typer.main.get_command(app)


def walk(command, path=()):
    """Yield every command with its path."""
    for name, child in getattr(command, "commands", {}).items():
        yield (*path, name), child
        yield from walk(child, (*path, name))


ALL = dict(walk(TOP))


def help_of(path, columns=80):
    context = TOP.make_context("scratchlm", [], resilient_parsing=True)
    command = TOP
    for name in path:
        command = command.commands[name]
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        return command.get_help(context)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


@pytest.mark.parametrize("path", [(), *ALL], ids=" ".join)
def test_help_fits_80_columns_and_cuts_no_name(path):
    text = help_of(path)
    assert max(map(len, text.splitlines())) <= 80
    assert "<bool>" not in text
    assert "<str>" not in text
    command = ALL.get(path, TOP)
    for param in command.params:
        for name in (*param.opts, *param.secondary_opts):
            if name.startswith("--"):
                assert re.search(rf"(?m)^  .*{name}(?![\w-])", text), name
    for name in getattr(command, "commands", {}):
        assert re.search(rf"(?m)^  {name} ", text), name


def test_options_of_the_large_commands_are_in_groups():
    for path, command in ALL.items():
        options = {p.name for p in command.params if p.param_type_name == "option"}
        if len(options) > 12:
            groups = GROUPS[" ".join(path)]
            grouped = {name for names in groups.values() for name in names}
            assert options <= grouped, f"{path}: {options - grouped}"


# These read no weights, or start a run, which is told what it starts from.
NO_CHOICE = {"account", "explain", "compare", "train", "finetune"}


def test_every_command_that_takes_a_run_lets_one_choose_its_checkpoint():
    seen = set()
    for (name, *_), command in ALL.items():
        texts = [getattr(param, "help", None) or "" for param in command.params]
        takes_run = any(re.search(r"\brun\b", text) for text in texts)
        is_model = {"model", "models", "runs"} & {param.name for param in command.params}
        if is_model and takes_run and name not in NO_CHOICE:
            seen.add(name)
            assert "checkpoint" in {param.name for param in command.params}, name
    assert len(seen) == 10


def test_groups_name_what_exists_and_every_command():
    assert {name for names in COMMANDS.values() for name in names} == set(TOP.commands)
    for path, groups in GROUPS.items():
        names = {param.name for param in ALL[tuple(path.split())].params}
        for members in groups.values():
            assert any(member in names for member in members)


def test_every_command_that_takes_something_has_examples():
    for path, command in ALL.items():
        takes = {param.name for param in command.params} - {"help", "as_json"}
        if takes and not hasattr(command, "commands"):
            assert EXAMPLES.get(" ".join(path)), path


def test_no_example_is_given_twice():
    for lines in EXAMPLES.values():
        assert len(set(lines)) == len(lines), lines


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_of_help_are_understood(line):
    words, command = shlex.split(line)[1:], TOP
    context = TOP.make_context("scratchlm", list(words))
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, list(words), parent=context)


# Keys


def test_every_key_has_a_type_a_default_and_a_meaning():
    keys = [*train_keys(), *model_keys(), *data_keys()]
    for key in keys:
        assert key.kind, key
        assert key.default, key
        assert key.meaning, f"{key.name} has no meaning: a comment behind the field will do"
        assert "None" not in key.meaning, key
    names = [key.name for key in keys]
    assert len(set(names)) == len(names)
    assert {f"train.{field.name}" for field in fields(TrainConfig)} <= set(names)
    assert {f"model.{field.name}" for field in fields(ModelConfig)} <= set(names)


def run_cli(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", "from scratchlm.cli import main; main()", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_config_lists_every_key_within_80_columns():
    lists = {"--train": train_keys(), "--model": model_keys(), "--data": data_keys()}
    for option, keys in lists.items():
        text = CliRunner().invoke(app, ["config", option], env={"COLUMNS": "80"}).stdout
        assert max(map(len, text.splitlines())) <= 80
        assert [key.name for key in keys] == re.findall(r"(?m)^\w+\.\S+", text)
        assert "…" not in text
        for key in keys:
            assert f"{key.meaning} ({key.kind}, {key.default})" in " ".join(text.split())
    kinds = {key.name: key.kind for key in model_keys()}
    assert kinds["model.ffn.activation"] == "text"
    assert kinds["model.ffn"] == kinds["model.positions.scaling"] == "table"


def test_the_page_of_settings_is_what_the_code_says():
    path = ROOT / "docs" / "make_settings.py"
    spec = importlib.util.spec_from_file_location("make_settings", path)
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.PAGE.read_text(encoding="utf-8") == make.page(), "run: python docs/make_settings.py"


def test_the_page_of_commands_is_what_help_prints():
    path = ROOT / "docs" / "make_cli.py"
    spec = importlib.util.spec_from_file_location("make_cli", path)
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.PAGE.read_text(encoding="utf-8") == make.page(), "run: python docs/make_cli.py"


def test_the_legend_explains_every_symbol():
    text = run_cli("account", "--legend").stdout
    assert max(map(len, text.splitlines())) <= 80
    for name, meaning in SYMBOLS.items():
        assert re.search(rf"(?m)^{re.escape(name)} +{re.escape(meaning.split()[0])}", text), name


def test_errors_use_the_words_of_the_command_line():
    from scratchlm.cli.errors import one_line
    from scratchlm.inference import Sampling
    from scratchlm.tokenizer import train_bpe

    values = {"top_k": 0, "top_p": 2.0, "min_p": 2.0, "presence_penalty": float("nan")}
    for wrong in [{name: value} for name, value in values.items()]:
        with pytest.raises(ValueError) as error:
            Sampling(**wrong)
        (name,) = wrong
        assert "--" + name.replace("_", "-") in one_line(error.value)
        assert name not in one_line(error.value)
    with pytest.raises(ValueError) as error:
        Sampling(temperature=-1.0)
    told = "--temperature must be finite and at least 0; got --temperature=-1.0"
    assert one_line(error.value) == told
    with pytest.raises(ValueError) as error:
        train_bpe([], 10)
    assert one_line(error.value).startswith("--vocab-size must be from 256")
    told = one_line(ValueError("must fit (past_context='slide' forgets the oldest)"))
    assert told == "must fit (--past-context slide forgets the oldest)"


def test_lines_for_a_terminal_break_between_words(monkeypatch, capsys):
    text = "a path /with/a-very-long-name-that-goes-on/and-on " * 4
    short = "  two  columns"
    monkeypatch.setenv("COLUMNS", "60")
    for stream, speak in ((sys.stderr, lambda line: say(line, err=True)), (sys.stdout, tell)):
        speak(text)
        assert text + "\n" in capsys.readouterr()  # not a terminal: one line
        with monkeypatch.context() as patch:
            patch.setattr(stream, "isatty", lambda: True, raising=False)
            speak(f"{text}\n{short}")
        told = "".join(capsys.readouterr()).splitlines()
        assert told[-1] == short
        assert len(told) > 2
        assert max(map(len, told)) <= 60
        assert " ".join(" ".join(told[:-1]).split()) == " ".join(text.split())
