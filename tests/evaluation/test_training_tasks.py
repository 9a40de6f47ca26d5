"""`train.tasks`: run at every evaluation, in the log, the report and the comparison."""

import json

import pytest

from scratchlm.training import read_metrics

SMALL = ("model.d_model=16", "model.num_heads=2", "model.num_layers=1", "model.context_length=16")
WORDS = "the cat sat on the mat and the dog ran to the hill . " * 200


@pytest.fixture
def cli(cli, monkeypatch, tmp_path):
    """Run the command line in this process, where the tasks lie."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text(WORDS)
    (tmp_path / "words.jsonl").write_text('{"context": "the cat sat", "next": " on"}\n' * 3)
    (tmp_path / "texts.jsonl").write_text('{"text": "the dog ran"}\n{"text": "to the hill ."}\n')
    return cli


def train(cli, out, *more, steps=8):
    words = ("train", "my.txt", "--out", out, "--steps", steps, "--tokenizer", "char")
    return cli(*words, *SMALL, "train.batch_size=4", "train.eval_every=4", *more)


def tasks_of(run):
    return [record for record in read_metrics(run) if "tasks" in record]


def test_tasks_are_in_the_log_the_report_and_the_comparison(cli, tmp_path, monkeypatch):
    code, _, err = train(cli, "one", "train.tasks=words.jsonl,texts.jsonl", "train.lr=1e-2")
    assert code == 0, err
    found = tasks_of("one")
    assert [record["step"] for record in found] == [0, 4, 8]
    for record in found:
        assert record["tasks"].keys() == {"words", "texts"}
        assert record["tasks"]["texts"]["bits_per_byte"].keys() == {"value", "low", "high"}
    losses = [record["tasks"]["texts"]["loss"]["value"] for record in found]
    assert losses == sorted(losses, reverse=True)
    assert "step 8: words: accuracy" in err
    page = (tmp_path / "one/report.html").read_text()
    assert "<h2>Tasks</h2>" in page
    assert "word perplexity" in page
    # The same figures, from the checkpoint
    code, out, _ = cli("evaluate", "one", "texts.jsonl", "--checkpoint", "last", "--json")
    assert json.loads(out)["loss"] == pytest.approx(losses[-1], abs=1e-6)

    code, _, err = train(cli, "two", "train.lr=1e-2")
    assert code == 0, err
    steps = [[r["loss"] for r in read_metrics(run) if "loss" in r] for run in ("one", "two")]
    assert steps[0] == steps[1]  # tasks change no bit of a run
    assert tasks_of("two") == []
    assert "<h2>Tasks</h2>" not in (tmp_path / "two/report.html").read_text()
    code, out, err = cli("compare", "one", "two")
    assert code == 0, err
    assert "words" in out.splitlines()[0]
    assert "bits per byte" in out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = cli("train", "--out", "../one", "--resume", "--steps", 12)
    assert code == 0, err  # the files are found from anywhere
    assert [len(record["tasks"]) for record in tasks_of("../one")] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train.tasks=missing.jsonl", "missing.jsonl: no such file"),
        ("train.tasks=3", "tasks must be text"),
        ("train.tasks=bad.jsonl", "bad.jsonl: line 1: must have the keys of one kind"),
        ("train.tasks=words.jsonl,sub/words.jsonl", "files of different names; got words, words"),
    ],
)
def test_wrong_tasks_are_refused_before_training(cli, tmp_path, setting, told):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/words.jsonl").write_text((tmp_path / "words.jsonl").read_text())
    code, _, err = train(cli, "run", setting)
    assert code == 2
    assert told in err
    assert not (tmp_path / "run/checkpoints").exists()
