"""Task heads end to end: records, training, resuming, predictions, import and export."""

import json
import random
import unicodedata
from functools import partial

import pytest
import torch

from inference.tiny import byte_tokenizer, save_run
from scratchlm import ModelConfig, TransformerLM
from scratchlm.checkpoint import find_checkpoints, read_tensors
from scratchlm.cli.predict import _check_kind, _field
from scratchlm.config.heads import TaskHead
from scratchlm.data.conversations import Example
from scratchlm.data.examples import write_examples
from scratchlm.data.labelled import find_labels, read_answered, read_classified
from scratchlm.errors import ScratchLMError
from scratchlm.inference.heads import LoadedHead, answer, best_span, classify, load_head
from scratchlm.model.heads import SpanLogits
from scratchlm.tokenizer import Tokenizer, train_bpe
from scratchlm.tokenizer.task_inputs import question_ids
from scratchlm.training import read_metrics
from scratchlm.training.heads import HeadBatches, HeadValidation, count_right, head_loss

FILLERS = ("one", "day", "a", "big", "saw", "the", "hill")
ANIMALS = ("fox", "yak", "zebu")


def texts(count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        animal = draw.choice(ANIMALS)
        words = [draw.choice(FILLERS) for _ in range(draw.randint(2, 5))]
        words.insert(draw.randrange(len(words)), animal)
        yield {"text": " ".join(words), "label": animal}


def questions(count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        names = draw.sample(("Ann", "Bob", "Cy", "Dee"), 2)
        colours = draw.sample(("red", "blue", "green"), 2)
        pairs = zip(names, colours, strict=True)
        context = ". ".join(f"{name}: {colour}" for name, colour in pairs)
        yield {"question": "2nd?", "context": context, "answer": colours[1]}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def cli(cli, tmp_path, monkeypatch):
    """Run the command line in this process, in a folder with a small model and data."""
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    config = ModelConfig(tokenizer.vocab_size, 64, 32, 1, 2)
    torch.manual_seed(0)
    save_run(tmp_path / "base", TransformerLM(config), tokenizer)
    write(tmp_path / "animals.jsonl", texts(240))
    write(tmp_path / "questions.jsonl", questions(300))
    return cli


def test_a_classifier_learns_predicts_leaves_and_comes_back(cli, tmp_path):
    words = ("finetune", "base", "animals.jsonl", "--task", "classification", "--out", "run")
    code, _, err = cli(*words, "--steps", 120, "train.lr=1e-2", "train.eval_every=60")
    assert code == 0, err
    assert "labels fox, yak, zebu" in err
    figures = [record["tasks"]["held-out"] for record in read_metrics("run") if "tasks" in record]
    assert figures[-1]["accuracy"]["value"] == 1
    assert figures[0]["accuracy"]["value"] < 0.9
    report = (tmp_path / "run/report.html").read_text()
    assert "<h2>Tasks</h2>" in report
    assert "perplexity" not in err + report  # labels have none

    write(tmp_path / "new.jsonl", texts(60, seed=9))
    code, out, err = cli("predict", "run", "new.jsonl")
    assert code == 0, err
    assert out.splitlines()[-1].startswith("right: 60 of 60, 1.0000 (")
    code, out, _ = cli("predict", "run", "--text", "the big yak saw", "--json")
    line = json.loads(out)
    assert line["label"] == "yak"
    assert sum(line["probabilities"].values()) == pytest.approx(1)

    code, out, err = cli("export", "run", "to-hf")
    assert code == 0, err
    table = json.loads((tmp_path / "to-hf/config.json").read_text())
    assert table["architectures"] == ["LlamaForSequenceClassification"]
    assert table["pad_token_id"] == 256
    assert cli("import", "to-hf", "back")[0] == 0
    for place in ("to-hf", "back"):
        _, out, err = cli("predict", place, "new.jsonl")
        assert out.splitlines()[-1].startswith("right: 60 of 60"), err
    expected = classify(load_head("run"), ["a fox"])[0]
    assert classify(load_head("back"), ["a fox"])[0] == pytest.approx(expected, abs=1e-5)

    code, _, err = cli("generate", "run", "--prompt", "x")
    assert code == 2
    assert "a model with a task head; `scratchlm predict` uses it" in err


def test_answers_are_learnt_and_found_in_the_context(cli, tmp_path):
    words = ("finetune", "base", "questions.jsonl", "--task", "qa", "--out", "run")
    code, _, err = cli(*words, "--steps", 100, "train.lr=1e-2", "train.eval_every=50")
    assert code == 0, err
    figures = [record["tasks"]["held-out"] for record in read_metrics("run") if "tasks" in record]
    assert figures[-1]["exact_span"]["value"] >= 0.9
    write(tmp_path / "new.jsonl", questions(40, seed=5))
    code, out, err = cli("predict", "run", "new.jsonl")
    assert code == 0, err
    right = int(out.splitlines()[-1].split()[1])
    assert right >= 36
    context = "Bob: green. Ann: red"
    code, out, _ = cli("predict", "run", "--question", "2nd?", "--context", context, "--json")
    line = json.loads(out)
    assert context[line["start"] : line["end"]] == line["text"] == "red"


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(cli, tmp_path, monkeypatch):
    words = ("finetune", "base", "animals.jsonl", "--task", "classification", "--steps", 9)
    assert cli(*words, "--out", "whole")[0] == 0
    from scratchlm.training import session

    def stops(*arguments, should_stop, **options):
        return first(*arguments, should_stop=lambda: arguments[2].progress.step >= 4, **options)

    first = session.train
    monkeypatch.setattr(session, "train", stops)
    cli(*words, "--out", "cut")
    monkeypatch.setattr(session, "train", first)
    assert [path.name for path in find_checkpoints("cut")][-1] == "step-00000004"
    code, _, err = cli("finetune", "--out", "cut", "--resume")
    assert code == 0, err
    ours, theirs = (read_tensors(find_checkpoints(run)[-1]) for run in ("whole", "cut"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Pieces


def test_padding_changes_neither_loss_nor_predictions(tmp_path):
    tokenizer = byte_tokenizer()
    config = ModelConfig(tokenizer.vocab_size, 64, 32, 2, 2)
    head = TaskHead("classification", ("a", "b", "c"))
    rows = [Example([*b"ab" * n, n % 3], [False] * (2 * n + 1)) for n in (1, 4, 9, 20)]
    examples = write_examples(tmp_path / "x", rows, "")
    from scratchlm.inference.heads import make_head

    model = make_head(config, head).eval()
    together = HeadValidation(examples, 64, 4, head=head)
    alone = HeadValidation(examples, 64, 1, head=head)
    (batch,) = list(together)
    assert batch.inputs.shape == (4, 64)
    assert [one.inputs.shape[1] for one in alone] == [32, 32, 32, 64]
    losses = torch.stack([head_loss(model, one) for one in alone])
    torch.testing.assert_close(head_loss(model, batch), losses.mean(), atol=1e-6, rtol=1e-6)
    assert count_right(model, together) == count_right(model, alone)
    pieces = list(batch.cut(3))
    assert [piece.num_targets() for piece in pieces] == [3, 1]
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), batch.targets)


def test_every_example_comes_once_an_epoch(tmp_path):
    rows = [Example([n, n % 2], [False, False]) for n in range(10)]
    examples = write_examples(tmp_path / "x", rows, "")
    batches = HeadBatches(examples, 8, 5, 3, head=TaskHead("classification", ("a", "b")))
    seen = torch.cat([batches.batch(step).inputs[:, 0] for step in range(2)])
    assert sorted(seen.tolist()) == list(range(10))


def test_the_marked_tokens_are_those_of_the_answer(tmp_path):
    tokenizer = byte_tokenizer()
    context = "Die Größe: süß, sehr süß."
    record = {"question": "Wie?", "context": context, "answer": "süß", "answer_start": 21}
    path = write(tmp_path / "q.jsonl", [record])
    (example,) = read_answered(path, tokenizer, 99)
    marked = bytes(i for i, learns in zip(example.ids, example.learns, strict=True) if learns)
    assert marked.decode() == "süß"
    assert bytes(example.ids).decode() == f"Wie?\n{context}"
    first = example.learns.index(True)
    assert first == len(f"Wie?\n{context[:21]}".encode())
    asked = question_ids(tokenizer, "Wie?", context)
    assert asked.tokens_of(0, 3) == (5, 7)


@pytest.mark.parametrize("normalization", [None, "NFC"])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_an_answer_is_whole_characters_of_the_context_as_it_was_written(
    normalization, form, tmp_path
):
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], normalization=normalization)
    context, said = (
        unicodedata.normalize(form, text) for text in ("Größe é süß 한글.", "süß 한글")
    )
    record = {"question": "Wie?", "context": context, "answer": said}
    (example,) = read_answered(write(tmp_path / "q.jsonl", [record]), tokenizer, 99)
    marked = [i for i, learns in enumerate(example.learns) if learns]
    text = bytes(example.ids[marked[0] : marked[-1] + 1]).decode()
    assert text == (unicodedata.normalize("NFC", said) if normalization else said)

    config, head = ModelConfig(256, 64, 8, 1, 1), TaskHead("qa")
    for last in (marked[-1], marked[-1] - 1):  # the second is within a character
        model = points_at(marked[0], last)
        loaded = LoadedHead(model, head, tokenizer, config, tmp_path)
        (found,) = answer(loaded, [("Wie?", context)])
        assert context[found.start : found.end] == found.text == said


def points_at(*ends):
    """Return a model that finds every answer from one token to another."""

    def model(ids, attention_mask):
        return SpanLogits(*(torch.eye(ids.shape[1])[None, at] for at in ends))

    model.token_embeddings = torch.nn.Embedding(1, 1)
    return model


def test_a_token_holds_the_characters_that_it_holds_for_hugging_face(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text("Größe süß 한국어 日本 🙂 " * 30)
    tokenizer = Tokenizer(*train_bpe(tmp_path / "text.txt", 275, []))
    tokenizer.save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.post_processor = None  # which leaves spaces out
    for text in ("süß 本日 🙂🙃 나라", "e\u0301ö日"):
        found = question_ids(tokenizer, "?", text)
        expected = theirs.encode(text, add_special_tokens=False)
        assert found.ids[found.first :] == expected.ids
        assert found.spans == expected.offsets


def test_the_best_span_begins_before_it_ends_and_is_short_enough():
    start, end = torch.tensor([0.0, 1.0, 9.0, 0.0]), torch.tensor([9.0, 2.0, 0.0, 3.0])
    assert best_span(start, end) == (2, 3)
    assert best_span(start, end, longest=1) == (0, 0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        start, end = torch.randn(2, 9, generator=generator)
        pairs = [(i, j) for i in range(9) for j in range(i, min(9, i + 4))]
        assert best_span(start, end, 4) == max(pairs, key=lambda p: start[p[0]] + end[p[1]])


def test_labels_are_sorted_numbers_by_size(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"text": "a", "label": n} for n in (10, 2, 1, 2)])
    assert find_labels(path) == ("1", "2", "10")
    found = read_classified(path, byte_tokenizer(), ("1", "2", "10"), 9)
    assert [example.ids for example in found] == [[97, 2], [97, 1], [97, 0], [97, 1]]


@pytest.mark.parametrize(
    ("kind", "record", "told"),
    [
        ("classification", {"text": "a"}, "a record must have text, label; label is"),
        ("classification", {"text": "a", "label": 1.5}, "label must be a text or a whole"),
        ("classification", {"text": 3, "label": "x"}, "text must be text; got int"),
        ("classification", {"text": "", "label": "x"}, "a text must hold at least one token"),
        ("classification", {"text": "a" * 65, "label": "x"}, "65 tokens do not fit in rows of 64"),
        ("qa", {"question": "q", "context": "c"}, "a record must have context, question"),
        (
            "qa",
            {"question": "q", "context": "c", "answer": "d"},
            "the answer 'd' is no part of the",
        ),
        (
            "qa",
            {"question": "q", "context": "cc", "answer": "c"},
            "the answer stands in the context twice",
        ),
        (
            "qa",
            {"question": "q", "context": "ccc", "answer": "cc"},
            "the answer stands in the context twice",
        ),
        ("qa", {"question": "q", "context": "c", "answer": " "}, "answer must not be empty"),
        (
            "qa",
            {"question": "q", "context": "ab", "answer": "b", "answer_start": 0},
            "the answer 'b' is no part of the context there",
        ),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, kind, record, told):
    good = {"text": "a", "label": "y"} if kind == "classification" else next(questions(1))
    path = write(tmp_path / "bad.jsonl", [good, record])
    read = partial(read_classified, labels=("x", "y"))
    with pytest.raises(ScratchLMError) as error:
        (read if kind == "classification" else read_answered)(path, byte_tokenizer(), longest=64)
    assert f"bad.jsonl: line 2: {told}" in str(error.value)


def test_there_may_be_more_labels_than_tokens(cli, tmp_path):
    write(tmp_path / "many.jsonl", [{"text": f"{n}", "label": n} for n in range(400)])
    words = ("finetune", "base", "many.jsonl", "--task", "classification", "--out", "run")
    code, _, err = cli(*words, "--steps", 1, "train.batch_size=2", "train.eval_batches=1")
    assert code == 0, err
    records = [{"text": "7", "label": 7}, {"text": "8", "label": 400}]
    for record, told in (
        (records[1], "label must be one of '0', '1', '2', '3', '4', '5' and 394 more; got '400'"),
        ({"text": ""}, "a text must hold at least one token"),
        ({"text": "a" * 200}, "200 tokens do not fit the context"),
    ):
        write(tmp_path / "asked.jsonl", [records[0], record])
        code, out, err = cli("predict", "run", "asked.jsonl")
        assert (code, out) == (2, "")
        assert f"asked.jsonl: line 2: {told}" in err
    (tmp_path / "blank.jsonl").write_text("\n")
    assert "blank.jsonl: there are no records" in cli("predict", "run", "blank.jsonl")[2]


def test_a_bad_record_leaves_no_run_behind(cli, tmp_path):
    write(tmp_path / "bad.jsonl", [{"text": "a", "label": "x"}, {"text": "a"}])
    words = ("finetune", "base", "bad.jsonl", "--task", "classification", "--out", "run")
    code, _, err = cli(*words)
    assert code == 2
    assert "bad.jsonl: line 2: a record must have text, label" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("finetune", "base", "animals.jsonl", "--task", "ranking"), "--task must be one of"),
        (
            ("finetune", "base", "animals.jsonl", "--task", "qa", "--rank", "4"),
            "--rank is for LoRA",
        ),
        (("predict", "base", "animals.jsonl"), "a language model, without a task head"),
        (("predict", "base"), "give DATA, or --text, or --question and --context"),
        (("predict", "base", "--question", "x"), "--question and --context belong together"),
        (("predict", "nowhere", "--text", "x"), "no such run"),
    ],
)
def test_what_cannot_be_asked_is_one_line(cli, words, told):
    code, _, err = cli(*words)
    assert code == 2
    assert told in err


def test_a_head_answers_only_what_it_was_made_for():
    from pathlib import Path

    from scratchlm.inference.heads import make_head

    config = ModelConfig(257, 16, 16, 1, 2)
    head = TaskHead("qa")
    loaded = LoadedHead(make_head(config, head), head, byte_tokenizer(), config, Path("here"))
    with pytest.raises(ScratchLMError, match="a head for qa, not for classification"):
        classify(loaded, ["a"])
    with pytest.raises(ValueError, match="answers questions: give --question and --context"):
        _check_kind("qa", texts=True, question=False)
    with pytest.raises(ValueError, match="classifies texts: give --text"):
        _check_kind("classification", texts=False, question=True)
    with pytest.raises(ScratchLMError, match="line 1: a record must have text; it has 'messages'"):
        _field({"messages": []}, "text", "line 1")
    with pytest.raises(ScratchLMError, match="18 tokens do not fit the context of 16"):
        answer(loaded, [("question", "context..")])
