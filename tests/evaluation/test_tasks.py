"""Tasks from files: every figure is what a naive loop over full forwards gives."""

import json
import math
from pathlib import Path

import pytest
import torch

from inference.tiny import END, byte_tokenizer, scripted_model, tiny_model
from scratchlm import ModelConfig, TransformerLM
from scratchlm.errors import ScratchLMError
from scratchlm.evaluation import Evaluator, parse_task, read_task
from scratchlm.evaluation.encoding import encode_pair, rolling_windows
from scratchlm.inference import Loaded
from scratchlm.tokenizer import CharTokenizer, Tokenizer

CONTEXT = 32


def loaded(model=None, tokenizer=None, eos_ids=(256,)):
    model = model or tiny_model(257, CONTEXT)
    return Loaded(model, tokenizer or byte_tokenizer(), model.config, Path("tiny"), eos_ids)


def task(*cases, name="made-up"):
    return parse_task([json.dumps(case).encode() + b"\n" for case in cases], name)


@torch.inference_mode()
def naive(model, context, continuation):
    """Score a continuation by one full forward: its log-probabilities, and the best tokens."""
    ids = [*context, *continuation]
    table = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[len(context) - 1 :]
    return table[torch.arange(len(table)), torch.tensor(continuation)], table.argmax(-1).tolist()


# Kinds


def test_a_uniform_model_takes_exactly_eight_bits_for_a_byte():
    config = ModelConfig(256, CONTEXT, 16, 1, 2)
    model = TransformerLM(config)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    found = Evaluator(loaded(model, tokenizer, eos_ids=(0,))).run(
        task({"text": "Grüße, " * 20}, {"text": "short"}, {"text": "one more, longer text" * 7})
    )
    assert found.metrics["bits_per_byte"].value == 8
    assert found.metrics["loss"].value == math.log(256)
    assert found.counts["bytes"] == found.counts["tokens"] == 9 * 20 + 5 + 21 * 7


def test_a_text_has_the_loss_of_a_full_forward_from_its_prefix_on():
    texts = ["The cat sat.", "ü" * 9, "A third text"]
    found = Evaluator(loaded()).run(task(*({"text": text} for text in texts)))
    ids = [list(text.encode()) for text in texts]
    nats = [-naive(tiny_model(257, CONTEXT), [256], row)[0].sum().item() for row in ids]
    loss = sum(nats) / sum(map(len, ids))
    assert found.metrics["loss"].value == pytest.approx(loss, abs=1e-5)
    assert found.metrics["perplexity"].value == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss / math.log(2)  # every byte is a token
    assert found.metrics["bits_per_byte"].value == pytest.approx(bits, abs=1e-5)
    assert found.metrics["loss"].low < loss < found.metrics["loss"].high


def test_a_long_text_is_scored_in_windows_each_token_once():
    text = "".join(chr(33 + i * 7 % 90) for i in range(2 * CONTEXT + 9))
    found = Evaluator(loaded()).run(task({"text": text}))
    ids, model, nats = list(text.encode()), tiny_model(257, CONTEXT), 0.0
    every = [256, *ids]
    for first in range(0, len(ids), CONTEXT):
        end = min(first + CONTEXT, len(ids))
        begin = max(0, end - CONTEXT)  # in `every`: as much as fits is seen
        nats -= naive(model, every[begin : first + 1], ids[first:end])[0].sum().item()
    assert found.counts == {"cases": 1, "tokens": len(ids), "bytes": len(ids)}
    assert found.metrics["loss"].value == pytest.approx(nats / len(ids), abs=1e-5)
    assert found.metrics["loss"].low is None


@pytest.mark.parametrize("length", [1, 2, 5, 30])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 29])
def test_windows_score_every_token_once_after_as_much_as_fits(length, count):
    ids = list(range(100, 100 + count))
    every, windows = [7, *ids], list(rolling_windows(ids, 7, length))
    assert [token for _, scored in windows for token in scored] == ids
    for i, (seen, scored) in enumerate(windows):
        assert len(seen) + len(scored) - 1 <= length
        assert i == 0 or len(seen) + len(scored) - 1 == length
        end = every.index(scored[-1]) + 1
        assert seen + scored == every[end - len(seen + scored) : end]


def test_without_a_prefix_the_first_token_is_not_scored():
    tokenizer = CharTokenizer.of_text(["abcdé"])
    model = tiny_model(tokenizer.vocab_size, CONTEXT)
    found = Evaluator(loaded(model, tokenizer, eos_ids=())).run(task({"text": "éabc"}))
    assert found.counts == {"cases": 1, "tokens": 3, "bytes": 3}


def test_choices_are_compared_by_likelihood_and_by_likelihood_per_byte():
    cases = [
        {"context": "The cat sat on the", "choices": [" mat", " dog ran away"], "answer": 1},
        {"context": "The cat sat on the", "choices": [" hill", " m", " ox"], "answer": 2},
        {"context": "Two and two ", "choices": ["make 4", "are five, so to say"], "answer": 0},
        {"context": "", "choices": ["A", "B"], "answer": 0},
    ]
    found = Evaluator(loaded()).run(task(*cases))
    model, right, by_length = tiny_model(257, CONTEXT), 0, 0
    for case, told in zip(cases, found.cases, strict=True):
        spaces = " " if case["context"].endswith(" ") else ""
        context = list(case["context"].rstrip().encode()) or [256]
        totals = [
            naive(model, context, list((spaces + choice).encode()))[0].sum().item()
            for choice in case["choices"]
        ]
        assert told["loglikelihoods"] == pytest.approx(totals, abs=1e-4)
        per_byte = [t / len(c.encode()) for t, c in zip(totals, case["choices"], strict=True)]
        right += totals.index(max(totals)) == case["answer"]
        by_length += per_byte.index(max(per_byte)) == case["answer"]
    assert found.metrics["accuracy"].value == right / 4
    assert found.metrics["accuracy_by_length"].value == by_length / 4
    assert any(case["chosen"] != case["chosen_by_length"] for case in found.cases)


def test_answers_are_right_where_they_are_the_same_but_for_spaces_around_them():
    model = scripted_model([*b" Paris\nand so on", 256], 257, CONTEXT)
    cases = [
        {"prompt": "Capital of France?", "answer": "Paris"},
        {"prompt": "Capital of France?", "answer": ["Lyon", " Paris "]},
        {"prompt": "Capital of France?", "answer": "Paris and", "stop": ["xx"]},
    ]
    for case, right in zip(cases, (1, 1, 0), strict=True):
        model.lm_head.num_generated = 0
        case["max_new_tokens"] = 10
        found = Evaluator(loaded(model)).run(task(case))
        assert found.metrics["exact_match"].value == right, found.cases


def test_a_next_word_has_its_probability_and_the_best_tokens_beside_it():
    cases = [{"context": "abc", "next": "de"}, {"context": "abcd", "next": "e"}]
    found = Evaluator(loaded()).run(task(*cases))
    model = tiny_model(257, CONTEXT)
    for case, told in zip(cases, found.cases, strict=True):
        values, greedy = naive(model, list(case["context"].encode()), list(case["next"].encode()))
        assert told["probability"] == pytest.approx(values.sum().exp().item(), rel=1e-3)
        assert told["greedy"] == (bytes(greedy) == case["next"].encode())
        assert len(told["best"]) == 10
        assert told["best"][0][0] == byte_tokenizer().decode([greedy[0]])
    assert found.metrics["word_perplexity"].value > 1


def test_contexts_that_do_not_fit_lose_their_beginning_and_are_counted():
    context = "x" * 40 + "The cat sat on the"
    found = Evaluator(loaded()).run(task({"context": context, "next": " mat"}))
    assert found.counts["cut"] == 1
    ids = list((context + " mat").encode())[-(CONTEXT + 1) :]
    values, _ = naive(tiny_model(257, CONTEXT), ids[:-4], ids[-4:])
    assert found.cases[0]["probability"] == pytest.approx(values.sum().exp().item(), rel=1e-3)
    with pytest.raises(ScratchLMError, match="does not fit the context of 32"):
        Evaluator(loaded()).run(task({"context": "a", "next": "y" * 33}))
    with pytest.raises(
        ScratchLMError, match="made-up: case 1: an answer of 32 tokens does not fit"
    ):
        Evaluator(loaded()).run(task({"prompt": "a", "answer": "b", "max_new_tokens": 32}))
    found = Evaluator(loaded(eos_ids=())).run(task({"prompt": "a", "answer": "b", "stop": ["~~"]}))
    assert len(found.cases[0]["text"].encode()) <= 3 * CONTEXT // 2  # half the context, by default


def test_a_pair_is_cut_where_the_context_alone_ends():
    special = byte_tokenizer(END, " mat")
    found = encode_pair(loaded(tokenizer=special), "on the ", "mat")
    assert found == (list(b"on the"), [257])
    begins = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<s>"], template=([256], []))
    ours = loaded(tokenizer=begins, eos_ids=())
    assert encode_pair(ours, "a", "b") == ([256, 97], [98])
    assert encode_pair(ours, "<s>a", "b") == ([256, 97], [98])
    assert encode_pair(ours, "", "b") == ([256], [98])


# Files


def test_a_file_is_read_line_by_line_and_named_after_itself(tmp_path):
    path = tmp_path / "capitals.jsonl"
    path.write_text('{"context": "a", "next": "b"}\n\n{"next": "d", "context": "c"}\n')
    found, content = read_task(path), path.read_bytes()
    assert (found.name, found.kind, len(found.cases)) == ("capitals", "next", 2)
    path.rename(tmp_path / "capitals.ndjson").write_bytes(b"\xef\xbb\xbf" + content)
    assert read_task(tmp_path / "capitals.ndjson") == found


GOOD = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([GOOD, b"{nonsense\n"], "line 2: not valid JSON"),
        ([GOOD, b"[1]\n"], "line 2: a JSON object was expected"),
        ([GOOD, b'{"text": ""}\n'], "line 2: text must be a text that is not empty; got ''"),
        ([GOOD, b'{"text": 3}\n'], "line 2: text must be a text"),
        ([GOOD, b'{"context": "a", "next": "b"}\n'], "line 2: a case of kind next among cases"),
        (
            [b'{"prompt": "a", "answer": "b", "stopp": 1}\n'],
            "line 1: unknown key 'stopp' in a case",
        ),
        ([b'{"question": "a"}\n'], "line 1: must have the keys of one kind"),
        ([b'{"text": "a", "text": "b"}\n'], "stands twice"),
        ([b'{"context": "a", "choices": ["b"], "answer": 0}\n'], "choices must be two texts"),
        ([b'{"context": "a", "choices": ["b", ""], "answer": 0}\n'], "choices must be texts"),
        ([b'{"context": "a", "choices": ["b", "c"], "answer": 2}\n'], "from 0 to 1; got '2'"),
        ([b'{"context": "a", "choices": ["b", "c"], "answer": true}\n'], "got 'True'"),
        ([b'{"context": 1, "choices": ["b", "c"], "answer": 1}\n'], "context must be a text"),
        ([b'{"prompt": "a", "answer": []}\n'], "answer must be texts"),
        ([b'{"prompt": "a", "answer": "b", "max_new_tokens": 0}\n'], "above 0; got '0'"),
        ([b"\xff\n"], "line 1: not valid JSON"),
        ([GOOD, b'{"text": "\\ud800"}\n'], "line 2: it holds half a surrogate pair"),
        ([b"\n"], "holds no cases"),
        ([b'{"text": "' + b"a" * (16 << 20)], "must not exceed 16,777,216 bytes"),
    ],
)
def test_what_is_no_case_is_refused_with_its_line(lines, told):
    with pytest.raises(ScratchLMError, match=r"^made-up: ") as error:
        parse_task(lines, "made-up")
    assert told in str(error.value)
    assert len(str(error.value)) < 400
