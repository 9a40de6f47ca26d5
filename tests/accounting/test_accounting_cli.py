"""`scratchlm account` as a person uses it, and the page in docs."""

import csv
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scratchlm.accounting import MACHINES, Setup, plans
from scratchlm.cli import app
from scratchlm.cli.account_models import find_model, parse_bytes, parse_count
from scratchlm.cli.account_tables import human, seconds_text
from scratchlm.config import preset, to_json, to_toml
from scratchlm.errors import ScratchLMError

DOCS = Path(__file__).parents[2] / "docs"


def run(*arguments):
    result = CliRunner().invoke(app, ["account", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments):
    result = CliRunner().invoke(app, ["account", *arguments])
    assert isinstance(result.exception, ValueError | TypeError | OSError | ScratchLMError), (
        result.output
    )
    return str(result.exception)


def test_the_worked_example_is_in_the_tables():
    text = run("cs336-gpt2-xl")
    for number in (
        "2,127,057,600",
        "8.51 GB",
        "20,971,520,000",
        "6,710,886,400",
        "62,914,560,000",
        "90,596,966,400",
        "4,348,654,387,200",
        "164,682,137,600",
        "4,513,336,524,800",
    ):
        assert number in text


def test_what_a_small_model_takes_is_not_called_nothing():
    text = run("demo")
    assert "0.97 MB fp32" in text  # 242,112 parameters, 4 bytes each
    assert "< $0.01" in text
    assert "0.00 GB" not in text


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["gpt2-xl", "--phase", "training", "--batch", "8", "--checkpointing", "block"],
        ["qwen3-30b-a3b", "--phase", "decode"],
        ["--compare", "gpt2", "llama3-8b", "qwen3-30b-a3b"],
        ["gpt2-xl", "--fits", "24GiB"],
        ["gpt2", "--phase", "generation", "--convention", "causal"],
        ["llama3-8b", "--gpus", "64", "--parallel", "fsdp", "--tp", "4", "--phase", "training"],
        ["qwen3-30b-a3b", "--plans", "--gpu", "h200", "--batch", "4"],
    ],
    ids=lambda a: a[0] if isinstance(a, list) else a,
)
def test_tables_fit_the_terminal_and_cut_nothing(arguments, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    text = run(*arguments)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= int(columns)


def test_json_holds_every_item_with_its_formula():
    table = json.loads(run("cs336-gpt2-xl", "--json", "--gpu", "h200"))
    assert table["parameters"]["unique"] == 2_127_057_600
    forward = table["flops"]["full"]
    assert forward["value"] == 4_513_336_524_800
    layers = forward["children"][0]
    assert layers["times"] == 48
    assert layers["children"][1]["symbols"] == "4·B·S²·H·d_h"
    assert table["roofline"]["machine"] == "h200"
    assert table["training_run"]["mfu"]["peak"].startswith("h200 bf16")


def test_several_gpus_are_zero1_unless_said_and_the_output_says_so():
    text = run("gpt2", "--gpus", "8", "--phase", "training")
    assert "zero1 on 8 × h100-sxm" in text
    assert "zero1 is what several GPUs do unless --parallel says otherwise" in text
    assert "a projection, not a measurement" in text
    asked = run("gpt2", "--gpus", "8", "--phase", "training", "--parallel", "ddp")
    assert "ddp on 8" in asked
    assert "unless --parallel" not in asked


def test_json_holds_every_collective_with_its_formula():
    command = ["llama3-8b", "--gpus", "16", "--parallel", "fsdp", "--tp", "4", "--json"]
    table = json.loads(run(*command, "--link", "100"))["projection"]
    assert table["is_measured"] is False
    blocks = next(c for c in table["collectives"] if c["name"] == "blocks, forward")
    assert (blocks["kind"], blocks["count"], blocks["ranks"]) == ("all-gather", 32, 4)
    assert blocks["formula"] == "m·L·b_a·N_layer"
    assert table["data_rate"] == table["tensor_rate"] == 100e9
    assert "projection" not in json.loads(run("gpt2", "--json"))


def test_plans_as_csv_are_those_of_python():
    rows = list(csv.DictReader(io.StringIO(run("gpt2", "--plans", "--csv", "--mfu", "0.5"))))
    expected = plans(preset("gpt2"), Setup(), MACHINES["h100-sxm"], 0.5)
    assert [row["plan"] for row in rows] == [plan.name for plan in expected]
    assert [int(row["memory_bytes"]) for row in rows] == [plan.memory for plan in expected]
    assert {row["gpus"] for row in rows} == {str(8 * 2**n) for n in range(8)}


def test_csv_rows_sum_up():
    rows = list(csv.DictReader(io.StringIO(run("gpt2-xl", "--csv"))))
    full = {row["item"]: row for row in rows if row["section"] == "flops full"}
    parts = int(full["forward/layers"]["value"]) + int(full["forward/LM head"]["value"])
    assert parts == int(full["forward"]["value"])


def test_a_sweep_as_csv_has_plain_numbers():
    text = run("cs336-gpt2-xl", "--sweep", "context_length=1024..131072", "--csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [int(row["context_length"]) for row in rows] == [1024 * 2**n for n in range(8)]
    assert float(rows[4]["share attention"]) == pytest.approx(0.552, abs=0.001)


@pytest.mark.parametrize(
    "arguments", [["gpt2"], ["--compare", "gpt2", "gpt2-xl"], ["gpt2", "--sweep", "batch=1..8"]]
)
@pytest.mark.parametrize("convention", ["full", "6ND"])
def test_plots_are_drawn(arguments, convention, tmp_path):
    run(*arguments, "--plot", str(tmp_path / "x.png"), "--convention", convention)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_verify_prints_equal_numbers():
    text = run("cs336-gpt2", "--verify", "--context", "64")
    assert text.count("equal") == 14
    assert "grouped matmuls of experts" in text


# Which model


def test_a_model_comes_from_a_preset_a_file_or_a_directory(tmp_path):
    gpt2 = preset("gpt2")
    (tmp_path / "a.toml").write_text(to_toml(gpt2))
    (tmp_path / "config.json").write_text(to_json(gpt2))
    for name in ("gpt2", tmp_path / "a.toml", tmp_path / "config.json", tmp_path):
        assert find_model(str(name)) == gpt2


def test_a_hugging_face_config_needs_no_weights(tmp_path):
    from transformers import Qwen3Config

    theirs = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    theirs.save_pretrained(tmp_path)
    table = json.loads(run(str(tmp_path / "config.json"), "--json"))
    assert table["parameters"]["unique"] == 596_049_920


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "a JSON object was expected"),
        ('{"vocab_size": 5}', "missing config key: context_length"),
        ('{"model_type": "gpt2"}', "n_embd is missing"),
        ('{"model_type": "bert"}', "model_type must be one of"),
        ('{"vocab_size": -1, "context_length": 1, "d_model": 1, "num_layers": 1, "num_heads": 1}',
         "vocab_size must lie between"),
    ],
)  # fmt: skip
def test_a_malformed_config_names_its_key(content, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    message = refusal(str(path))
    assert says in message
    assert "config.json" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gtp2"], "did you mean 'gpt2'"),
        (["gpt2", "gpt2-xl"], "several models need --compare"),
        (["gpt2", "--phase", "x"], "--phase must be one of"),
        (["gpt2", "--convention", "x"], "--convention must be one of"),
        (["gpt2", "--dtype", "int3"], "--dtype must be one of"),
        (["gpt2", "--batch", "0"], "--batch must lie between"),
        (["gpt2", "--gpu", "h300"], "did you mean"),
        (["gpt2", "--gpus", "0"], "--gpus must lie between"),
        (["gpt2", "--fits", "24XB"], "a memory is a number"),
        (["gpt2", "--fits", "0GiB"], "greater than 0"),
        (["gpt2", "--tokens", "many"], "a number of tokens"),
        (["gpt2", "--mfu", "1.5"], "--mfu must lie"),
        (["gpt2", "--sweep", "colour=1..2"], "a sweep is"),
        (["gpt2", "--documents", "1,2"], "--documents must fill"),
        (["gpt2", "--documents", "a"], "documents are lengths"),
        (["gpt2", "--plot", "x.tiff3"], "a plot must end"),
        (["gpt2", "--json", "--csv"], "exclude each other"),
        (["gpt2", "--checkpointing", "x"], "--checkpointing must be one of"),
        (["gpt2", "--gpus", "8", "--parallel", "zero3"], "--parallel must be one of"),
        (["gpt2", "--gpus", "8", "--tp", "3"], "--gpus must be divisible by tp; got --gpus=8"),
        (["gpt2", "--gpus", "8", "--tp", "8"], "num_heads divisible by tp; got num_heads=12, tp=8"),
        (["gpt2", "--gpus", "8", "--tp", "4", "--parallel", "tp"], "with fewer, say zero1 or fsdp"),
        (
            ["gpt2", "--gpus", "8", "--link", "-1"],
            "--link must be from 1e-09 to 1e+09 GB/s; got -1 GB/s",
        ),
        (["gpt2", "--gpus", "8", "--micro-batches", "0"], "--micro-batches must lie between"),
        (["gpt2", "--lora", "0"], "--lora must be a whole number >= 1; got --lora=0"),
        (["gpt2", "--verify", "--json"], "--json has no effect beside --verify"),
        (["gpt2", "--fits", "24GiB", "--plot", "x.png"], "--plot has no effect beside --fits"),
        (["gpt2", "--fits", "24GiB", "--compare"], "--compare and --fits exclude each other"),
        (["gpt2", "--lora", "4", "--verify"], "--verify and --lora exclude each other"),
        (["gpt2", "--new-tokens", "8"], "--new-tokens is for --phase generation or generation-no-"),
        (["gpt2", "--prompt", "8", "--phase", "decode"], "--prompt is for --phase prefill or gen"),
        (["gpt2", "--link", "50"], "--link is for several GPUs: --gpus, or --plans"),
        (["gpt2", "--plans", "--gpus", "8"], "--plans shows 8 to 1,024 GPUs"),
    ],
)
def test_bad_input_is_one_line(arguments, says):
    message = refusal(*arguments)
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("shown", ["--fits 24GiB", "--lora 4", "--plans", "--phase decode"])
def test_options_without_effect_on_what_is_shown_are_named(shown):
    options = {"--convention": "6ND", "--gpu": "a100-80g", "--tokens": "1B", "--mfu": "0.3"}
    options |= {"--price": "2", "--optimizer": "sgd", "--loss": "unfused", "--micro-batches": "4"}
    words, told = ["account", "gpt2", *shown.split()], []
    before = CliRunner().invoke(app, words)
    assert not before.stderr
    for option, value in options.items():
        now = CliRunner().invoke(app, [*words, option, value])
        assert (now.stdout == before.stdout) == ("no effect" in now.stderr), option
        told += now.stderr.splitlines()
    beside = shown if "phase" in shown else shown.split()[0]
    assert set(told) <= {f"warning: {option} has no effect beside {beside}" for option in options}
    assert told


def test_an_error_is_one_line_on_stderr_and_status_2():
    command = [sys.executable, "-c", "from scratchlm.cli import main; main()", "account", "gpt3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: unknown preset 'gpt3'; did you mean")
    assert done.stderr.count("\n") == 1


def test_accounting_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from scratchlm.accounting import account; from scratchlm.config import preset;"
        "account(preset('llama3-8b'), machine='h200', phase='training');"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'rich', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_with_units_are_parsed():
    assert parse_bytes("24GiB") == 24 * 2**30
    assert parse_bytes("80 GB") == 80 * 10**9
    assert parse_bytes("512") == 512
    assert parse_count("300B") == 300 * 10**9
    assert parse_count("1.5T") == 15 * 10**11
    assert parse_count("1e9") == parse_count("1_000_000_000") == 10**9
    assert human(4_513_336_524_800) == "4.51 T"
    assert human(8 * 2**30, "bytes") == "8 GiB"
    assert human(0) == "0"
    assert seconds_text(0.0032) == "3.2 ms"
    assert seconds_text(20 * 86_400) == "20.0 days"


# The page


def test_the_page_in_docs_is_what_the_tool_writes():
    spec = importlib.util.spec_from_file_location("make_accounting", DOCS / "make_accounting.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert (DOCS / "accounting.md").read_text(encoding="utf-8") == make.page()
    for picture in ("family", "contexts", "gpt2-xl"):
        assert (DOCS / "accounting" / f"{picture}.png").exists()
