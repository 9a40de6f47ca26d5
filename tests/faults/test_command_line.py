"""What a user or a file can cause is one line with its name, exit status 2, and leaves nothing."""

import os
import pty
import re
import subprocess
import sys

import pytest
import torch

from forked import become_command
from inference.tiny import save_run
from scratchlm import ModelConfig, TransformerLM
from scratchlm.cli.errors import is_for_the_user, one_line
from scratchlm.cli.terminal import visible
from scratchlm.config import NTKScaling, RMSNorm, Rotary, YarnScaling
from scratchlm.ops import OPS
from scratchlm.tokenizer import CharTokenizer
from training.tiny import write_data

COMMAND = [sys.executable, "-c", "from scratchlm.cli import main; main()"]
SIMPLE = {"TERM": "dumb", "NO_COLOR": "1"}
ENV = {**os.environ, "OMP_NUM_THREADS": "1", **SIMPLE}
TITLE = "\x1b]0;owned\x07"  # sets a terminal's title


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a run whose every token is a piece of an escape sequence, or text."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = CharTokenizer([*sorted("\x1b\x07\x9b]0;owned ab")], ["<|endoftext|>"])
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=32, d_model=8, num_layers=1, num_heads=2
    )
    torch.manual_seed(0)
    return save_run(folder / "run", TransformerLM(config), tokenizer)


ACCOUNT = ["account", "gpt2", "--phase", "training", "--gpus", "8"]
REFUSED = [
    (["train", "DATA", "--out", "OUT", "train.betas=[0.9]"], "betas must be two numbers"),
    (["train", "DATA", "--out", "OUT", "--device", "cpu:-1"], "--device must be"),
    (["train", "DATA", "--out", "OUT", "--device", "meta"], "--device must be"),
    (["train", "DATA", "--out", "OUT", "train.batch_size=1000000000"], "batch_size must not"),
    (["train", "DATA", "--out", "OUT", "model.a=" + "[" * 5000], "nested too deeply"),
    (["train", "DATA", "--out", "OUT", "model.norm={type='rmsnorm',eps=1e39}"], "eps must be"),
    (["generate", "RUN", "--device", "meta"], "--device must be"),
    (["generate", "RUN", "--device", "cpu:7"], "--device must be"),
    (
        ["generate", "RUN", "-p", "a", "--beam", "2", "--length-penalty", "1e308"],
        "--length-penalty",
    ),
    (["generate", "RUN", "-p", "a", "--beam", "1000000000"], "--beam must not exceed"),
    (["generate", "RUN", "-p", "a", "--num-samples", "1000000000"], "num-samples"),
    (["generate", "RUN", "-p", "a", "--temperature", "1e-320"], "temperature must be 0"),
    (["next", "RUN", "-p", "a", "--temperature", "1e-320"], "temperature must be finite"),
    (["export", "RUN", "OUT", "--max-shard-gb", "inf"], "--max-shard-gb must be above 0"),
    (["export", "RUN", "OUT", "--max-shard-gb", "nan"], "--max-shard-gb must be above 0"),
    (["export", "RUN", "OUT", "--max-shard-gb", "1e308"], "--max-shard-gb must be above 0"),
    (["evaluate", "RUN", "RECORDS", "--batch-size", "0"], "--batch-size must be from 1 to"),
    (["evaluate", "RUN", "DATA", "--batch-size", "9" * 23], "--batch-size must be from 1 to"),
    (["serve", "RUN", "--max-rows", "9" * 23], "--max-rows must be at most 65536"),
    (["serve", "RUN", "--memory", "9" * 23], "a memory must not exceed"),
    ([*ACCOUNT, "--link", "inf"], "link must be from"),
    ([*ACCOUNT, "--link", "1e-320"], "link must be from"),
    (
        ["finetune", "RUN", "RECORDS", "--out", "OUT", "--rank", "1000000000"],
        "rank must not exceed",
    ),
    (
        ["finetune", "RUN", "RECORDS", "--out", "OUT", "--epochs", "1e308"],
        "--epochs must be above 0 and below a million; got 1e+308",
    ),
    (["compare", "RUN/[red]no"], "no metrics.jsonl there"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=lambda x: " ".join(x)[:60])
def test_a_wrong_command_line_is_one_line_and_leaves_nothing(arguments, says, model, tmp_path, cli):
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    records = tmp_path / "records.jsonl"
    records.write_text('{"text": "a b"}\n' * 4)
    for word, path in (("DATA", data), ("OUT", out), ("RECORDS", records), ("RUN", model)):
        arguments = [a.replace(word, str(path)) for a in arguments]
    status, _, err = cli(*arguments)
    assert status == 2, err
    told = [line for line in err.splitlines() if not line.startswith("checkpoint: step ")]
    assert len(told) == 1
    assert told[0].startswith("error: ")
    assert says in told[0]
    assert not out.exists()


def test_a_batch_that_does_not_fit_in_memory_is_one_line(tmp_path, cli, monkeypatch):
    data = write_data(tmp_path / "data")
    from scratchlm.training import step

    def too_large(*arguments, **options):
        return torch.empty(1 << 56)

    monkeypatch.setattr(step, "take_step", too_large)
    monkeypatch.setattr("scratchlm.training.loop.take_step", too_large)
    status, _, err = cli(
        "train", data, "--out", tmp_path / "out",
        "model.d_model=8", "model.num_heads=2", "model.num_layers=1", "model.context_length=8",
        "train.batch_size=2", "train.steps=2", "train.eval_every=0",
    )  # fmt: skip
    assert status == 2
    assert err.splitlines()[-1].startswith("error: not enough memory")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                     "allocate 70368744177664 bytes. Error code 12"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
    ],
)  # fmt: skip
def test_too_little_memory_is_for_the_user_and_another_runtime_error_is_not(error):
    assert is_for_the_user(error)
    assert one_line(error).startswith("not enough memory")
    assert not is_for_the_user(RuntimeError("shape mismatch"))
    assert not is_for_the_user(KeyError("loss"))


def test_train_does_not_advise_an_option_it_does_not_have(model, tmp_path, cli):
    from scratchlm.data import prepare

    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"a b {'a' if name == 'one' else 'b'} " * 90)
    prepare([tmp_path / "one.txt"], model / "tokenizer", tmp_path / "out" / "data")
    words = ["train", tmp_path / "two.txt", "--out", tmp_path / "out", "--tokenizer"]
    status, _, err = cli(*words, model / "tokenizer")
    assert status == 2
    assert "made from other sources or options; choose another folder" in err
    assert "`scratchlm prepare --overwrite`" in err


# Standard streams


def closed(fd, *arguments):
    """Run a command with one of its standard streams closed."""
    script = f"import os; os.close({fd}); os.execv({COMMAND[0]!r}, {[*COMMAND, *arguments]!r})"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=ENV, check=False
    )


def test_closed_standard_streams_are_named_or_empty(model, tmp_path):
    done = closed(1, "presets")
    assert (done.returncode, done.stderr) == (
        2,
        "error: standard output is closed; > /dev/null drops what is printed\n",
    )
    done = closed(0, "tokenizer", "encode", "-t", str(model / "tokenizer"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
    done = closed(2, "presets")
    assert done.returncode == 0
    assert "gpt2" in done.stdout


def test_a_full_or_broken_pipe_is_no_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "presets"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENV
        )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")
    shell = f"{' '.join(map(repr, COMMAND))} presets | true"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, env=ENV)
    assert "Traceback" not in done.stderr


# Names


def test_a_file_name_that_is_not_utf_8_is_taken_and_printed(model, tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff\x1b]0;x\x07"
    os.mkdir(folder)
    with open(folder + b"/t\xe9xt.txt", "wb") as file:
        file.write(b"a b a b " * 50)
    tokenizer = str(model / "tokenizer").encode()
    prepare = [b"prepare", folder + b"/t\xe9xt.txt", b"--tokenizer", tokenizer]
    done = subprocess.run(
        [*map(os.fsencode, COMMAND), *prepare, b"--out", folder + b"/out"],
        capture_output=True, env=ENV,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    assert folder in done.stdout  # in a pipe, byte for byte
    assert b"\x1b" not in done.stderr
    done = subprocess.run(
        [*map(os.fsencode, COMMAND), b"generate", folder + b"/no"], capture_output=True, env=ENV
    )
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_square_brackets_in_a_runs_name_are_shown(tmp_path, cli):
    small = [
        "model.d_model=8", "model.num_heads=2", "model.num_layers=1", "model.context_length=8",
        "train.batch_size=2", "train.steps=2", "train.eval_every=0",
    ]  # fmt: skip
    data, out = write_data(tmp_path / "data"), tmp_path / "[red]big"
    status, _, err = cli("train", data, "--out", out, *small)
    assert status == 0, err
    assert "[red]big" in cli("compare", out, "--out", tmp_path / "c.png")[1]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


# A terminal


def on_a_terminal(*arguments):
    """Run a command whose stdout and stderr are a terminal; return what reached it."""
    pid, fd = pty.fork()
    if pid == 0:
        become_command(arguments, SIMPLE)
    output = b""
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    os.waitpid(pid, 0)
    os.close(fd)
    return output.decode(errors="replace")


def harmless(output):
    """Whether nothing but text, line ends and rich's own colours and cursor moves was sent."""
    rest = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    return "\x1b" not in rest and "\x07" not in rest and "\x9b" not in rest


def test_no_text_from_outside_controls_the_terminal(model, tmp_path):
    out = on_a_terminal(
        "generate", model, "-p", TITLE, "--max-new-tokens", 20, "--seed", 1, "--ignore-end"
    )
    assert "␛]0;owned␇" in out
    assert harmless(out)
    assert harmless(on_a_terminal("generate", model, "-p", TITLE, "--num-samples", 2, "--json"))
    assert harmless(on_a_terminal("generate", tmp_path / TITLE))
    assert harmless(on_a_terminal("account", f"{tmp_path}/{TITLE}.json"))
    assert harmless(on_a_terminal("tokenizer", "show", "-t", model / "tokenizer", TITLE))
    ids = [str(i) for i in range(12)]
    assert harmless(on_a_terminal("tokenizer", "decode", "-t", model / "tokenizer", *ids))


def test_samples_in_training_do_not_control_the_terminal(tmp_path):
    text = tmp_path / f"{TITLE.replace('/', '')}.txt"
    text.write_text(f"{TITLE} a b " * 200)
    out = on_a_terminal(
        "train", text, "--out", tmp_path / "run", "--tokenizer", "char", "--steps", 12,
        "model.d_model=16", "model.num_heads=2", "model.num_layers=1", "model.context_length=16",
        "train.batch_size=4", "train.eval_every=3", "train.lr=0.03",
    )  # fmt: skip
    assert "finished at step 12" in out, out[-500:]
    assert "␛" in out  # it was in a sample
    assert harmless(out)


def test_in_a_pipe_a_models_text_stays_as_it_is(model):
    words = ["generate", str(model), "-p", "a", "--max-new-tokens", "25", "--seed", "3"]
    done = subprocess.run(
        [*COMMAND, *words, "--ignore-end"], capture_output=True, text=True, env=ENV, check=True
    )
    assert any(c in done.stdout for c in "\x1b\x07\x9b")


def test_visible_leaves_text_and_shows_the_rest():
    assert visible("a\n\tb é 日") == "a\n\tb é 日"
    assert visible("\x1b\r\x00\x7f") == "␛␍␀␡"
    assert visible("\x9b\udcff") == "��"


# Configs and tensors


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rotary(theta=1.0, scaling=YarnScaling(2.0, 16)), "theta must be greater than 1"),
        (lambda: Rotary(theta=0.5, scaling=YarnScaling(2.0, 16)), "theta must be greater than 1"),
        (lambda: YarnScaling(2.0, 16, beta_slow=1e-320), "beta_slow must be a number that float32"),
        (lambda: RMSNorm(eps=1e39), "eps must be a number that float32"),
        (
            lambda: ModelConfig(
                vocab_size=8, context_length=8, d_model=4, num_layers=1, num_heads=2,
                positions=Rotary(scaling=NTKScaling(2.0)),
            ),
            "d_head must be greater than 2 with NTK",
        ),
    ],
)  # fmt: skip
def test_a_config_that_no_model_can_compute_is_refused_by_name(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_ids_of_16_bits_are_refused_by_name_and_empty_sequences_are_taken():
    config = ModelConfig(vocab_size=11, context_length=8, d_model=8, num_layers=1, num_heads=2)
    for ops in ("fast", "reference"):
        model = TransformerLM(config, ops=OPS[ops])
        with pytest.raises(TypeError, match=r"int64 or int32; got torch\.int16"):
            model(torch.zeros(1, 3, dtype=torch.int16))
        empty = torch.zeros(2, 0, dtype=torch.long)
        assert model(empty).shape == (2, 0, 11)
        assert model.loss(empty, empty) == 0
