"""Commands inside `chat`, attention in `next`, and options that could not take effect."""

import json
import re

import pytest
from typer.testing import CliRunner

from inference.tiny import byte_tokenizer, save_run, tiny_model
from scratchlm.cli import app
from scratchlm.cli.account_models import find_model
from scratchlm.config import to_dict, toml_text
from scratchlm.inference import load_model
from scratchlm.inspect import attention_weights

CHATML = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("chat"), byte_tokenizer(*CHATML)
    model = tiny_model(vocab_size=tokenizer.vocab_size, context_length=96)
    return str(save_run(path, model, tokenizer))


def call(*arguments, stdin=None):
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin)


def talk(run, *lines):
    done = call("chat", run, "--max-new-tokens", 3, "--seed", 1, stdin="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.exception
    return done


def test_chat_lists_its_commands_and_suggests_one(chat_run):
    told = talk(chat_run, "/help").stderr
    for command in ("/help", "/exit", "/reset", "/save", "/system"):
        assert command in told
    assert "error: no command /rest; did you mean '/reset'?" in talk(chat_run, "/rest").stderr
    assert "error: no command /zzz; /help lists them" in talk(chat_run, "/zzz").stderr


def test_chat_exits_at_once(chat_run):
    assert talk(chat_run, "/exit", "hi").stdout == ""


def test_chat_saves_the_conversation_and_leaves_a_file_alone(chat_run, tmp_path):
    out = tmp_path / "talk.jsonl"
    done = talk(
        chat_run, "/system be brief", "hi", f"/save {out}", f"/save {out}", "/save", "/save no/x"
    )
    assert f"(wrote 3 messages to {out})" in done.stderr
    assert f"error: {out}: exists already and is not overwritten" in done.stderr
    assert "where to? /save FILE" in done.stderr
    assert "error: no/x: No such file or directory" in done.stderr
    saved = [json.loads(line) for line in out.read_text().splitlines()]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[0]["text"] == "be brief"


def test_reset_forgets_the_conversation_and_not_the_system(chat_run, tmp_path):
    out = tmp_path / "talk.jsonl"
    talk(chat_run, "/system be brief", "hi", "/reset", f"/save {out}")
    saved = [json.loads(line) for line in out.read_text().splitlines()]
    assert saved == [{"role": "system", "text": "be brief"}]


def test_after_a_reset_the_model_answers_as_at_first(chat_run):
    first = talk(chat_run, "hi").stdout
    both = talk(chat_run, "hi", "/reset", "hi").stdout
    assert both == first + first


def test_next_shows_where_a_head_looks(chat_run):
    done = call("next", chat_run, "--prompt", "abcd", "--attention", "1.0")
    assert done.exit_code == 0, done.exception
    shown = re.findall(r"'(\w)' +([\d.]+)%", done.stdout.partition("looks at")[2])
    loaded = load_model(chat_run)
    ids = loaded.tokenizer.encode("abcd")
    expected = attention_weights(loaded.model, ids)[1, 0, -1].tolist()
    assert [letter for letter, _ in shown] == list("abcd")
    assert [float(weight) for _, weight in shown] == pytest.approx(
        [100 * weight for weight in expected], abs=0.006
    )
    mean = call("next", chat_run, "--prompt", "abcd", "--attention", "1")
    assert "layer 1, all heads looks at" in mean.stdout


@pytest.mark.parametrize("where", ["9.0", "0.9", "x", "0.", "-1"])
def test_a_head_that_is_not_there_is_refused(chat_run, where):
    done = call("next", chat_run, "--prompt", "abcd", f"--attention={where}")
    assert "--attention must be LAYER.HEAD, from 0.0 to" in str(done.exception)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--beam", 2, "--temperature", 0.5), "--beam searches, it does not sample"),
        (("--beam", 2, "--seed", 1), "--beam searches, it does not sample"),
        (("--beam", 2, "--stop", "x"), "--stop has no effect with --beam"),
        (("--length-penalty", 2), "--length-penalty needs --beam"),
        (("--beam", 2, "--no-cache"), "--no-cache has no effect with --beam"),
        (("--beam", 2, "--past-context", "slide"), "--past-context has no effect with --beam"),
        (("--beam", 2, "--json", "--logprobs", 2), "--logprobs has no effect with --beam"),
        (("--draft", "x", "--speculate", "lookup"), "--draft has no effect with --speculate"),
        (("--beam", 2, "--num-samples", 3), "--num-samples must not exceed --beam 2; got 3"),
    ],
)
def test_options_without_effect_are_refused(chat_run, given, message):
    done = call("generate", chat_run, "-p", "ab", "--max-new-tokens", 2, *given)
    assert message in str(done.exception)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_options_without_effect_on_the_likeliest_token_are_named(chat_run, command):
    words = ("-p", "ab") if command == "generate" else ("--format", "plain")
    words += ("--max-new-tokens", 2, "--temperature", 0)
    assert "no effect" not in call(command, chat_run, *words).stderr
    done = call(command, chat_run, *words, "--seed", 1, "--top-k", 3, "--min-p", 0.1)
    told = [line for line in done.stderr.splitlines() if "no effect" in line]
    options = ("--seed", "--top-k", "--min-p")
    assert told == [f"warning: {one} has no effect with --temperature 0" for one in options]


def test_the_account_takes_a_run_a_checkpoint_and_a_runs_config(chat_run, tmp_path):
    config = load_model(chat_run).config
    assert find_model(chat_run) == config  # a run
    assert find_model(f"{chat_run}/checkpoints/step-00000001") == config
    text = toml_text({"model": to_dict(config), "train": {"steps": 1}})
    (tmp_path / "config.toml").write_text(text.lstrip())
    assert find_model(str(tmp_path)) == config  # a run that has no checkpoint yet
    assert find_model(str(tmp_path / "config.toml")) == config
