"""`scratchlm finetune`, `merge` and `export --adapter`, as a user runs them."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
import weakref

import pytest
import torch

from inference.tiny import byte_tokenizer
from interop.hf_models import load_with_transformers
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accounting import Setup, training_flops_per_token
from scratchlm.accounting.lora import lora_memory
from scratchlm.checkpoint import (
    find_checkpoints,
    read_config,
    read_tensors,
    verify_checkpoint,
    write_checkpoint,
)
from scratchlm.cli import main, starting
from scratchlm.cli.training_checks import name_unused
from scratchlm.cli.tuning_setup import TuneArgs, split
from scratchlm.config.heads import TaskHead
from scratchlm.config.lora import LoRA
from scratchlm.data.conversations import Example
from scratchlm.data.examples import read_examples
from scratchlm.errors import ScratchLMError
from scratchlm.inference import load_model
from scratchlm.training import Learner, TrainConfig, session
from scratchlm.training.plan import read_plan
from scratchlm.training.tuning import Tuning, check_tuning
from training.tiny import log_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAST = ("train.lr=3e-3", "train.batch_size=2", "train.row_length=96", "train.eval_batches=2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model of ours with a tokenizer."""
    path = tmp_path_factory.mktemp("base")
    tokenizer = byte_tokenizer(*SPECIAL)
    tokenizer.save(path / "tokenizer")
    config = ModelConfig(
        vocab_size=259, context_length=96, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2
    )
    model = TransformerLM(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return write_checkpoint(
        path / "model",
        model=model.state_dict(),
        config=config,
        tokenizer_file=path / "tokenizer" / "tokenizer.json",
        metadata={"eos_token_ids": [256]},
    )


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = []
    for number in range(40):
        asked, said = f"say {number}", f"it is {number % 7}"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    records = [
        {"prompt": f"q{number}", "chosen": "yes, please", "rejected": "no, thanks"}
        for number in range(20)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_command(*words):
    """Run a command in this process; return its status."""
    before = sys.argv
    sys.argv = ["scratchlm", *map(str, words)]
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def tuned(base, chats, tmp_path_factory):
    """A run that has learnt an adapter."""
    run = tmp_path_factory.mktemp("tuned") / "run"
    assert run_command("finetune", base, chats, "--out", run, "--steps", 12, *FAST) == 0
    return run


def ids(seed=0):
    return torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(seed))


def test_a_run_leaves_an_adapter_and_learns(tuned, base):
    losses = [line["loss"] for line in log_of(tuned) if "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    last = find_checkpoints(tuned)[-1]
    tensors = read_tensors(last)
    assert all(".lora_A." in name or ".lora_B." in name for name in tensors)
    record = verify_checkpoint(last)["metadata"]["adapter"]
    assert record["base"] == str(base.absolute())
    assert re.search(r"[\d,]+ examples; [\d.]+ epochs", (tuned / "report.html").read_text())
    assert read_plan(tuned).tuning.lora == LoRA()


@pytest.mark.parametrize("how", ["lora", "full"])
def test_what_a_run_starts_from_is_in_memory_once(how, base, chats, tmp_path, monkeypatch):
    """And its FLOPs are those of its rows, not of the model's context."""
    seen = {}

    def load(plan, load_start=starting.load_start):
        start = load_start(plan)
        seen["base"] = [weakref.ref(tensor) for tensor in start.tensors.values()]
        return start

    def loop(learner, data, run, *, throughput, **_):
        seen["left"] = [ref for ref in seen["base"] if ref() is not None]
        seen["flops"] = throughput.flops_per_token
        raise ScratchLMError("enough was seen")

    monkeypatch.setattr(starting, "load_start", load)
    monkeypatch.setattr(session, "train", loop)
    words = ["--full"] if how == "full" else []
    run_command("finetune", base, chats, "--out", tmp_path / "run", *words, "train.row_length=48")
    assert seen["base"]
    assert not seen["left"]
    assert seen["flops"] == training_flops_per_token(read_config(base), 48)


def test_a_loaded_run_is_its_base_with_the_adapter(tuned, base):
    loaded = load_model(tuned)
    plain = load_model(base)
    assert loaded.config == plain.config
    assert not torch.equal(loaded.model(ids()), plain.model(ids()))
    assert load_model(base, adapter=tuned).model(ids()).equal(loaded.model(ids()))
    said = [{"role": "user", "content": "hi"}]
    asked = loaded.chat_template.render(said, add_generation_prompt=True)
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_report_accounts_for_the_adapter_and_its_rows(base, chats, tmp_path):
    run, row = tmp_path / "run", ("train.row_length=64", "train.batch_size=2", "--steps", 1)
    assert run_command("finetune", base, chats, "--out", run, *row) == 0
    text = (run / "report.html").read_text()
    parameters = re.search(r"<td>parameters</td><td>([\d,]+)</td><td>([\d,]+)</td>", text)
    assert parameters[1] == parameters[2]
    setup = Setup(phase="training", batch=2, context=64, precision="fp32")
    peak = float(lora_memory(read_config(base), LoRA(), setup).training.value)
    assert f"<td>peak memory</td><td>{peak / 2**20:.1f} MiB</td>" in text


def test_a_report_is_made_when_what_learnt_is_gone(base, chats, tmp_path, monkeypatch):
    learners, left = [], []

    def make(*args, make_learner=session.make_learner, **kwargs):
        learner = make_learner(*args, **kwargs)
        learners.append(weakref.ref(learner))
        return learner

    def look(_):
        gc.collect()
        left.append(learners[0]())

    monkeypatch.setattr(session, "make_learner", make)
    monkeypatch.setattr("scratchlm.cli.attention_picture.attention_section", look)
    assert run_command("finetune", base, chats, "--out", tmp_path / "run", "--steps", 1, *FAST) == 0
    assert left == [None]


def test_merge_and_both_exports_give_the_same_logits(tuned, base, tmp_path):
    expected = load_model(tuned, accelerate=False).model(ids())
    assert run_command("merge", tuned, tmp_path / "merged") == 0
    merged = load_model(tmp_path / "merged", accelerate=False)
    assert torch.equal(merged.model(ids()), expected)
    assert merged.chat_template is not None
    assert run_command("export", tuned, tmp_path / "whole") == 0
    theirs = load_with_transformers(tmp_path / "whole")
    assert run_command("export", tuned, tmp_path / "adapter", "--adapter") == 0
    assert run_command("export", base, tmp_path / "base") == 0
    adapted = peft.PeftModel.from_pretrained(
        load_with_transformers(tmp_path / "base"), tmp_path / "adapter"
    ).eval()
    with torch.no_grad():
        for model in (theirs, adapted):
            torch.testing.assert_close(model(ids()).logits, expected, atol=1e-5, rtol=1e-5)
    assert run_command("merge", base, tmp_path / "again", "--adapter", tmp_path / "adapter") == 0
    again = load_model(tmp_path / "again", accelerate=False).model(ids())
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


OFTEN = ("--steps", 14, "train.save_every=3", "train.eval_every=7")


def assert_same_end(run, other):
    """Assert that two runs logged and saved the same."""
    assert log_of(run) == log_of(other)
    one, two = (find_checkpoints(each)[-1] for each in (run, other))
    assert verify_checkpoint(one)["files"] == verify_checkpoint(two)["files"]


@pytest.mark.slow  # in the short run, tests/faults kills without the command line around
def test_a_killed_fine_tuning_goes_on_bit_for_bit(base, chats, tmp_path):
    command = ["finetune", base, chats, "--dora", "--dropout", "0.1", *OFTEN, *FAST]
    assert run_command(*command, "--out", tmp_path / "whole") == 0
    run = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", "from scratchlm.cli import main; main()"]
        + [str(word) for word in (*command, "--out", run)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    log = run / "metrics.jsonl"
    while process.poll() is None:
        if log.exists() and log.read_bytes().count(b'"grad_norm"') >= 5:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert log_of(run) != log_of(tmp_path / "whole")
    assert run_command("finetune", "--resume", "--out", run) == 0
    assert_same_end(run, tmp_path / "whole")


@pytest.mark.parametrize("kind", ["full", pytest.param("dpo", marks=pytest.mark.slow)])
def test_what_breaks_off_in_a_step_goes_on_bit_for_bit(
    kind, base, chats, pairs, tmp_path, monkeypatch
):
    from scratchlm.training import loop

    options = ("--full",) if kind == "full" else ("--preference", "dpo")
    command = ["finetune", base, chats if kind == "full" else pairs, *options, *OFTEN, *FAST]
    assert run_command(*command, "--out", tmp_path / "whole") == 0
    take_step = loop.take_step

    def broken(learner, batch, step, lr):
        if step == 8:
            raise KeyboardInterrupt
        return take_step(learner, batch, step, lr)

    monkeypatch.setattr(loop, "take_step", broken)
    assert run_command(*command, "--out", tmp_path / "run") == 130
    monkeypatch.setattr(loop, "take_step", take_step)
    assert run_command("finetune", "--resume", "--out", tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    if kind == "full":
        tensors, before = read_tensors(find_checkpoints(tmp_path / "run")[-1]), read_tensors(base)
        assert tensors.keys() == before.keys()
        assert all(not torch.equal(tensors[name], before[name]) for name in tensors)


def test_dpo_prefers_what_was_chosen(base, pairs, tmp_path):
    from scratchlm.training.preference import sequence_logps

    run = tmp_path / "run"
    command = ("finetune", base, pairs, "--preference", "dpo", "--steps", 15, "--beta", 0.3)
    assert run_command(*command, "train.lr=3e-3", "train.batch_size=4", "--out", run) == 0
    losses = [line["loss"] for line in log_of(run) if "loss" in line]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # at first no answer is preferred: log 2
    assert losses[-1] < 0.3
    held_out = [line for line in log_of(run) if "val_loss" in line]
    assert held_out
    assert all(line["val_perplexity"] is None for line in held_out)  # of pairs, not of tokens
    plan, examples = read_plan(run), read_examples(run / "data" / "val.examples")
    assert plan.tuning.preference == "dpo"
    rows = [examples[index][0] for index in (0, 1)]
    learns = [examples[index][1] for index in (0, 1)]
    margin = []
    for model in (load_model(base).model, load_model(run).model):
        logps = [
            sequence_logps(
                model,
                torch.tensor(row[None, :-1]),
                torch.where(torch.tensor(learn[None, 1:]), torch.tensor(row[None, 1:]), -100),
            )
            for row, learn in zip(rows, learns, strict=True)
        ]
        margin.append(float(logps[0] - logps[1]))
    assert margin[1] > margin[0] + 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--full", "--rank", "4"), "--rank is for LoRA"),
        (("--beta", "0.2"), "--beta needs --preference"),
        (("--pack", "--preference", "dpo"), "--pack has no effect beside --preference"),
        (("--pack", "--task", "qa"), "--pack has no effect beside --task"),
        (("--preference", "x"), "preference must be one of dpo"),
        (("--targets", "z_proj"), "--targets: no Linear is called 'z_proj'"),
        (("--rank", "0"), "--rank must be a whole number"),
        (("model.d_model=8",), "model. cannot be set"),
        (("train.row_length=20",), "line 1: .* tokens do not fit in rows of 20"),
        (("train.row_length=1000",), "row_length must not exceed context_length=96; got 1000"),
        (("--task", "qa", "train.row_length=1000"), "row_length must not exceed"),
        (("--preference", "dpo"), "line 1: a record must have chosen, rejected; chosen is missing"),
        (("--epochs", "2", "--steps", "3"), "give one of them"),
        (("train.rwo_length=8",), "did you mean 'row_length'"),
        (("--quantize", "q4_k"), "as nf4 or int8; got --quantize='q4_k'"),
        (("--quantize", "nf4", "--full"), "--quantize is for LoRA"),
        (("--quantize", "int8", "--task", "qa"), "--quantize is for LoRA"),
        (("train.tasks=nowhere.jsonl",), "nowhere.jsonl: No such file"),
        (("train.shares=2", "--dropout", "0.1"), "train.shares does not go with dropout"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_run(words, message, base, chats, tmp_path, capsys):
    import re

    run = tmp_path / "run"
    assert run_command("finetune", base, chats, "--out", run, *words) == 2
    err = capsys.readouterr().err
    line = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(line) == 1
    assert re.search(message, " ".join(err.split()))
    assert not run.exists()


def test_settings_without_effect_in_fine_tuning_are_named(tuned):
    told, typed = [], {"rows": "documents", "document_mask": True, "eval_batches": 2}
    name_unused(typed, read_plan(tuned), None, "fast", told.append)
    assert told == [
        "warning: train.rows has no effect in fine-tuning, which has rows of examples",
        "warning: train.document_mask has no effect in fine-tuning: examples never see each other",
    ]


@pytest.mark.parametrize("setting", [{"z_loss": 0.1}, {"compile": "model"}])
def test_what_acts_in_the_loss_of_next_tokens_is_refused_beside_another(setting):
    config = ModelConfig(vocab_size=9, context_length=8, d_model=8, num_layers=1, num_heads=2)
    name = "=".join(map(str, *setting.items())) if "compile" in setting else "z_loss"
    head = TaskHead("classification", ("a", "b"))
    settings = TrainConfig(steps=1, batch_size=2, **setting)
    for tuning in (Tuning(preference="dpo", packed=False), Tuning(head=head, packed=False)):
        with pytest.raises(ScratchLMError, match=f"train.{name} is for the loss of next tokens"):
            check_tuning(tuning, settings, config)
    with pytest.raises(ScratchLMError, match=f"train.{name} is for the loss of next tokens"):
        Learner(TransformerLM(config), settings, loss=lambda model, batch: None)
    check_tuning(Tuning(), settings, config)


def test_an_empty_file_to_validate_on_is_refused(base, chats, tmp_path, capsys):
    (tmp_path / "blank.jsonl").write_text("\n")
    words = ("--val", tmp_path / "blank.jsonl", "--out", tmp_path / "run")
    assert run_command("finetune", base, chats, *words) == 2
    assert "there is nothing to validate on" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_what_one_record_gives_is_learnt_or_held_out_together(tmp_path):
    args = TuneArgs(None, tmp_path / "chats.jsonl", tmp_path / "run", val_fraction=0.3)
    records = [[Example([number, turn], [False, True]) for turn in range(3)] for number in range(9)]
    train, val = split(args, lambda _: records)
    assert len(train) == 18
    assert len(val) == 9
    assert not {one.ids[0] for one in train} & {one.ids[0] for one in val}


def test_a_run_keeps_the_template_of_chats_that_come_after_pairs(base, chats, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "a", "completion": "b"}\n' + chats.read_text())
    assert load_model(base).chat_template is None
    words = ("--out", tmp_path / "run", "--steps", 1, *FAST)
    assert run_command("finetune", base, mixed, *words) == 0
    assert load_model(tmp_path / "run").chat_template is not None


def test_pairs_are_not_cut_apart(base, pairs, tmp_path, capsys):
    words = ("finetune", base, pairs, "--preference", "dpo", "--out", tmp_path / "run")
    assert run_command(*words, "train.micro_batch_size=3") == 2
    assert "pairs need an even train.micro_batch_size; got 3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_beside_few_bits_a_run_is_the_rounded_base_with_the_adapter(base, chats, tmp_path, capsys):
    from scratchlm.inference.adapters import read_adapter
    from scratchlm.quantization.convert import quantize_base
    from scratchlm.training.lora import load_adapter

    run = tmp_path / "run"
    words = ("finetune", base, chats, "--quantize", "int8", "--steps", 3, "--out", run)
    assert run_command(*words, *FAST) == 0
    assert read_plan(run).tuning.quantize == "int8"
    model = load_model(base, accelerate=False).model
    quantize_base(model, "int8")
    adapter = read_adapter(find_checkpoints(run)[-1])
    load_adapter(model, adapter.config, adapter.tensors)
    loaded = load_model(run, accelerate=False, checkpoint="last").model(ids())
    torch.testing.assert_close(loaded, model(ids()), atol=1e-5, rtol=1e-5)
    beside = load_model(base, adapter=find_checkpoints(run)[-1], accelerate=False).model(ids())
    assert torch.equal(beside, loaded)
    assert run_command("export", run, tmp_path / "to-peft", "--adapter") == 0
    assert "which it learnt beside in int8" in capsys.readouterr().out  # peft cannot say it


def test_compare_says_how_fine_tuning_differed(tuned, base, chats, tmp_path, capsys):
    words = ("--out", tmp_path / "other", "--steps", 12, "--dora", "--rank", 4, "--no-pack", *FAST)
    assert run_command("finetune", base, chats, *words) == 0
    assert run_command("compare", tuned, tmp_path / "other", "--out", tmp_path / "c.png") == 0
    told = " ".join(capsys.readouterr().out.split())
    changes = "tuning.packed True → False, lora.rank 16 → 4, lora.dora False → True"
    assert f"differs from run: {changes}" in told
    assert "beta" not in read_plan(tuned).tuning.to_dict()  # which has no effect without pairs


def test_a_base_that_changed_or_is_gone_is_named(base, chats, tmp_path, capsys):
    own = shutil.copytree(base, tmp_path / "base")
    run = tmp_path / "run"
    assert run_command("finetune", own, chats, "--out", run, "--steps", 2, *FAST) == 0
    shutil.rmtree(own)
    assert run_command("generate", run, "--prompt", "x") == 2
    assert "its base model is gone" in " ".join(capsys.readouterr().err.split())
    config = ModelConfig(vocab_size=259, context_length=96, d_model=32, num_layers=2, num_heads=4)
    write_checkpoint(own, model=TransformerLM(config).state_dict(), config=config)
    assert run_command("generate", run, "--prompt", "x") == 2
    assert "its base model has changed" in " ".join(capsys.readouterr().err.split())
    assert run_command("merge", base, tmp_path / "merged") == 2
    assert "holds a whole model" in " ".join(capsys.readouterr().err.split())


def test_a_run_of_pairs_is_not_packed_later(base, pairs, tmp_path, capsys):
    run = ("--out", tmp_path / "run", "--steps", 1, *FAST)
    assert run_command("finetune", base, pairs, *run, "--preference", "dpo") == 0
    assert run_command("finetune", "--resume", "--out", tmp_path / "run", "--pack") == 2
    assert "--pack cannot change" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_was_begun_keeps_its_adapter(tuned, base, chats, capsys):
    assert run_command("finetune", "--resume", "--out", tuned, "--rank", 4) == 2
    assert "--rank cannot change" in " ".join(capsys.readouterr().err.split())
    for words, told in (
        (("--beta", 3), "--beta cannot change in a run that was begun; it is 0.1"),
        (("--no-pack",), "--no-pack cannot change"),
        (("--epochs", 900), "--epochs cannot change"),
        (("--quantize", "nf4"), "--quantize cannot change in a run that was begun; it is None"),
        (("--task", "qa"), "--task cannot change"),
        (("--preference", "dpo"), "--preference cannot change"),
    ):
        assert run_command("finetune", "--resume", "--out", tuned, *words) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    assert run_command("finetune", "elsewhere", chats, "--resume", "--out", tuned) == 2
    assert "was begun from" in " ".join(capsys.readouterr().err.split())
    again = (base, chats, "--resume", "--out", tuned, "--rank", 16, "--val-fraction", 0.3)
    assert run_command("finetune", *again) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "going on with the run's own data" in told
    assert "--val-fraction has no effect now" in told
    assert run_command("train", "--resume", "--out", tuned) == 2
    assert "`scratchlm finetune` goes on with it" in " ".join(capsys.readouterr().err.split())
    assert run_command("finetune", "--out", tuned) == 2
    assert "holds a run already" in " ".join(capsys.readouterr().err.split())
