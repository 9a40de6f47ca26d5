"""The harness's adapter beside the harness's own `hf` model, on the exported checkpoint."""

import json
import random
import sys
import warnings
from functools import partial

import pytest
import torch

from inference.tiny import END, byte_tokenizer, tiny_model
from scratchlm.cli import main
from scratchlm.errors import ScratchLMError
from scratchlm.evaluation import Evaluator
from scratchlm.inference import load_model
from scratchlm.interop import write_hf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the harness and what it imports
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from scratchlm.evaluation import lm_eval_adapter
    from scratchlm.evaluation.lm_eval_adapter import ScratchLMForHarness, run_harness

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
CONTEXT = 96
WORDS = ("cat", "dog", "sat", "mat", " ", "hill", "grüße", "!", "\n", "Paris", "12")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A random model in Hugging Face's layout, with its tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = byte_tokenizer(END, "<|im_start|>", "<|im_end|>")
    model = tiny_model(tokenizer.vocab_size, CONTEXT, seed=3)
    path = write_hf(
        folder / "model", model.config, model.state_dict(), tokenizer.save(folder / "tokenizer")
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def both(exported):
    """Ours and theirs."""
    theirs = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=3)
    return ScratchLMForHarness(Evaluator(load_model(exported))), theirs


def text(draw, most):
    return "".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def instances(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("t", i, 1))
        for i, args in enumerate(arguments)
    ]


def test_every_likelihood_and_greedy_flag_is_that_of_hf(both):
    ours, theirs = both
    draw = random.Random(0)
    contexts = [text(draw, 30) for _ in range(8)] + ["", "ends in a space ", "x" * 200]
    pairs = [(context, text(draw, 6)) for context in contexts for _ in range(3)]
    likely = theirs.generate_until(
        instances("generate_until", [(c or "a", {"max_gen_toks": 3}) for c in contexts])
    )
    pairs += [(context, answer) for context, answer in zip(contexts, likely, strict=True) if answer]
    expected = theirs.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    found = ours.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], abs=1e-4
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert len({greedy for _, greedy in found}) == 2


def test_every_rolling_likelihood_is_that_of_hf(both):
    ours, theirs = both
    draw = random.Random(1)
    texts = [(text(draw, most),) for most in (3, 20, 60, 200, 400)] + [("y",)]
    assert max(len(one.encode()) for (one,) in texts) > 3 * CONTEXT
    requests = instances("loglikelihood_rolling", texts)
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-3, rel=1e-6)


def test_every_generation_is_that_of_hf(both):
    ours, theirs = both
    draw = random.Random(2)
    contexts = [text(draw, 12) for _ in range(9)] + ["z" * 150]
    options = [
        {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
        {"until": ["b", "u", "Q"], "max_gen_toks": 40, "temperature": 0.0},
        {"until": [], "max_gen_toks": 16},
    ]
    requests = instances(
        "generate_until", [(context, one) for context in contexts for one in options]
    )
    expected = theirs.generate_until(requests, disable_tqdm=True)
    found = ours.generate_until(requests)
    assert found == expected
    assert len(set(found)) > 5


def test_ids_beyond_the_tokenizer_leave_no_text(tmp_path):
    tokenizer = byte_tokenizer(END)
    model = tiny_model(2 * tokenizer.vocab_size, CONTEXT, seed=1)  # as of Qwen, rounded up
    path = write_hf(tmp_path / "m", model.config, model.state_dict(), tokenizer.save(tmp_path))
    theirs = HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=3)
    requests = instances(
        "generate_until",
        [(f"{start} cat", {"until": ["\n"], "max_gen_toks": 12}) for start in "abcdef"],
    )
    expected = theirs.generate_until(requests, disable_tqdm=True)
    assert ScratchLMForHarness(Evaluator(load_model(path))).generate_until(requests) == expected


def test_chats_are_written_as_hf_writes_them(both):
    ours, theirs = both
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
    ]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    begun = [*chat, {"role": "assistant", "content": "The answer is"}]
    expected = theirs.apply_chat_template(begun, add_generation_prompt=False)
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == expected
    assert expected.endswith("The answer is")
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE


# Whole tasks, offline

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(5)
    data = folder / "data.jsonl"
    rows = [
        {
            "question": text(draw, 8).strip() or "x",
            "choices": [" yes", " no, never", " 12"],
            "answer": i % 3,
        }
        for i in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, page in (("own_choice", CHOICE), ("own_rolling", ROLLING)):
        made = page.format(name=name, data=data, cache=folder / "cache")
        (folder / f"{name}.yaml").write_text(made)
    return folder, rows


def test_offline_tasks_run_and_give_what_our_own_tasks_give(both, tasks):
    folder, rows = tasks
    ours, _ = both
    choice, rolling = run_harness(
        ours.evaluator, ["own_choice", "own_rolling"], include_path=folder, num_fewshot=0
    )
    from scratchlm.evaluation import parse_task

    cases = [
        {
            "context": f"{row['question']} Answer:",
            "choices": row["choices"],
            "answer": row["answer"],
        }
        for row in rows
    ]
    same = ours.evaluator.run(parse_task([json.dumps(case).encode() for case in cases], "same"))
    assert choice.metrics["acc"].value == same.metrics["accuracy"].value
    assert choice.metrics["acc_norm"].value == same.metrics["accuracy_by_length"].value
    assert choice.metrics["acc"].low < choice.metrics["acc"].value
    texts = [json.dumps({"text": row["question"]}).encode() for row in rows]
    same = ours.evaluator.run(parse_task(texts, "same"))
    bits = same.metrics["bits_per_byte"].value
    assert rolling.metrics["bits_per_byte"].value == pytest.approx(bits, rel=1e-9)
    assert choice.counts == {"cases": 12}


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_a_whole_task_asks_and_answers_as_with_hf(both, tasks, chat):
    """Few-shot prompts, chat templates and all: the harness's own report of every sample."""
    manager = lm_eval_adapter.TaskManager(include_path=str(tasks[0]), include_defaults=False)
    found, expected = (
        lm_eval_adapter.harness.simple_evaluate(
            model=model,
            tasks=["own_choice"],
            num_fewshot=1,
            limit=5,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            task_manager=manager,
            bootstrap_iters=0,
        )
        for model in both
    )
    pairs = zip(found["samples"]["own_choice"], expected["samples"]["own_choice"], strict=True)
    for a, b in pairs:
        assert a["arguments"] == b["arguments"]
        assert ("<|im_start|>" in str(a["arguments"])) == chat
        for (mine, greedy), (its, its_greedy) in zip(
            a["filtered_resps"], b["filtered_resps"], strict=True
        ):
            assert mine == pytest.approx(its, abs=1e-4)
            assert greedy == its_greedy


def test_the_command_runs_tasks_of_the_harness(exported, tasks, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)  # no repository, of which git would complain
    words = [str(exported), "--lm-eval", "own_choice", "--include-path", str(tasks[0]), "--json"]
    monkeypatch.setattr(sys, "argv", ["scratchlm", "evaluate", *words, "--limit", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capfd.readouterr()
    assert not ended.value.code, told.err
    assert "fatal" not in told.err
    (one,) = json.loads(told.out)["models"][0]["results"]
    assert (one["task"], one["kind"], one["cases"]) == ("own_choice", "lm-eval", 4)
    assert one["metrics"].keys() == {"acc", "acc_norm"}
    monkeypatch.setattr("scratchlm.cli.evaluation_run.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--lm-eval needs the package lm-eval: pip install 'scratchlm[eval]'" in (
        capfd.readouterr().err
    )


def test_a_uniform_model_has_eight_bits_per_byte_in_the_harness(tasks, tmp_path):
    from dataclasses import replace

    from scratchlm import ModelConfig, TransformerLM
    from scratchlm.inference import Loaded
    from scratchlm.tokenizer import Tokenizer

    model = TransformerLM(ModelConfig(256, CONTEXT, 16, 1, 2))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    loaded = Loaded(model, tokenizer, model.config, tmp_path, eos_ids=(0,))
    (found,) = run_harness(Evaluator(loaded), ["own_rolling"], include_path=tasks[0])
    assert found.metrics["bits_per_byte"].value == pytest.approx(8, abs=1e-13)
    with pytest.raises(ScratchLMError, match="needs an end-of-text token"):
        run_harness(Evaluator(replace(loaded, eos_ids=())), ["own_rolling"], include_path=tasks[0])


@pytest.mark.parametrize(("error", "low"), [(0.0, None), (0.1, 0.9 - 1.96 * 0.1)])
def test_a_standard_error_of_zero_gives_no_interval(error, low):
    figures = {"alias": "own", "acc,none": 0.9, "acc_stderr,none": error}
    found = lm_eval_adapter._result("own", figures, []).metrics["acc"]
    assert found.low == (low and pytest.approx(low, abs=1e-4))


def test_what_the_harness_cannot_do_is_one_line(both, tasks, monkeypatch):
    ours, _ = both
    folder, _ = tasks
    every = partial(lm_eval_adapter.TaskManager, include_defaults=False)  # theirs take 15 s to find
    monkeypatch.setattr(
        lm_eval_adapter,
        "TaskManager",
        lambda **options: every(include_path=options["include_path"]),
    )
    with pytest.raises(ScratchLMError, match="knows no such task; did you mean 'own_choice'"):
        run_harness(ours.evaluator, ["own_choic"], include_path=folder)
    with pytest.raises(ScratchLMError, match="'num_beams' is not supported"):
        ours.generate_until(
            instances("generate_until", [("a", {"num_beams": 4, "max_gen_toks": 5})])
        )
    with pytest.raises(ScratchLMError, match="does not fit the context of 96"):
        ours.generate_until(instances("generate_until", [("a", {"max_gen_toks": 96})]))


@pytest.mark.parametrize(
    ("lines", "change", "told"),
    [
        (1, ("{{q}}", "{{missing.field}}"), "--lm-eval bad: 'missing' is undefined"),
        (0, ("", ""), "--lm-eval bad: "),
        (1, ("test_split", "num_fewshot: 50\nfewshot_split: test\ntest_split"), "--lm-eval bad: "),
        (1, ("metric: acc", "metric: bypass"), "--lm-eval bad: the harness gave no figures"),
    ],
    ids=("field", "no cases", "too many examples", "no figures"),
)
def test_a_task_that_cannot_run_is_one_line(both, tmp_path, lines, change, told):
    data = tmp_path / "data.jsonl"
    data.write_text('{"q": "a", "c": ["b", "c"]}\n' * lines)
    task = (
        f"task: bad\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\n"
        "doc_to_choice: '{{c}}'\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "bad.yaml").write_text(task.replace(*change) if change[0] else task)
    with pytest.raises(ScratchLMError) as refused:
        run_harness(both[0].evaluator, ["bad"], include_path=tmp_path)
    assert str(refused.value).startswith(told)
    assert "\n" not in str(refused.value)
