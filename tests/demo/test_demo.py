"""The demo, small: every piece is there, says what it measured, and can be stopped and taken up.

That the full demo keeps its promises takes minutes; it says so itself (`make demo`).
"""

import contextlib
import io
import json
import math
import random
import signal
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from rich.console import Console

from forked import ForkedCommand
from scratchlm.cli import main
from scratchlm.cli.demo.corpus import DemoArgs, entropy_floor, read_stories
from scratchlm.cli.demo.showing import (
    DemoResult,
    bar,
    last_words,
    log_fraction,
    print_samples,
    print_table,
)
from scratchlm.cli.demo.words import (
    PROMPTS,
    Comparison,
    GeneratedStory,
    begins_a_word,
    first_wrong,
    next_word_probabilities,
)
from scratchlm.config import ModelConfig
from scratchlm.data import TokenFile
from scratchlm.data.documents import DocumentValidationBatches
from scratchlm.data.stories import END, StorySource, to_text, to_words
from scratchlm.inference import load_model
from scratchlm.model import TransformerLM
from scratchlm.tokenizer import Tokenizer, load_tokenizer
from scratchlm.training import evaluate, read_metrics

SMALL = ["--steps", "12", "--sentences", "1500"]


@dataclass
class Found:
    """What a command printed, and how it ended."""

    status: int
    stdout: str
    stderr: str


def run(*arguments, check):
    """Run a command in this process, as `scratchlm` would."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["scratchlm", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    assert status == check, err.getvalue()
    return Found(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A demo of a few steps, which cannot keep its promises and says so with status 1."""
    out = tmp_path_factory.mktemp("demo") / "run"
    return out, run("demo", "--out", out, *SMALL, check=1)


def test_the_demo_prints_every_section(small):
    out, found = small
    for text in ("wrote", "learnt a tokenizer", "the floor", "parameters", "FLOPs", "GFLOP/s"):
        assert text in found.stderr
    assert "predicted training time" in found.stderr
    assert "a new demo in" in found.stderr
    for text in ("What it writes", "The cat sat on the …", "0.850", "What was promised"):
        assert text in found.stdout
    assert found.stdout.count("no ") >= 2
    assert str(out / "report.html") in found.stdout
    assert found.stdout.splitlines()[-1].startswith(f"page    scratchlm serve {out}, then open")


def test_the_report_shows_the_floor_the_words_and_the_verdict(small):
    page = (small[0] / "report.html").read_text()
    for text in ("The next word: truth and model", "The cat sat on the", "What was promised"):
        assert text in page
    assert "above the entropy floor" in page
    assert "data:image/png;base64," in page
    assert "http://" not in page
    assert "https://" not in page


def test_the_floor_is_the_loss_of_the_true_distribution_on_the_evaluated_ids(small):
    out = small[0]
    tokenizer, source = load_tokenizer(out / "data"), StorySource()
    stories = read_stories(out / "data" / "val.bin", tokenizer)
    assert "".join(map(to_text, stories)) == tokenizer.decode(_ids(out / "data" / "val.bin"))
    nats = sum(sum(source.surprisals(story)) for story in stories)
    floor = entropy_floor(source, tokenizer, stories)
    assert floor == pytest.approx(nats / len(_ids(out / "data" / "val.bin")), rel=1e-12)
    line = next(line for line in small[1].stderr.splitlines() if line.startswith("the floor"))
    assert f"{floor:.4f}" in line


def _ids(path):
    with TokenFile(path) as file:
        return file.read(0, len(file)).tolist()


def test_the_held_out_loss_is_that_of_the_saved_model_on_whole_stories(small):
    out = small[0]
    last = [r["val_loss"] for r in read_metrics(out) if r.get("val_loss") is not None][-1]
    model = load_model(out).model
    with TokenFile(out / "data" / "val.bin") as file:
        found = evaluate(model, DocumentValidationBatches(file, 72, 7))
        assert found.targets == len(file)
    assert found.loss == pytest.approx(last, rel=1e-5)


def test_run_again_it_shows_the_finished_demo_without_training(small):
    out, first = small
    before = (out / "metrics.jsonl").read_bytes()
    again = run("demo", "--out", out, *SMALL, check=1)
    assert "trained already" in again.stderr
    assert (out / "metrics.jsonl").read_bytes() == before
    assert again.stdout.split("What was promised")[0] == first.stdout.split("What was promised")[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--seed", "3", *SMALL], "--seed 0; got 3"),
        (["--steps", "13", "--sentences", "1500"], "--steps 12; got 13"),
        (["--steps", "12", "--sentences", "1700"], "--sentences about 15"),
    ],
)
def test_a_demo_with_other_arguments_in_the_same_folder_is_refused_in_one_line(
    small, change, message
):
    found = run("demo", "--out", small[0], *change, check=2)
    assert message in found.stderr
    assert "--fresh starts clean" in found.stderr
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1


def test_a_run_that_is_not_a_demo_is_left_unchanged(tmp_path):
    (tmp_path / "config.toml").write_text("[model]\n")
    for fresh in ([], ["--fresh"]):
        found = run("demo", "--out", tmp_path, *SMALL, *fresh, check=2)
        assert found.stderr.startswith("error: ")
        assert (tmp_path / "config.toml").read_text() == "[model]\n"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_interrupted_demo_resumes_to_the_same_result(small, tmp_path):
    out = tmp_path / "run"
    process = ForkedCommand("demo", "--out", out, *SMALL)
    process.wait_for("step 1/")
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate()
    assert process.returncode == 130
    assert "stopped and saved; the same command goes on" in rest
    assert len(_without_clock(out)) < len(_without_clock(small[0]))
    again = run("demo", "--out", out, *SMALL, check=1)
    assert "going on with the demo" in again.stderr
    assert _without_clock(out) == _without_clock(small[0])


def _without_clock(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in r.items() if key != "clock"} for r in records]


def test_fresh_starts_clean(small, tmp_path):
    out = tmp_path / "run"
    few = ["--sentences", "100", "--steps", "1"]
    run("demo", "--out", out, *few, check=1)
    (out / "mine.txt").write_text("kept")
    found = run("demo", "--out", out, "--seed", "5", *few, "--fresh", check=1)
    assert "a new demo in" in found.stderr
    assert (out / "mine.txt").read_text() == "kept"


# Next words from tokens


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer that cuts most words in several tokens, and a model of it with random weights."""
    merges = [(b" ", b"m"), (b"a", b"t"), (b" m", b"at"), (b" ", b"c")]
    vocab = {i: bytes([i]) for i in range(256)}
    for left, right in merges:
        vocab[len(vocab)] = left + right
    tokenizer = Tokenizer(vocab, merges, [END])
    config = ModelConfig(tokenizer.vocab_size, 32, d_model=16, num_layers=1, num_heads=2)
    model = TransformerLM(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model, tokenizer


@torch.no_grad()
def test_a_words_probability_is_the_chain_of_its_tokens_and_of_an_end(pieces):
    model, tokenizer = pieces
    prompt, words = "The cat sat on the", ["mat", "chair"]
    found = next_word_probabilities(model, tokenizer, prompt, words)
    ids = tokenizer.encode(prompt)
    for word in words:
        spelling, expected = tokenizer.encode(f" {word}"), 1.0
        for i, token in enumerate(spelling):
            p = model.next_token_probabilities(torch.tensor([ids + spelling[:i]]))[0]
            expected *= float(p[token])
        p = model.next_token_probabilities(torch.tensor([ids + spelling]))[0]
        expected *= sum(float(p[t]) for t in range(len(p)) if begins_a_word(tokenizer, t))
        assert found[word] == pytest.approx(expected, rel=1e-4)
    assert len(tokenizer.encode(" mat")) == 1
    assert len(tokenizer.encode(" chair")) > 2


def test_a_word_ends_where_a_space_a_stop_or_the_end_follows(pieces):
    _, tokenizer = pieces
    ids = {text: tokenizer.encode(text)[0] for text in (" mat", "at", ".", ",", " c", END, "s")}
    begins = {text: begins_a_word(tokenizer, token) for text, token in ids.items()}
    assert begins == {
        " mat": True, "at": False, ".": True, ",": True, " c": True, END: True, "s": False,
    }  # fmt: skip


def test_every_prompt_of_the_table_is_the_beginning_of_a_story():
    source = StorySource()
    for prompt in PROMPTS.values():
        assert math.fsum(source.next_words(prompt).values()) == pytest.approx(1.0)
    assert source.next_words(PROMPTS["a law of this world"])["mat"] == pytest.approx(0.85)


def test_the_two_moods_show_the_evidence_that_tells_them_apart():
    texts = {}
    for title in ("a mood never said: awake", "a mood never said: asleep"):
        file = io.StringIO()
        comparison = Comparison(title, PROMPTS[title], {"slept": 1.0}, {"slept": 1.0})
        print_table(Console(file=file, width=80, highlight=False), [comparison])
        texts[title] = file.getvalue()
        assert " ".join(texts[title].split()).count(PROMPTS[title]) == 1
        assert max(map(len, texts[title].splitlines())) <= 80
    assert len(set(texts.values())) == 2


def test_what_must_be_cut_is_cut_between_words():
    assert last_words("one two three", 20) == "one two three"
    assert last_words("one two three four", 12) == "… three four"
    assert last_words("one two three four", 11) == "… four"


def test_an_impossible_story_names_the_word_that_betrays_it():
    world = mock.Mock(source=StorySource())
    story = "The cat sat on the mat. It watched a bird."
    assert first_wrong(world, story) == len(to_words(story))  # it ends too soon
    assert GeneratedStory(story, first_wrong(world, story)).cut()[1] == "(the end)"
    wrong = "The cat sat on the bird. It watched a mat."
    found = GeneratedStory(wrong, first_wrong(world, wrong))
    assert found.cut() == ("The cat sat on the", "bird", ". It watched a mat.")
    assert not found.possible
    file = io.StringIO()
    print_samples(Console(file=file, width=80, highlight=False), [found])
    assert "»bird«. It watched a mat." in file.getvalue()
    assert first_wrong(world, "Th# \x00") == -1
    whole = to_text(StorySource().story(random.Random(0))).removesuffix(END)
    assert first_wrong(world, whole) is None


# The verdict


def test_probability_on_impossible_words_counts_as_an_error():
    comparison = Comparison("", "", {"a": 0.5, "b": 0.5}, {"a": 0.48, "b": 0.48})
    assert comparison.rows[-1] == ("any other", 0.0, pytest.approx(0.04))
    assert comparison.worst == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("loss", "word", "holds"),
    [(1.0299, 0.0299, True), (1.0301, 0.0, False), (1.0, 0.0301, False), (0.96, 0.0, False)],
)
def test_the_verdict_is_what_was_measured(loss, word, holds):
    worst = Comparison("", "", {"a": 1.0}, {"a": 1.0 - word})
    assert DemoResult(loss, loss - 1, worst, 1.0).holds is holds


def test_bar_length_is_proportional():
    assert bar(0.0, 4) == "    "
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 4) == "██  "
    assert bar(1 / 32, 4) == "▏   "
    assert log_fraction(30.0) == pytest.approx(1.0)
    assert log_fraction(-0.1) == 0.0


def test_the_ema_decay_is_valid_for_any_number_of_steps(tmp_path):
    for steps in (1, 12, 1500):
        assert 0 <= DemoArgs(tmp_path, 0, steps, 100).settings().ema < 1


@pytest.mark.parametrize("wrong", [["--seed", "-1"], ["--device", "tpu9"]])
def test_user_errors_are_one_line(tmp_path, wrong):
    found = run("demo", "--out", tmp_path / "x", *wrong, check=2)
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()
