"""`scratchlm train`, `evaluate` and `compare` as a person uses them."""

import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace

import pytest
import torch

from check.command import run as run_command
from scratchlm import acceleration
from scratchlm.checkpoint import find_checkpoints, read_config, verify_checkpoint
from scratchlm.cli import training_setup
from scratchlm.cli.device import choose_device
from scratchlm.ops import native
from scratchlm.training import read_metrics
from scratchlm.training.choosing import choose_settings
from training.tiny import log_of, write_data

WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "hill", ".", "the"]
SMALL = ("model.d_model=16", "model.num_heads=2", "model.num_layers=1", "model.context_length=8")


@pytest.fixture
def text(tmp_path):
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, len(WORDS), (4_000,), generator=generator)
    path = tmp_path / "my.txt"
    path.write_text(" ".join(WORDS[i] for i in picks))
    return path


def test_from_text_to_a_model_a_report_and_an_evaluation(cli, tmp_path, text):
    run = tmp_path / "run"
    code, out, err = cli("train", text, "--out", run, "--steps", 30, "--vocab-size", 280, *SMALL)
    assert code == 0, err
    assert out.strip() == str(run / "report.html")
    assert "learning a vocabulary of 280 tokens" in err
    assert re.search(r"step 30: held-out \d\.\d+ .* bits/byte", err)
    code, explained, _ = cli("explain", run, "--device", "cpu")
    assert code == 0
    assert re.search(r"cpu_runner +runs", explained)
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["model"]["d_model"] == 16
    assert config["model"]["vocab_size"] == 280
    assert config["train"]["steps"] == 30
    assert config["data"] == {
        "train": "data/train.bin",
        "val": "data/val.bin",
        "tokenizer": "data/tokenizer.json",
    }
    newest = find_checkpoints(run)[-1]
    verify_checkpoint(newest)
    assert (newest / "tokenizer.json").read_bytes() == (run / "data/tokenizer.json").read_bytes()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    page = (run / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    samples = [line for line in read_metrics(run) if "samples" in line]
    assert len(samples) > 10
    for step in (0, 30):
        assert f"<h3>step {step}</h3>" in page

    code, out, _ = cli("evaluate", run, run / "data", "--json")
    assert code == 0
    found = json.loads(out)
    lines = [line for line in read_metrics(run) if "val_loss" in line]
    assert found["loss"] == pytest.approx(lines[-1]["val_loss"], rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(lines[-1]["bits_per_byte"], rel=1e-5)
    code, out, _ = cli("evaluate", run, text)
    assert code == 0
    assert re.search(r"bytes +" + f"{text.stat().st_size:,}", out)

    code, _, err = cli("train", text, "--out", run)
    assert code == 2
    assert "holds a run already: --resume goes on with it" in err
    before = log_of(run)
    code, _, err = cli("train", "--resume", "--out", run)
    assert code == 0
    assert "finished at step 30" in err
    assert log_of(run) == before


COMMON = ("--steps", 8, *SMALL, "train.save_every=8")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Train what ablations are compared with, once."""
    folder = tmp_path_factory.mktemp("ablations")
    data = write_data(folder / "data")
    assert run_command("train", data, *COMMON, "--out", folder / "base").status == 0
    return folder


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("no-rope", lambda table: table["positions"]["type"] == "none"),
        ("no-norm", lambda table: table["norm"]["type"] == "none"),
        ("post-norm", lambda table: table["norm_placement"] == "post"),
        ("silu", lambda table: table["ffn"]["type"] == "mlp" and table["d_ff"] == 96),
        ("tied-embeddings", lambda table: table["tie_embeddings"]),
    ],
)
def test_an_ablation_changes_one_thing_and_compare_draws_it(cli, base, name, check):
    words = ("train", base / "data", *COMMON, "--out", base / name, "--ablation", name)
    assert cli(*words)[0] == 0
    table = tomllib.loads((base / name / "config.toml").read_text())["model"]
    assert check(table)
    picture = base / f"{name}.png"
    code, out, _ = cli("compare", base / "base", base / name, "--out", picture)
    assert code == 0
    told = out.partition(f"{name} differs from base: ")[2]
    differs = {word.strip(",") for word in told.split() if word.startswith(("model.", "train."))}
    allowed = {"model.d_ff", "model.ffn"} if name == "silu" else set()
    assert len(differs - allowed) == (0 if name == "silu" else 1), differs
    assert picture.read_bytes().startswith(b"\x89PNG")
    if name == "tied-embeddings":
        assert told.startswith("model.tie_embeddings False → True")
    if name == "silu":  # matched parameters
        counts = [line.split()[1] for line in out.splitlines()[1:3]]
        assert counts[0] == counts[1]


def test_presets_sizes_configs_and_overrides(cli, tmp_path):
    data = write_data(tmp_path / "data")
    short = ("--steps", 1, "train.batch_size=1")
    wanted = tmp_path / "wanted.toml"
    wanted.write_text("[model]\nd_model = 32\nnum_heads = 4\n[train]\nlr = 0.5\nseed = 7\n")
    code, _, err = cli(
        "train", data, "--out", tmp_path / "a", "--config", wanted, *short, "train.seed=8",
        "--set", "model.ffn.type=moe", "--set", "model.ffn.num_experts=4",
        "--set", "model.ffn.experts_per_token=2", "--set", "train.betas=[0.8, 0.9]",
    )  # fmt: skip
    assert code == 0, err
    config = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert config["model"]["d_model"] == 32
    assert config["model"]["d_ff"] == 128  # followed d_model
    assert config["model"]["ffn"]["num_experts"] == 4
    assert (config["train"]["lr"], config["train"]["seed"]) == (0.5, 8)
    assert config["train"]["betas"] == [0.8, 0.9]
    assert config["model"]["vocab_size"] == 12  # the data's

    assert cli("train", data, "--out", tmp_path / "b", "--params", "200k", *short)[0] == 0
    model = read_config(find_checkpoints(tmp_path / "b")[-1])
    from scratchlm.accounting import count_parameters

    assert count_parameters(model).unique == pytest.approx(200_000, rel=0.2)
    changes = ("model.num_layers=1", "model.d_model=24", "model.context_length=8")
    assert cli("train", data, "--out", tmp_path / "c", "--preset", "gpt2", *changes, *short)[0] == 0
    model = read_config(find_checkpoints(tmp_path / "c")[-1])
    assert (model.num_heads, model.d_model, model.vocab_size) == (12, 24, 12)


@pytest.mark.parametrize(
    ("choice", "accelerated"),
    [((), True), (("--no-accelerate",), False), (("train.accelerate=false",), False)],
    ids=["default", "flag", "setting"],
)
def test_a_run_is_accelerated_unless_told_not_to(cli, tmp_path, monkeypatch, choice, accelerated):
    calls, real = [], acceleration.accelerate
    monkeypatch.setattr(acceleration, "accelerate", lambda m: (calls.append(1), real(m))[1])
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    command = ("train", data, "--out", run, "--steps", 1, *SMALL, *choice)
    code, _, err = cli(*command)
    assert code == 0, err
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["train"]["accelerate"] == accelerated
    assert bool(calls) == accelerated


def test_settings_that_cannot_apply_are_one_line_and_leave_no_run(cli, tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    for setting, message in (
        ("train.cuda_graph=true", "train.cuda_graph needs a CUDA device; the model is on cpu"),
        ("train.precision=fp8", "train.precision=fp8 needs a CUDA device; the model is on cpu"),
        ("train.checkpointed_layers=1", "train.checkpointed_layers needs train.checkpointing"),
    ):
        code, _, err = cli("train", data, "--out", run, "--device", "cpu", *SMALL, setting)
        assert code == 2
        assert err.splitlines()[-1] == f"error: {message}"
        assert not (run / "config.toml").exists()


def test_a_config_file_may_set_everything(cli, tmp_path):
    data = write_data(tmp_path / "data")
    wanted = tmp_path / "all.toml"
    wanted.write_text(
        "[model]\nvocab_size = 12\ncontext_length = 8\nd_model = 8\nnum_layers = 1\n"
        f'num_heads = 1\n[train]\nsteps = 2\n[data]\ntrain = "{data}/train.bin"\n'
    )
    assert cli("train", "--config", wanted, "--out", tmp_path / "run")[0] == 0
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line] == [1, 2]


WRONG = {
    "no data": ((), "what to train on?"),
    "missing file": (("/nowhere/x.txt",), "/nowhere/x.txt: no such file"),
    "unknown preset": (("DATA", "--preset", "gpt3"), "did you mean 'gpt2"),
    "two models": (("DATA", "--preset", "gpt2", "--params", "1M"), "not by both"),
    "no count": (("DATA", "--params", "many"), "expected a count such as 10M"),
    "tiny count": (("DATA", "--params", "7"), "no model of about 7 parameters"),
    "unknown key": (("DATA", "model.d_modl=3"), "unknown config key: d_modl"),
    "unknown train key": (("DATA", "train.learning=3"), "unknown config key: train.learning"),
    "unknown section": (("DATA", "--set", "optim.lr=3"), "begins with model., train. or data."),
    "no value": (("DATA", "--set", "train.lr"), "section.key=value; got 'train.lr'"),
    "word for number": (("DATA", "train.lr=big"), "train.lr must be a number; got train.lr='big'"),
    "negative": (("DATA", "train.steps=-1"), "train.steps must be >= 1; got train.steps=-1"),
    "bad width": (("DATA", "model.d_model=33", "model.num_heads=2"), "divisible by num_heads"),
    "bad schedule": (("DATA", "train.schedule=up"), "schedule must be one of cosine, wsd"),
    "bad ablation": (("DATA", "--ablation", "no-brain"), "ablation must be one of no-rope"),
    "no device": (("DATA", "--device", "tpu"), "--device must be cpu, cuda"),
    "too small": (("DATA", "model.context_length=1000"), "is too small: it holds 600 tokens"),
    "vocabulary": (("DATA", "model.vocab_size=5"), "the model's vocab_size is 5"),
    "no tokenizer": (("TEXT", "--tokenizer", "nope"), "nope does not exist"),
    "empty": (("EMPTY",), "the file is empty"),
    "binary": (("BINARY",), "BINARY"),
    "bad ops": (
        ("DATA", "--ops", "slow"),
        "--ops must be one of reference, fast; got 'slow'",
    ),
    "micro": (("DATA", "train.micro_batch_size=999"), "must not exceed batch_size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_user_errors_are_one_line_and_leave_no_run(cli, tmp_path, name):
    arguments, message = WRONG[name]
    paths = {
        "DATA": write_data(tmp_path / "data"),
        "TEXT": tmp_path / "TEXT",
        "EMPTY": tmp_path / "EMPTY",
        "BINARY": tmp_path / "BINARY",
    }
    paths["TEXT"].write_text("some words " * 100)
    paths["EMPTY"].write_bytes(b"")
    paths["BINARY"].write_bytes(bytes(range(256)))
    code, _, err = cli("train", *(paths.get(a, a) for a in arguments), "--out", tmp_path / "run")
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert message in lines[0]
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(("context", "told"), [(48, True), (8, False)])
def test_a_run_says_why_its_attention_is_slower(cli, tmp_path, text, monkeypatch, context, told):
    monkeypatch.setattr(native, "_loaded", lambda *source: (None, "no C++ compiler"))
    size = (*SMALL[:3], f"model.context_length={context}")
    command = ("train", text, "--out", tmp_path / "run", "--steps", 1, "--vocab-size", 280, *size)
    code, _, err = cli(*command)
    assert code == 0, err
    assert ("ours is not available: no C++ compiler" in err) == told


def test_a_gpu_that_is_named_becomes_the_current_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(ValueError, match="end at cuda:1"):
        choose_device("cuda:2")
    assert choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")
    assert len(current) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["train.lr=-1"], "lr must be"),
        (["train.speed=9"], "unknown config key: train.speed"),
        (["train.betas=3"], "train.betas must be two numbers; got train.betas=3"),
        (["train.steps=5", "train.warmup_steps=6"], "warmup_steps must not exceed steps"),
        (["--device", "cpu", "train.cuda_graph=true"], "train.cuda_graph needs a CUDA device"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_text_is_read(cli, tmp_path, text, wrong, message):
    code, _, err = cli("train", text, "--out", tmp_path / "run", *SMALL, *wrong)
    assert code != 0
    assert message in err
    assert "vocabulary" not in err
    assert not list(tmp_path.rglob("*.bin"))


def test_a_setting_valid_with_later_defaults_is_not_refused_early(cli, tmp_path, text, monkeypatch):
    def few_steps(*arguments):
        return replace(choose_settings(*arguments), steps=2, warmup_steps=2)

    monkeypatch.setattr(training_setup, "choose_settings", few_steps)
    given = ("train.warmup_steps=1", "train.micro_batch_size=1", "train.min_lr=1e-5")
    run = tmp_path / "run"
    code, _, err = cli("train", text, "--out", run, "--vocab-size", 280, *SMALL, *given)
    assert code == 0, err


def test_ids_outside_the_vocabulary_and_changed_files_are_refused_at_the_start(cli, tmp_path):
    data = write_data(tmp_path / "data")
    with open(data / "train.bin", "r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff")
    code, _, err = cli("train", data, "--out", tmp_path / "run", *SMALL)
    assert code == 2
    assert "id 65535 is not below vocab_size=12" in err
    with open(data / "train.bin", "r+b") as file:
        file.seek(200)
        file.write(b"\x05\x00")
    code, _, err = cli("train", data, "--out", tmp_path / "run", *SMALL)
    assert code == 2
    assert "CRC-32" in err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_resume_refuses_a_changed_config(cli, tmp_path):
    data = write_data(tmp_path / "data")
    run = tmp_path / "run"
    begin = ("train", data, "--out", run, "--steps", 4, *SMALL, "train.lr=0.004")
    assert cli(*begin)[0] == 0
    code, _, err = cli("train", "--resume", "--out", run, "train.lr=1.0")
    assert code == 2
    assert "train.lr cannot change in a run that was begun" in err
    code, _, err = cli("train", "--resume", "--out", run, "--preset", "gpt2")
    assert code == 2
    assert "was begun otherwise; it cannot change now" in err
    code, _, err = cli("train", "--resume", "--out", run, "--ablation", "no-rope")
    assert code == 2
    code, _, err = cli(*begin, "--resume")
    assert code == 0, err
    assert f"going on with the run's own data, {data}" in err
    code, _, err = cli("train", "--resume", "--out", run, "--steps", 6)
    assert code == 0
    assert "going on from step 4" in err
    write_data(tmp_path / "data", seed=1)
    code, _, err = cli("train", "--resume", "--out", run, "--steps", 8)
    assert code == 2
    assert "the train token file has changed since step-00000006" in err
    verify_checkpoint(find_checkpoints(run)[-1])


def test_a_damaged_checkpoint_is_named_on_stderr(cli, tmp_path):
    data = write_data(tmp_path / "data")
    run = tmp_path / "run"
    assert cli("train", data, "--out", run, "--steps", 4, *SMALL, "train.save_every=2")[0] == 0
    (find_checkpoints(run)[-1] / "model.safetensors").write_bytes(b"")
    code, _, err = cli("train", "--resume", "--out", run)
    assert code == 0
    assert "warning: " in err
    assert "step-00000004/model.safetensors is damaged" in err


def test_a_nan_names_the_step(cli, tmp_path):
    data = write_data(tmp_path / "data")
    code, _, err = cli(
        "train", data, "--out", tmp_path / "run", "--steps", 50, *SMALL,
        "train.lr=1e30", "train.clip=0", "train.warmup_steps=0", "model.norm.type=none",
    )  # fmt: skip
    assert code == 2
    assert re.search(r"error: step \d+: the (loss|gradient norm) is (nan|inf)", err)


def test_tensorboard_gets_what_metrics_gets(cli, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    code, _, err = cli("train", data, "--out", run, "--steps", 6, *SMALL, "--tensorboard")
    assert code == 0, err
    log = EventAccumulator(str(run / "tensorboard"))
    log.Reload()
    steps = [record for record in read_metrics(run) if "loss" in record]
    logged = log.Scalars("train/loss")
    assert [event.step for event in logged] == [record["step"] for record in steps]
    assert [event.value for event in logged] == pytest.approx([r["loss"] for r in steps])
    assert {"train/lr", "train/grad_norm", "held-out/val_loss"} <= set(log.Tags()["scalars"])


def test_tensorboard_shows_a_repeated_step_once(cli, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    begin = ("train", data, "--out", run, *SMALL, "--tensorboard", "train.save_every=1")
    assert cli(*begin, "--steps", 4)[0] == 0
    (find_checkpoints(run)[-1] / "model.safetensors").write_bytes(b"")  # so step 4 is made again
    code, _, err = cli("train", "--resume", "--out", run, "--steps", 6, "--tensorboard")
    assert code == 0, err
    assert "going on from step 3" in err
    log = EventAccumulator(str(run / "tensorboard"))
    log.Reload()
    assert [event.step for event in log.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_without_its_package_tensorboard_is_refused_before_any_work(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("scratchlm.cli.training_console.find_spec", lambda name: None)
    data = write_data(tmp_path / "data")
    code, _, err = cli("train", data, "--out", tmp_path / "run", *SMALL, "--tensorboard")
    assert code == 2
    assert err == (
        "error: --tensorboard needs the package tensorboard: pip install 'scratchlm[tensorboard]'\n"
    )
    assert not (tmp_path / "run").exists()


def test_evaluate_and_compare_refuse_what_they_cannot_use(cli, tmp_path):
    data = write_data(tmp_path / "data")
    run = tmp_path / "run"
    assert cli("train", data, "--out", run, "--steps", 2, *SMALL)[0] == 0
    code, out, _ = cli("evaluate", run, data / "val.bin")
    assert code == 0
    assert re.search(r"bits per byte +unknown", out)
    for arguments, message in (
        (("evaluate", tmp_path / "nowhere", data), "no such run"),
        (("evaluate", run, tmp_path / "nowhere.bin"), "no such token file"),
        (("evaluate", run, data, "--context-length", 9), "must not exceed the model's 8"),
        (("compare", tmp_path), "no metrics.jsonl there"),
    ):
        code, _, err = cli(*arguments)
        assert code == 2
        assert message in err
        assert len(err.splitlines()) == 1


@pytest.fixture
def make_disk(tmp_path):
    """Make a real file system of a given size, where this user may mount one."""
    made = []

    def make(size):
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("no small disk can be mounted here")
        made.append(disk)
        return disk

    yield make
    for disk in made:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_the_old_checkpoint_stays_whole(cli, tmp_path, make_disk):
    data, run = write_data(tmp_path / "data"), make_disk("160k") / "run"
    code, _, err = cli(
        "train", data, "--out", run, "--steps", 60, *SMALL, "train.save_every=10",
        "train.eval_every=10", "train.keep_last=50",
    )  # fmt: skip
    assert code == 2
    assert "No space left on device" in err.splitlines()[-1]
    found = find_checkpoints(run)
    assert found
    for path in found:
        verify_checkpoint(path)
    assert not list((run / "checkpoints").glob(".*"))


def test_a_read_only_disk_is_one_line(cli, tmp_path, make_disk):
    data, disk = write_data(tmp_path / "data"), make_disk("4m")
    run = disk / "run"
    assert cli("train", data, "--out", run, "--steps", 2, *SMALL)[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    code, _, err = cli("train", "--resume", "--out", run, "--steps", 4)
    assert code == 2
    assert err.splitlines()[-1] == f"error: {run}/.lock: Read-only file system"
    verify_checkpoint(find_checkpoints(run)[-1])
