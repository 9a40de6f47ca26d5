"""The commands as a user meets them: what is printed, exit status, errors on one line."""

import json

import pytest
import torch
from typer.testing import CliRunner

from forked import ForkedCommand
from inference.test_chat import CHATML
from inference.tiny import byte_tokenizer, save_run, tiny_model
from scratchlm import acceleration
from scratchlm.cli import app
from scratchlm.cli.errors import one_line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), byte_tokenizer())


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("chat"), byte_tokenizer(*CHATML))


def save(path, tokenizer):
    model = tiny_model(vocab_size=tokenizer.vocab_size, context_length=96)
    return str(save_run(path, model, tokenizer))


def call(*arguments, stdin=None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_generate_prints_the_continuation_and_a_seed_repeats_it(run):
    options = ["generate", run, "-p", "ab", "--max-new-tokens", "8", "--seed", "3"]
    first = call(*options)
    assert first.exit_code == 0
    assert call(*options).stdout == first.stdout
    assert call(*options, "--no-cache").stdout == first.stdout
    assert call(*options, "--no-accelerate").stdout == first.stdout
    assert call(*options[:3], "-", *options[4:], stdin="ab").stdout == first.stdout
    assert call(*options[:-1], "4").stdout != first.stdout


def test_no_accelerate_leaves_the_model_plain_and_makes_no_runner(run, monkeypatch):
    made = []
    for name in ("accelerate", "make_runner"):
        real = getattr(acceleration, name)

        def recorded(*given, real=real, name=name, **options):
            made.append(name)
            return real(*given, **options)

        monkeypatch.setattr(acceleration, name, recorded)
    options = ["generate", run, "-p", "ab", "--max-new-tokens", "3", "--seed", "3"]
    assert call(*options, "--no-accelerate").exit_code == 0
    assert made == []
    assert call(*options).exit_code == 0
    assert made == ["accelerate", "make_runner"]


def test_json_holds_every_sample_with_its_tokens_and_logprobs(run):
    done = call(
        *["generate", run, "-p", "ab", "--max-new-tokens", "5", "--seed", "3"],
        *["--num-samples", "3", "--json", "--logprobs", "2"],
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 3
    for record in records:
        assert record["prompt"] == "ab"
        assert len(record["token_ids"]) == len(record["logprobs"]) <= 5
        assert all(len(entry["best"]) == 2 for entry in record["logprobs"])
    alone = call(*["generate", run, "-p", "ab", "--max-new-tokens", "5", "--seed", "5", "--json"])
    assert json.loads(alone.stdout)["token_ids"] == records[2]["token_ids"]


def test_speculation_changes_no_greedy_text_and_says_what_it_cannot(run, tmp_path):
    options = ["generate", run, "-p", "ababab", "--max-new-tokens", "20", "--temperature", "0"]
    expected = call(*options)
    assert expected.exit_code == 0
    for more in (["--draft", run], ["--speculate", "lookup"], ["--speculate", "off"]):
        found = call(*options, *more)
        assert (found.exit_code, found.stdout) == (0, expected.stdout)
    slow = call(*options, "--speculate", "lookup", "--no-accelerate")
    assert slow.stdout == expected.stdout
    gains = torch.cuda.is_available()  # there proposals are read together
    assert ("warning: speculation gains nothing" in slow.stderr) != gains
    other = save(tmp_path, byte_tokenizer("<|end|>"))
    for more, message in (
        (["--speculate", "draft"], "--speculate draft needs a draft model"),
        (["--speculate", "guess"], "--speculate must be one of off, lookup, draft; got 'guess'"),
        (["--draft", run, "--no-cache"], "speculation needs the cache; got --no-cache"),
        (
            ["--temperature", "1", "--draft", run, "--beam", "2"],
            "--draft has no effect with",
        ),
        (["--draft", other], "its tokens are not those of"),
    ):
        assert message in one_line(call(*options, *more).exception)


def test_beam_prints_the_best(run):
    done = call(
        *["generate", run, "-p", "ab", "--max-new-tokens", "5", "--beam", "3"],
        *["--num-samples", "2", "--json"],
    )
    scores = [json.loads(line)["score"] for line in done.stdout.splitlines()]
    assert len(scores) == 2
    assert scores[0] >= scores[1]


def test_next_shows_as_many_tokens_as_asked_for(run):
    done = call("next", run, "--prompt", "The cat sat on the", "-n", "4")
    assert done.exit_code == 0
    assert done.stdout.count("%") == 5  # four, and what the others share
    assert "█" in done.stdout
    assert "other 253 tokens" in done.stdout


def test_chat_answers_each_line_and_leaves_at_the_end_of_input(chat_run):
    done = call("chat", chat_run, "--max-new-tokens", "5", "--seed", "1", stdin="hi\n\nyou\n")
    assert done.exit_code == 0
    assert done.stdout


def test_chat_reports_a_message_that_does_not_fit_and_continues(chat_run):
    done = call("chat", chat_run, "--max-new-tokens", "5", stdin="x" * 200 + "\nhi\n")
    assert done.exit_code == 0
    assert "the message must fit 91 tokens of context" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "{run}"], "no chat format"),
        (["chat", "{run}", "--format", "x"], "format must be one of"),
        (["generate", "nowhere"], "nowhere: no such run"),
        (["generate", "{run}", "--temperature", "-1"], "temperature must be finite and at least 0"),
        (["generate", "{run}", "--dtype", "int4"], "--dtype must be one of"),
        (["generate", "{run}", "--device", "tpu"], "--device must be"),
        (["generate", "{run}", "--logit-bias", "a=b"], "--logit-bias must be ID=VALUE; got 'a=b'"),
        (["generate", "{run}", "--logprobs", "1"], "--logprobs needs --json"),
        (["generate", "{run}", "--max-new-tokens", "96"], "must fit context_length=96"),
        (["next", "{run}", "-p", "x", "-n", "0"], "best must lie in"),
    ],
)
def test_a_wrong_argument_is_an_error_of_one_line(run, arguments, message):
    result = call(*[argument.format(run=run) for argument in arguments])
    assert isinstance(result.exception, Exception)
    assert message in str(result.exception)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_command_prints_errors_to_stderr_and_exits_2(tmp_path):
    command = ForkedCommand("generate", tmp_path, "-p", "x")
    out, err = command.communicate()
    assert command.returncode == 2
    assert out == ""
    assert err.startswith(f"error: {tmp_path}: must be a run")
    assert err.count("\n") == 1
