"""`scratchlm evaluate`: models side by side, JSON, a picture, cases; what is wrong is one line."""

import json

import pytest
import torch

from inference.tiny import byte_tokenizer, save_run
from scratchlm import ModelConfig, TransformerLM

CHOICES = '{"context": "The cat sat on the", "choices": [" mat", " dog"], "answer": 0}\n' * 3
NEXT = '{"context": "The cat sat on the", "next": " mat"}\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two small runs, three tasks and a text."""
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    config = ModelConfig(tokenizer.vocab_size, 48, 16, 1, 2)
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        save_run(tmp_path / name, TransformerLM(config), tokenizer)
    (tmp_path / "choices.jsonl").write_text(CHOICES)
    (tmp_path / "words.jsonl").write_text(NEXT * 2)
    (tmp_path / "answers.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2", "max_new_tokens": 3}\n'
    )
    (tmp_path / "texts.jsonl").write_text('{"text": "A text."}\n{"text": "Another, longer"}\n')
    (tmp_path / "held-out.txt").write_text("The cat sat on the mat. " * 40)
    return tmp_path


def test_models_stand_side_by_side_with_intervals_and_next_word_tables(place, cli):
    tasks = ("choices.jsonl", "words.jsonl", "answers.jsonl", "texts.jsonl", "held-out.txt")
    code, out, err = cli("evaluate", "one", "two", *tasks)
    assert code == 0, err
    head, *rows = out.splitlines()
    assert head.split() == ["task", "cases", "figure", "one", "two"]
    for name in ("choices", "words", "answers", "texts", "held-out.txt"):
        assert any(row.startswith(f"{name} ") for row in rows), name
    assert "95 % confidence intervals" in out
    assert out.count("'The cat sat on the'") == 4  # two models, two cases
    assert "–" in out


def test_json_holds_every_figure_with_its_interval(place, cli):
    code, out, _ = cli("evaluate", "one", "two", "choices.jsonl", "held-out.txt", "--json")
    assert code == 0
    found = json.loads(out)
    assert [one["model"] for one in found["models"]] == ["one", "two"]
    for one in found["models"]:
        choices, text = one["results"]
        assert (choices["task"], choices["kind"], choices["cases"]) == ("choices", "choice", 3)
        assert choices["metrics"]["accuracy"].keys() == {"value", "low", "high"}
        figure = text["metrics"]["bits_per_byte"]
        assert figure["low"] < figure["value"] < figure["high"]
    first, second = (one["results"][1]["metrics"]["loss"]["value"] for one in found["models"])
    assert first != second


@pytest.mark.parametrize("text", ["held-out.txt", "texts.jsonl"])
def test_one_model_on_one_text_has_its_figures_flat(place, cli, text):
    _, out, _ = cli("evaluate", "one", text, "--json")
    figures = json.loads(out)
    assert [*figures] == ["loss", "perplexity", "bits_per_byte", "tokens", "bytes", "checkpoint"]
    assert 4 < figures["loss"] < 8
    _, out, _ = cli("evaluate", "one", text)
    assert out.startswith("loss   ")


def test_a_picture_and_the_cases_are_written(place, cli):
    words = ("choices.jsonl", "texts.jsonl", "--plot", "out.png", "--cases", "out.jsonl")
    code, _, err = cli("evaluate", "one", "two", *words)
    assert code == 0, err
    assert (place / "out.png").read_bytes().startswith(b"\x89PNG")
    cases = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    assert len(cases) == 2 * (3 + 2)
    assert cases[0].keys() >= {"model", "task", "case", "loglikelihoods", "chosen"}


def test_tasks_of_one_name_are_drawn_each_with_its_figures(place, cli, monkeypatch):
    from matplotlib.axes import Axes

    drawn, barh = [], Axes.barh
    monkeypatch.setattr(
        Axes, "barh", lambda self, *a, **k: drawn.append(a[1]) or barh(self, *a, **k)
    )
    (place / "others").mkdir()
    (place / "others" / "choices.jsonl").write_text(CHOICES.replace('"answer": 0', '"answer": 1'))
    words = ("choices.jsonl", "others/choices.jsonl", "--plot", "out.png")
    code, _, err = cli("evaluate", "one", *words)
    assert code == 0, err
    assert sorted(drawn[0]) == [0, 1]  # right in the one is wrong in the other


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("one",), "nothing to evaluate on"),
        (("one", "missing.jsonl"), "No such file"),
        (("one", "choices.jsonl", "two"), "models come before tasks; got the model two"),
        (("one", "choices.jsonl", "--limit", "3"), "--limit is for --lm-eval"),
        (("one", "choices.jsonl", "--chat-template"), "--chat-template is for --lm-eval"),
        (("one", "--lm-eval", "x", "--include-path", "nowhere"), "nowhere: no such folder"),
        (("one", "--lm-eval", "x", "--limit", "0"), "--limit must be at least 1; got 0"),
        (("one", "broken.jsonl"), "broken.jsonl: line 2: not valid JSON"),
        (("one", "choices.jsonl", "--plot", "no/such/place.png"), "there is no folder no/such"),
        (
            ("one", "choices.jsonl", "--plot", "place.svg"),
            "--plot must be a name that ends in .png",
        ),
        (("one", "choices.jsonl", "--cases", "no/such.jsonl"), "there is no folder no"),
        (("one", "choices.jsonl", "--cases", "two"), "two: a folder is there already"),
        (("one", "choices.jsonl", "--plot", "a.png", "--cases", "a.png"), "something else is to"),
        (("one", "held-out.txt", "--cases", "a.jsonl"), "--cases is for tasks; held-out text has"),
        (("one", "held-out.txt", "--context-length", "0"), "--context-length must be from 1 to"),
        (("one", "choices.jsonl", "--context-length", "9"), "--context-length is for held-out"),
        (("one", "choices.jsonl", "--batch-size", "9"), "--batch-size is for held-out text; none"),
        (("one", "choices.jsonl", "long.jsonl"), "long: case 2: a continuation of 60 tokens"),
        (("one", "asked.jsonl"), "asked: case 1: an answer of 60 tokens does not fit"),
        (("one", "none.jsonl"), "none.jsonl: line 1: max_new_tokens must be"),
        (("one", "unread.jsonl"), "unread.jsonl: line 1: unknown key 'top_k'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_wrong_is_one_line(place, cli, words, told):
    (place / "broken.jsonl").write_text(NEXT + "{\n")
    (place / "long.jsonl").write_text(NEXT + json.dumps({"context": "a", "next": "b" * 60}))
    (place / "asked.jsonl").write_text('{"prompt": "a", "answer": "b", "max_new_tokens": 60}')
    (place / "none.jsonl").write_text('{"prompt": "a", "answer": "b", "max_new_tokens": 0}')
    (place / "unread.jsonl").write_text('{"prompt": "a", "answer": "b", "top_k": 3}')
    before = sorted(place.rglob("*"))
    code, out, err = cli("evaluate", *words)
    assert code == 2
    assert out == ""
    assert told in err
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert sorted(place.rglob("*")) == before
