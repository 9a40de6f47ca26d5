"""What a new user types first: the wrong thing is refused at once, the right one does its work."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from check.command import run as run_command
from scratchlm.checkpoint import choose_checkpoint, find_checkpoints, read_manifest, step_of
from scratchlm.cli.training_checks import leaving_nothing
from scratchlm.config import LayerNorm, MoE, Rotary
from scratchlm.inference import load_model
from scratchlm.training import read_metrics, read_plan
from training.tiny import write_data

SMALL = ("model.d_model=16", "model.num_heads=2", "model.num_layers=1", "model.context_length=8")
TEXT = "the cat sat on the mat and the dog ran to the hill. " * 60


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def overtrained(tmp_path_factory):
    """A run whose last checkpoint is worse than its best: it learnt few words by heart."""
    folder = tmp_path_factory.mktemp("overtrained")
    run, text, val = folder / "over", folder / "my.txt", folder / "val.txt"
    text.write_text(TEXT)
    val.write_text("".join(reversed(TEXT)))
    words = ("tokenizer", "train", text, "--vocab-size", 270, "--out", folder / "tok")
    assert run_command(*words).status == 0
    for name, source in (("a", text), ("b", val)):
        options = ("--tokenizer", folder / "tok", "--out", folder / name, "--val-fraction", 0)
        assert run_command("prepare", source, *options).status == 0
    held_out = folder / "b" / "train.bin"
    settings = ("train.lr=0.03", "train.eval_every=5", "train.eval_batches=0", "train.batch_size=8")
    command = ("train", folder / "a", "--val", held_out, "--out", run, "--steps", 40)
    found = run_command(*command, *SMALL, *settings)
    assert found.status == 0, found.stderr
    return run, held_out, found.stderr


def test_every_command_takes_the_best_checkpoint_and_says_so(cli, tmp_path, overtrained):
    run, held_out, told = overtrained
    losses = {line["step"]: line["val_loss"] for line in read_metrics(run) if "val_loss" in line}
    best = min(losses, key=losses.get)
    assert 0 < best < 40, "the run must have become worse, or it shows nothing"
    assert f"the held-out loss has risen since step {best}" in told
    assert re.search(r"step 40: held-out .*best \+\d\.\d+", told)
    note = f"checkpoint: step {best}, the best on held-out data (--checkpoint last: step 40)"

    assert step_of(load_model(run).source) == best
    assert step_of(load_model(run, checkpoint="last").source) == 40
    code, out, err = cli("evaluate", run, held_out, "--json")
    assert code == 0
    assert json.loads(out)["loss"] == pytest.approx(losses[best], rel=1e-5)
    assert note in err
    code, out, err = cli("evaluate", run, held_out, "--json", "--checkpoint", "last")
    assert json.loads(out)["loss"] == pytest.approx(losses[40], rel=1e-5)
    assert "checkpoint: step 40, the last" in err
    for command in (
        ("generate", run, "--prompt", "the", "--max-new-tokens", 3),
        ("next", run, "--prompt", "the"),
        ("inspect", run, "--prompt", "the"),
        ("export", run, tmp_path / "hf"),
    ):
        code, _, err = cli(*command)
        assert code == 0, err
        assert note in err
    exported, tokens = load_model(tmp_path / "hf").model, torch.arange(8)[None]
    torch.testing.assert_close(exported(tokens), load_model(run, checkpoint=best).model(tokens))


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(cli, overtrained):
    run, _, _ = overtrained
    steps = ", ".join(str(step_of(path)) for path in find_checkpoints(run))
    code, _, err = cli("generate", run, "--checkpoint", 7)
    assert code == 2
    assert f"keeps no checkpoint of step 7; it has {steps}" in err
    code, _, err = cli("generate", run, "--checkpoint", "newest")
    assert code == 2
    assert "a checkpoint is best, last or a step; got 'newest'" in err
    code, _, err = cli("generate", find_checkpoints(run)[0], "--checkpoint", "last")
    assert code == 2
    assert "not a run" in err


def test_a_damaged_best_checkpoint_is_reported_and_the_last_taken(overtrained, tmp_path):
    run = shutil.copytree(overtrained[0], tmp_path / "damaged")
    (choose_checkpoint(run) / "model.safetensors").write_bytes(b"damaged")
    told = []
    assert step_of(choose_checkpoint(run, warn=told.append)) == 40
    assert "the best checkpoint cannot be used" in told[0]


def test_the_epochs_of_a_run_are_said_and_its_throughput_is_the_mean(cli, overtrained, tmp_path):
    run, _, told = overtrained
    plan, last = read_plan(run), [line for line in read_metrics(run) if "loss" in line][-1]
    tokens = json.loads(plan.data.train.with_suffix(".json").read_text())["count"]
    assert f"{40 * 8 * 8 / tokens:.3g} epochs" in told
    mean = last["tokens"] / last["clock"]["seconds"]
    page = (run / "report.html").read_text()
    assert f"<b>{mean:,.0f}</b><span>tokens per second" in page
    code, out, _ = cli("compare", run, "--out", tmp_path / "c.png")
    assert code == 0
    assert f"{mean:,.0f}" in out


def test_tables_of_several_runs_fit_80_columns_and_cut_nothing(
    cli, tmp_path, overtrained, monkeypatch
):
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    run, held_out, _ = overtrained
    other = tmp_path / "a-run-with-a-rather-long-name-that-goes-on"
    shutil.copytree(run, other)
    for words in (
        ("compare", run, other, "--out", "c.png"),
        ("evaluate", run, other, held_out),
        ("account", "--compare", "qwen3-30b-a3b", "llama3-8b", other.relative_to(tmp_path)),
    ):
        code, out, err = cli(*words)
        assert code == 0, err
        assert "…" not in out
        assert other.name in out
        assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"887 GiB +60\.7 GiB +96 KiB", out), "a figure is cut"


def test_compare_writes_numbers_as_people_do(cli, tmp_path, overtrained):
    run, _, _ = overtrained
    words = ("train", run.parent / "a", "--from", run, "--out", tmp_path / "other", "--steps", 1)
    assert cli(*words, f"train.lr={0.1 * 0.0037!r}")[0] == 0
    code, out, _ = cli("compare", run, tmp_path / "other", "--out", tmp_path / "c.png")
    assert code == 0
    assert "train.lr 0.03 → 0.00037, " in " ".join(out.split())


# Starting from another model


def test_training_starts_from_a_run_a_checkpoint_and_a_hugging_face_folder(cli, tmp_path, text):
    first = tmp_path / "first"
    options = ("--vocab-size", 280, *SMALL)
    assert cli("train", text, "--out", first, "--steps", 20, *options)[0] == 0
    assert cli("export", first, tmp_path / "hf")[0] == 0
    trained = load_model(first)
    for number, source in enumerate((first, trained.source, tmp_path / "hf")):
        run = tmp_path / f"run{number}"
        command = ("train", text, "--from", source, "--out", run, "--steps", 3)
        code, _, err = cli(*command, "train.keep_last=9", "train.save_every=1")
        assert code == 0, err
        assert f"starting from {source}" in err
        assert "learning a vocabulary" not in err
        begun = load_model(run, checkpoint=0)
        for name, tensor in load_model(source).model.state_dict().items():
            assert torch.equal(begun.model.state_dict()[name], tensor), name
        assert begun.tokenizer.fingerprint() == trained.tokenizer.fingerprint()
        assert not torch.equal(
            load_model(run, checkpoint="last").model.lm_head.weight, trained.model.lm_head.weight
        )
        assert read_plan(run).train.lr < read_plan(first).train.lr


def test_a_run_from_a_model_resumes_without_that_model(cli, tmp_path, text):
    first, run = tmp_path / "first", tmp_path / "run"
    assert cli("train", text, "--out", first, "--steps", 5, "--vocab-size", 280, *SMALL)[0] == 0
    command = ("train", text, "--from", first, "--out", run)
    assert cli(*command, "--steps", 4, "train.keep_last=9")[0] == 0
    whole = load_model(run, checkpoint="last").model.state_dict()
    for path in find_checkpoints(run)[1:]:
        shutil.rmtree(path)
    assert [step_of(path) for path in find_checkpoints(run)] == [0]
    moved = first.rename(tmp_path / "moved")
    code, _, err = cli(*command, "--resume")
    assert code == 0, err
    again = load_model(run, checkpoint="last").model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    code, _, err = cli("train", text, "--from", moved, "--out", run, "--resume")
    assert code == 2
    assert f"was begun from {first}" in err


def test_a_run_that_lost_its_start_never_begins_with_random_weights(cli, tmp_path, text):
    first, run = tmp_path / "first", tmp_path / "run"
    assert cli("train", text, "--out", first, "--steps", 5, "--vocab-size", 280, *SMALL)[0] == 0
    assert cli("train", text, "--from", first, "--out", run, "--steps", 2)[0] == 0
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(first)
    code, _, err = cli("train", "--out", run, "--resume")
    assert code == 2
    assert f"{first}: no such run" in err


def test_the_context_may_shrink_and_the_ends_of_texts_are_kept(cli, tmp_path, text):
    first, run = tmp_path / "first", tmp_path / "run"
    assert cli("train", text, "--out", first, "--steps", 2, "--vocab-size", 280, *SMALL)[0] == 0
    command = ("train", text, "--from", first, "--out", run, "--steps", 2)
    assert cli(*command, "model.context_length=4")[0] == 0
    assert read_plan(run).model.context_length == 4
    (last,) = [path for path in find_checkpoints(run) if step_of(path) == 2]
    kept = read_manifest(last)["metadata"]["eos_token_ids"]
    assert tuple(kept) == load_model(first).eos_ids


NOT_BESIDE_FROM = {
    "--preset": ("--preset", "demo"),
    "--params": ("--params", "1M"),
    "--ablation": ("--ablation", "no-rope"),
    "--tokenizer": ("--tokenizer", "char"),
    "--vocab-size": ("--vocab-size", 300),
    "model.d_model": ("model.d_model=32",),
}


def test_from_refuses_another_model_tokenizer_or_vocabulary(cli, tmp_path, text):
    first, run = tmp_path / "first", tmp_path / "run"
    assert cli("train", text, "--out", first, "--steps", 2, "--vocab-size", 280, *SMALL)[0] == 0
    for name, given in NOT_BESIDE_FROM.items():
        code, _, err = cli("train", text, "--from", first, "--out", run, *given)
        assert code == 2
        assert name in err
    options = ("--tokenizer", "char", "--out", tmp_path / "chars", "--steps", 1)
    assert cli("train", text, *options, *SMALL)[0] == 0
    code, _, err = cli("train", tmp_path / "chars" / "data", "--from", first, "--out", run)
    assert code == 2
    assert "another tokenizer" in err
    code, _, err = cli("train", text, "--from", tmp_path / "nowhere", "--out", run)
    assert code == 2
    assert not run.exists()


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_model_in_the_place_of_a_run_is_refused_and_stays(cli, tmp_path, text, resume):
    first = tmp_path / "first"
    assert cli("train", text, "--out", first, "--steps", 2, "--vocab-size", 280, *SMALL)[0] == 0
    assert cli("export", first, tmp_path / "hf")[0] == 0
    assert cli("import", tmp_path / "hf", tmp_path / "imported")[0] == 0
    for place in (tmp_path / "imported", tmp_path / "hf"):
        before = sorted(path.name for path in place.iterdir())
        code, _, err = cli("train", text, "--out", place, *resume)
        assert code == 2
        assert f"{place} is a model, not a run: --from {place} starts from it" in err
        assert sorted(path.name for path in place.iterdir()) == before


def test_resume_refuses_a_folder_of_other_things(cli, tmp_path, text):
    place = tmp_path / "notes"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    code, _, err = cli("train", text, "--out", place, "--resume")
    assert code == 2
    assert "holds no run to go on with, but notes.txt" in err
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


# Mistakes that cost nothing to find

EARLY = {
    "preset": (("--preset", "gpt2xl"), "unknown preset 'gpt2xl'; did you mean 'gpt2-xl'?"),
    "nothing near": (("--preset", "zzz"), "unknown preset 'zzz'; there are gpt2"),
    "heads": (("model.d_model=64", "model.num_heads=5"), "d_model must be divisible by num_heads"),
    "heads alone": (("model.num_heads=37",), "d_model must be divisible by num_heads"),
    "model key": (("model.d_modle=64",), "d_modle; did you mean 'd_model'?"),
    "kind's name": (("model.ffn.typ=moe",), "unknown config key: ffn.typ; did you mean 'type'?"),
    "data key": (("data.trian=x.bin",), "unknown config key: data.trian; did you mean 'train'?"),
    "part's key": (("model.norm.epss=1",), "norm.epss; did you mean 'eps'?"),
    "train key": (("train.learning_rat=1",), "unknown config key: train.learning_rat"),
    "misspelt": (("train.warmup_step=1",), "did you mean 'warmup_steps'?"),
    "fp8": (("train.precision=fp8",), "train.precision=fp8 needs a CUDA device"),
    "graph": (("train.cuda_graph=true",), "train.cuda_graph needs a CUDA device"),
    "layers": (("train.checkpointed_layers=1",), "needs train.checkpointing"),
    "vocabulary": (("--tokenizer", "char", "--vocab-size", "300"), "--tokenizer char has its own"),
    "data twice": (("data.train=x.bin",), "as DATA or by data.train, not by both"),
    "held out twice": (("--val", "x.bin", "--val-fraction", "0.2"), "has no effect beside it"),
    "held out": (("--val", "x.bin"), "--val must be a token file, as `scratchlm prepare` makes"),
    "all held out": (("--val-fraction", "1"), "--val-fraction must be in [0, 1); got 1.0"),
    "small vocabulary": (("--vocab-size", "256"), "--vocab-size must be at least 257"),
    "tasks": (("train.tasks=x.jsonl",), "x.jsonl: no such file"),
    "no task": ((f"train.tasks={__file__}",), "test_cli_first_steps.py: "),
    "field": (("--field", "story"), "--field is for JSON Lines and Parquet; the data is plain"),
    "section": (("trian.lr=1",), "trian.lr=1: no such file; a change to the config begins with"),
    "no section": (("lr=1",), "lr=1: no such file; a change to the config begins with"),
    "no value": (("train.lr",), "train.lr: no such file; a change to the config begins with"),
    "text for a number": (("train.steps=x",), "error: train.steps must be a whole number; got tr"),
    "no layers": (("model.num_layers=0",), "error: model.num_layers must lie between 1 and 16384"),
    "steps twice": (("--steps", "3", "train.steps=4"), "give --steps or train.steps, not both"),
    "set twice": (("--steps", "3", "--set", "train.steps=4"), "give --steps or train.steps"),
    "accelerate twice": (("--accelerate", "train.accelerate=true"), "or train.accelerate, not"),
    "long rows": (("train.row_length=4000", "model.context_length=64"), "must not exceed context_"),
    "kind": (("model.ffn=experts",), "ffn.type must be one of swiglu, mlp, moe; got 'experts'"),
    "number for kind": (("model.ffn=3",), "ffn.type must be one of swiglu, mlp, moe; got 3"),
    "kind's key": (("model.ffn=moe",), "missing config key: ffn.num_experts"),
    "count": (("--params", "many"), "--params: expected a count such as 10M"),
    "ablation": (("--ablation", "no-rop"), "--ablation must be one of no-rope"),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_costs_nothing_to_find_is_refused_before_the_text_is_read(cli, tmp_path, text, name):
    given, message = EARLY[name]
    run = tmp_path / "run"
    code, _, err = cli("train", text, "--out", run / "deep", "--device", "cpu", *given)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1, err
    assert not run.exists()
    if name == "train key":
        assert "did you mean" not in err


def test_a_setting_of_a_config_file_that_cannot_apply_is_refused_early_too(cli, tmp_path, text):
    wanted = tmp_path / "all.toml"
    wanted.write_text('[train]\nprecision = "fp8"\n')
    options = ("--config", wanted, "--out", tmp_path / "run", "--device", "cpu")
    code, _, err = cli("train", text, *options)
    assert code == 2
    assert err == "error: train.precision=fp8 needs a CUDA device; the model is on cpu\n"


@pytest.mark.parametrize(
    "given",
    [
        ("--vocab-size", "300"),
        ("--val-fraction", "0.2"),
        ("--separator", "x"),
        ("--field", "x"),
        ("--tokenizer", "char"),
    ],
    ids=lambda given: given[0],
)
def test_options_for_text_are_refused_where_the_data_is_encoded(cli, tmp_path, given):
    data = write_data(tmp_path / "data")
    code, _, err = cli("train", data, "--out", tmp_path / "run", *given)
    assert code == 2
    assert f"{given[0]}" in err
    assert "the data is encoded already" in err


# Leaving nothing behind


@pytest.fixture
def other_tokens(cli, tmp_path, text):
    """Token files of another tokenizer than one that is learnt from the text."""
    assert cli("tokenizer", "train", text, "--vocab-size", 300, "--out", tmp_path / "tok")[0] == 0
    options = ("--tokenizer", tmp_path / "tok", "--out", tmp_path / "other")
    assert cli("prepare", text, *options)[0] == 0
    return tmp_path / "other" / "val.bin"


def test_held_out_tokens_of_another_tokenizer_are_refused_before_encoding(
    cli, tmp_path, text, other_tokens
):
    run = tmp_path / "run"
    words = ("train", text, "--val", other_tokens, "--out", run)
    code, _, err = cli(*words, "--vocab-size", 280)
    assert code == 2
    assert "was made with another tokenizer than the run's" in err
    assert "encoding" not in err
    assert not run.exists()
    assert cli(*words, "--tokenizer", tmp_path / "tok", "--steps", 1, *SMALL)[0] == 0


def test_a_run_refused_after_its_text_is_encoded_leaves_no_folder(cli, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a cat. " * 9)
    options = ("--vocab-size", 257, "model.context_length=512")
    code, _, err = cli("train", short, "--out", tmp_path / "new" / "run", *options)
    assert code == 2
    assert "encoding" in err, "it was refused before: it shows nothing"
    assert not (tmp_path / "new").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    assert cli("train", short, "--out", mine / "run", *options)[0] == 2
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def refuse(out, made=(), error=ValueError):
    """Make files in the folder of a run, then refuse it."""
    with leaving_nothing(out):
        for name in made:
            (out / name).write_bytes(bytes(11))
        raise error("refused")


def test_a_folder_that_another_process_made_is_never_removed(tmp_path, monkeypatch):
    out = tmp_path / "runs" / "mine"
    out.mkdir(parents=True)
    for just_made in (False, True):
        if just_made:  # after this process has looked
            monkeypatch.setattr(Path, "exists", lambda self: False)
        with pytest.raises(ValueError, match="refused"):
            refuse(out)
        assert out.is_dir()


def test_ctrl_c_before_the_first_step_keeps_only_what_was_encoded(tmp_path):
    out = tmp_path / "runs" / "mine"
    for made in ((), ("train.bin",)):
        with pytest.raises(KeyboardInterrupt):
            refuse(out, made, KeyboardInterrupt)
        assert (tmp_path / "runs").exists() == bool(made)


def test_only_much_encoded_text_is_kept_when_a_run_is_refused(tmp_path, monkeypatch):
    for most, kept in ((12, False), (11, True)):
        monkeypatch.setattr("scratchlm.cli.training_checks.KEEP_BYTES", most)
        with pytest.raises(ValueError, match="refused"):
            refuse(tmp_path / "run", ["train.bin"])
        assert (tmp_path / "run").exists() == kept


def test_a_file_in_the_place_of_a_run_is_refused_and_stays(cli, text):
    code, _, err = cli("train", text, "--out", text)
    assert (code, err) == (2, f"error: {text} is a file; a run needs a folder\n")
    assert text.read_text() == TEXT


# What has no effect


def test_settings_without_effect_are_named(cli, tmp_path, text):
    unused = {
        "momentum=0.9": "train.optimizer=muon",
        "decay_steps=1": "train.schedule=wsd",
        "backend=gloo": "several ranks",
        "rank_timeout=9": "several ranks",
        "eval_batches=1": "held-out data",
        "patience=2": "held-out data",
    }
    words = ("--vocab-size", 280, "--val-fraction", 0, "--steps", 1, *SMALL)
    code, _, err = cli(
        "train", text, "--out", tmp_path / "a", *words, *(f"train.{word}" for word in unused)
    )
    assert code == 0, err
    told = [line for line in err.splitlines() if "has no effect" in line]
    assert told == [
        f"warning: train.{word.partition('=')[0]} has no effect without {needs}"
        for word, needs in unused.items()
    ]
    used = ("train.optimizer=muon", "train.momentum=0.9", "train.schedule=wsd")
    code, _, err = cli("train", text, "--out", tmp_path / "b", *words, *used, "train.decay_steps=1")
    assert code == 0
    assert "no effect" not in err
    words = ("train.schedule=constant", "train.min_lr=1e-5")
    _, _, err = cli("train", text, "--out", tmp_path / "c", "--steps", 1, *SMALL, *words)
    assert "train.min_lr has no effect without a schedule that falls" in err
    words = ("train.eval_every=0", "train.patience=2", "train.eval_batches=3", "train.shares=9")
    words += ("train.batch_size=4", "train.accelerate=true", "--ops", "reference")
    _, _, err = cli("train", text, "--out", tmp_path / "d", "--steps", 1, *SMALL, *words)
    assert [line for line in err.splitlines() if "no effect" in line] == [
        "warning: train.eval_batches has no effect with train.eval_every=0",
        "warning: train.patience has no effect with train.eval_every=0",
        "warning: train.shares has no effect beyond the 4 rows computed at a time",
        "warning: train.accelerate has no effect with --ops reference",
    ]


def test_a_part_is_named_by_its_kind_with_its_keys_in_any_order(cli, tmp_path, text):
    keys = ("model.ffn.num_experts=4", "model.ffn=moe", "model.ffn.experts_per_token=1")
    table = 'model.positions={type="rotary", theta=500.0}'
    words = ("--vocab-size", 280, "--steps", 1, *SMALL, "model.norm=layernorm", *keys, table)
    code, _, err = cli("train", text, "--out", tmp_path / "run", *words)
    assert code == 0, err
    model = read_plan(tmp_path / "run").model
    assert model.ffn == MoE(num_experts=4, experts_per_token=1)
    assert model.norm == LayerNorm()
    assert model.positions == Rotary(theta=500.0)


# Going on


def test_resume_refuses_data_options_that_contradict_the_run(cli, tmp_path, text, other_tokens):
    run = tmp_path / "run"
    begin = ("train", text, "--out", run, "--vocab-size", 280, "--tokenizer", "bpe", *SMALL)
    assert cli(*begin, "--steps", 1)[0] == 0
    same = ("--separator", "|", "--val", run / "data" / "val.bin", "--tokenizer", run / "data")
    code, _, err = cli(*begin[:4], "--resume", "--vocab-size", 280, *same)
    assert code == 0, err
    assert "going on with the run's own data" in err
    assert "note: --separator has no effect now: the run's text is encoded already" in err
    for given, message in (
        (("--tokenizer", "char"), "--tokenizer cannot change in a run that was begun; it is bpe"),
        (("--tokenizer", tmp_path / "tok"), "was begun with another tokenizer than"),
        (("--tokenizer", tmp_path / "nowhere"), "nowhere: no such tokenizer file"),
        (("--vocab-size", 270), "--vocab-size cannot change in a run that was begun; it is 280"),
        (("--val", other_tokens), "--val cannot change in a run that was begun; it is"),
        (("data.train=x.bin",), "data.train cannot change in a run that was begun"),
    ):
        code, _, err = cli("train", "--out", run, "--resume", *given)
        assert code == 2, given
        assert message in err
        assert err.count("\n") == 1, err


def test_what_a_run_starts_from_is_named_with_its_checkpoint(cli, tmp_path, overtrained):
    run, _, _ = overtrained
    best = choose_checkpoint(run)
    _, _, err = cli("train", run.parent / "a", "--from", run, "--out", tmp_path, "--steps", 1)
    assert f"starting from {best}" in err


def test_a_head_that_is_not_there_is_refused_before_anything_is_printed(cli, overtrained):
    run, _, _ = overtrained
    words = ("next", run, "--prompt", "the cat", "--attention")
    for where in ("1.0", "0.2", "9", "0.", ".1", "x", "0.1.0", "-1.0"):
        code, out, err = cli(*words, where)
        assert (code, out) == (2, ""), where
        assert f"--attention must be LAYER.HEAD, from 0.0 to 0.1, or LAYER; got {where!r}" in err
    for where in ("0.1", "0"):
        code, out, _ = cli(*words, where)
        assert code == 0
        assert "looks at" in out or "look at" in out
