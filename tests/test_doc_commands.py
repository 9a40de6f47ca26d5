"""Every command of README and docs is run as written, with small stand-ins for the names."""

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from inference.tiny import byte_tokenizer
from scratchlm import ModelConfig, TransformerLM
from scratchlm.checkpoint import checkpoint_path, write_checkpoint
from scratchlm.cli import main
from scratchlm.config import Rotary
from scratchlm.interop import write_hf

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "Once upon a time the cat sat on the mat, and the dog ran to the hill. " * 80
# What is not ours to run here.
OTHERS = (
    r"\. \.venv/bin/activate",
    r"make [a-z-]+",
    r"python bench/\w+\.py.*",
    r"pip install .*",
    r"python examples/\w+\.py",
    r"curl -s localhost:8000/.*",  # tests/serve asks a server so
    r"HEAD=\$\(scontrol .*\)",
    r"(srun )?torchrun .*",  # tests/parallel starts ranks so
)
OWN = (
    "import torch\n\n\ndef run_silu(in_features):\n    return in_features * in_features.sigmoid()\n"
)
TASKS = {
    "capitals.jsonl": '{"context": "Paris is in", "choices": [" France", " Spain"], "answer": 0}',
    "words.jsonl": '{"context": "The cat sat on the", "next": " mat"}',
    "reviews.jsonl": "\n".join(
        f'{{"text": "It was {word}", "label": "{label}"}}'
        for word, label in (("fine", "good"), ("dull", "bad")) * 8
    ),
    "my.jsonl": '{"question": "2 + 2?", "choices": ["4", "5"], "answer": 0}\n' * 3,
    "questions.jsonl": '{"question": "Who?", "context": "It was Ann.", "answer": "Ann"}\n' * 8,
}
# A GPU's settings are refused where there is none, by name.
NEEDS_GPU = r"train\.\S+ needs a CUDA device|--gpus \d+: this machine has"


def lines_of(page):
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


# The walk of learn.md, whose file grows on the way, has a test of its own: tests/check.
WITH_COMMANDS = [page for page in PAGES if any(lines_of(page)) and page.name != "learn.md"]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_line_that_nobody_checks(page):
    for line in lines_of(page):
        if not line.startswith("scratchlm "):
            assert any(re.fullmatch(known, line) for known in OTHERS), line


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Make the files the pages speak of, and go there."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.txt", "held-out.txt", "corpus.txt", "more.txt", "corpus/a.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TEXT)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    liked = {"prompt": chat[:1], "chosen": chat[1:], "rejected": [{**chat[1], "content": "no"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    (tmp_path / "preferences.jsonl").write_text((json.dumps(liked) + "\n") * 4)
    tokenizer = byte_tokenizer("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    config = ModelConfig(tokenizer.vocab_size, 64, 16, 2, 2, positions=Rotary(layout="half"))
    for name in ("Qwen3-0.6B", "Llama-3.2-1B"):
        torch.manual_seed(0)
        model = TransformerLM(config)
        file = tokenizer.save(tmp_path / "tokenizer")
        write_hf(tmp_path / "path/to" / name, config, model.state_dict(), file)
    for name, case in TASKS.items():
        (tmp_path / name).write_text(case + "\n")
    page = (ROOT / "docs" / "howto" / "evaluate.md").read_text(encoding="utf-8")
    (task,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    task = task.replace("/path/to/my.jsonl}", f"{tmp_path}/my.jsonl}}, cache_dir: {tmp_path}/cache")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "my_task.yaml").write_text(task)
    config_file = tmp_path / "path/to/config.json"
    config_file.write_text((tmp_path / "path/to/Llama-3.2-1B/config.json").read_text())
    return tmp_path


def write_run(run):
    """Write a checkpoint, for a page that begins with a run; some words are one token."""
    tokenizer = byte_tokenizer("<|endoftext|>", " the", " and")
    config = ModelConfig(tokenizer.vocab_size, 64, 16, 2, 4)
    write_checkpoint(
        checkpoint_path(run, 1),
        model=TransformerLM(config).state_dict(),
        config=config,
        tokenizer_file=tokenizer.save(run.parent / "tokenizer"),
    )


def shortened(words):
    """Make what takes minutes short: few steps, few tokens, a small vocabulary."""
    words = ["270" if word == "8192" else word for word in words]
    if words[0] in ("train", "finetune") and "--resume" not in words:
        return [*words, "--steps", "3" if words[0] == "train" else "1"]
    if words[0] == "generate" and "--max-new-tokens" not in words:
        return [*words, "--max-new-tokens", "4"]
    if "--verify" in words:  # the model is made
        return [words[0], "demo", *words[2:]]
    if words[0] == "check":
        return ["2" if word == "200" else word for word in words]
    if words[0] == "demo":
        return [*words, "--steps", "2", "--sentences", "100"]
    return words


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page, stand_ins, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("scratchlm.serve.server.Server.run", end_at_once)
    if page.name in ("inspect.md", "evaluate.md", "serve.md", "tasks.md", "speculation.md"):
        for run in ("mine", "small"):
            write_run(stand_ins / "runs" / run)
    for line in lines_of(page):
        if not line.startswith("scratchlm ") or "--watch" in line:  # which never ends
            continue
        words = shortened(shlex.split(line)[1:])
        status = call(monkeypatch, words)
        told = capsys.readouterr()
        if status == 2 and re.search(NEEDS_GPU, told.err) and not torch.cuda.is_available():
            continue
        if "--init" in words:  # one function is written, here and in the course's file
            for name in ("my_ops.py", "tests/adapters.py"):
                (stand_ins / name).parent.mkdir(exist_ok=True)
                (stand_ins / name).write_text(OWN)
        # Two steps do not reach the floor; functions that are not written are not right.
        allowed = (0, 1) if words[0] in ("demo", "check") else (0,)
        assert status in allowed, f"{line}\n{told.err}"


def end_at_once(server, sockets):
    """Do not serve: everything before that has been done."""
    for one in sockets:
        one.close()


def call(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["scratchlm", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0
