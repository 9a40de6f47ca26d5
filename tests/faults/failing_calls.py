"""Let the n-th call to the system fail, for every n, in every command that writes.

    LD_PRELOAD=failing_calls.so python tests/faults/failing_calls.py DIRECTORY STRIDE [COMMAND …]

Each try is a forked child that runs a command in a copy of a small world, with a disk that is full
from the n-th call on, or with an error in the n-th call alone. It must end with one line, leave
nothing torn, and the same command, with room, must then give what it gives undisturbed. The last
line printed is a JSON summary.
"""

import contextlib
import ctypes
import hashlib
import importlib
import io
import json
import os
import pkgutil
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import scratchlm
from scratchlm import ModelConfig, TransformerLM
from scratchlm.checkpoint import find_checkpoints, write_checkpoint
from scratchlm.cli import attention_picture, device, main
from scratchlm.data import prepare
from scratchlm.errors import ScratchLMError
from scratchlm.inference import load_model
from scratchlm.interop import write_hf
from scratchlm.tokenizer import train_bpe
from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.training import read_metrics, read_plan, report
from scratchlm.training.choosing import Machine
from scratchlm.training.plots import draw_run

SMALL = (
    "model.d_model=8", "model.num_heads=2", "model.num_layers=1", "model.context_length=8",
    "train.batch_size=2", "train.steps=4", "train.eval_every=2", "train.save_every=2",
    "train.keep_last=1",
)  # fmt: skip
TUNING = (
    "--rank", "2", "--val-fraction", "0", "train.batch_size=2", "train.steps=4",
    "train.save_every=2", "train.keep_last=1",
)  # fmt: skip
COMMANDS = {
    "train": ["train", "data", "--out", "run", "--resume", *SMALL],
    "train from text": [
        "train",
        "text/one.txt",
        "--out",
        "run",
        "--resume",
        "--vocab-size",
        "260",
        *SMALL,
    ],
    "prepare": [
        "prepare",
        "text",
        "--tokenizer",
        "tokenizer",
        "--out",
        "out",
        "--split",
        "tail",
        "--workers",
        "1",
    ],
    "tokenizer train": ["tokenizer", "train", "text/one.txt", "--vocab-size", "260", "--out", "t"],
    "import": ["import", "hf", "imported"],
    "export": ["export", "step", "exported"],
    "export gguf": ["export", "step", "exported.gguf"],
    "quantize": ["quantize", "step", "--to", "q8_0", "--out", "small"],
    "finetune": ["finetune", "step", "records.jsonl", "--out", "run", "--resume", *TUNING],
    "merge": ["merge", "adapted", "merged"],
    "export --adapter": ["export", "adapted", "peft", "--adapter"],
    "evaluate --cases": ["evaluate", "step", "task.jsonl", "--cases", "cases.jsonl"],
    "evaluate --plot": ["evaluate", "step", "task.jsonl", "--plot", "tasks.png"],
    "inspect --html": ["inspect", "step", "--prompt", "the cat", "--html", "inside.html"],
    "check --init": ["check", "mine.py", "--init"],
    "compare": ["compare", "old", "old", "--out", "compare.png"],
    "account --html": ["account", "gpt2", "--html", "page.html"],
    "account --plot": ["account", "gpt2", "--plot", "plot.svg"],
}
NOT_COMPARED = {
    "config.toml",
    "report.html",
    "loss.png",
    "metrics.jsonl",
    ".lock",
    "manifest.json",
    "plot.svg",
}


def warm() -> None:
    """Do once what every child would do again: imports, a matrix product timed, pictures drawn."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # by torch's optimizers: a second
    for module in pkgutil.walk_packages(scratchlm.__path__, "scratchlm."):
        with contextlib.suppress(ImportError):  # what needs a package that is not here
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    device.look_at_machine = lambda device: Machine(1e11, False)
    sys.argv = ["scratchlm", "presets"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()  # the command line is put together once
    picture = draw_run([])
    report.draw_run = attention_picture.draw_attention = lambda *_, **__: picture


def make_world(folder: Path) -> None:
    """Write what the commands need: text, tokenizer, token files, checkpoints, an old run."""
    (folder / "text").mkdir(parents=True)
    for name in ("one", "two"):
        (folder / "text" / f"{name}.txt").write_text(f"the cat sat on mat {name}. " * 40)
    vocab, merges = train_bpe(folder / "text" / "one.txt", 260, ["<|endoftext|>"])
    tokenizer = Tokenizer(vocab, merges, ["<|endoftext|>"])
    file = tokenizer.save(folder / "tokenizer")
    prepare([folder / "text"], tokenizer, folder / "data", split="tail", workers=1)
    config = ModelConfig(260, 32, d_model=32, num_layers=1, num_heads=2, d_ff=32)
    weights = TransformerLM(config).state_dict()
    write_checkpoint(folder / "step", model=weights, config=config, tokenizer_file=file)
    write_hf(folder / "hf", config, weights, file)
    (folder / "records.jsonl").write_text('{"text": "the cat sat on a mat"}\n' * 6)
    task = {"context": "the", "choices": [" cat", " mat"], "answer": 0}
    (folder / "task.jsonl").write_text(json.dumps(task) + "\n")
    for command in (
        ["train", "data", "--out", "old", *SMALL],
        ["finetune", "step", "records.jsonl", "--out", "adapted", *TUNING],
    ):
        status, _, err = attempt(folder, command, 0, False)
        assert status == 0, err


def attempt(folder: Path, command: list[str], n: int, full: bool) -> tuple[int, int, str]:
    """Run a command in a child whose n-th call fails; return its status, faults and stderr."""
    log = folder.parent / "stderr"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.argv = ["scratchlm", *command]
        faults = ctypes.CDLL(None)
        faults.fault_arm(str(folder).encode() + b"/", ctypes.c_long(n), int(full))
        status = 1
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        hits = faults.fault_hits()
        faults.fault_arm(b"", ctypes.c_long(0), 0)
        os.write(write, f"{status} {hits}".encode())
        os._exit(0)
    os.close(write)
    status, hits = map(int, os.read(read, 100).split())
    os.close(read)
    os.waitpid(pid, 0)
    return status, hits, log.read_text()


def content(folder: Path) -> dict[str, str]:
    """Hash every file whose bytes do not depend on the clock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in NOT_COMPARED
    }


def check_whole(folder: Path, fresh: dict[str, str], wanted: dict[str, str]) -> None:
    """Refuse anything half-written: each file is as before, as wanted, or a reader takes it."""
    for name, digest in content(folder).items():
        # What may be unfinished says so by its name: a work folder, a log that grows.
        if name.startswith(("run/", "out/.prepare/", "run/data/.prepare/")):
            continue
        assert digest in (fresh.get(name), wanted.get(name)), f"{name} is torn"
    for path in folder.rglob("*"):
        assert ".partial" not in path.name or ".prepare" in str(path), f"{path} was left"
        assert not path.name.startswith(".scratchlm-tmp-"), f"{path} was left"
    for path in find_checkpoints(folder / "run"):
        load_model(path)
    if (folder / "run" / "metrics.jsonl").exists():
        read_metrics(folder / "run")
    if (folder / "run" / "config.toml").exists():
        read_plan(folder / "run")


def same_log(one: Path, other: Path) -> bool:
    lines = [
        [{k: v for k, v in line.items() if k != "clock"} for line in read_metrics(folder)]
        for folder in (one, other)
    ]
    return lines[0] == lines[1]


def main_(directory: Path, stride: int, names: list[str]) -> None:
    warm()
    ctypes.CDLL(None).fault_arm(b"", ctypes.c_long(0), 0)
    world = directory / "world"
    make_world(world)
    fresh = content(world)
    summary, here = {}, directory / "here"
    for name in names or COMMANDS:
        command = COMMANDS[name]
        undisturbed = directory / "undisturbed"
        shutil.rmtree(undisturbed, ignore_errors=True)
        shutil.copytree(world, undisturbed)
        status, _, err = attempt(undisturbed, command, 0, False)
        assert status == 0, (name, err)
        wanted, tried = content(undisturbed), 0
        for full in (True, False):
            n, hits = 1, 1
            while hits:
                shutil.rmtree(here, ignore_errors=True)
                shutil.copytree(world, here)
                status, hits, err = attempt(here, command, n, full)
                case = f"{name}, call {n}, {'full disk' if full else 'one error'}"
                tried += hits > 0
                assert "Traceback" not in err, f"{case}: {err[-1500:]}"
                if status:
                    lines = err.strip().splitlines()
                    assert status == 2, f"{case}: {status} {err[-300:]}"
                    assert lines[-1].startswith("error: "), f"{case}: {lines[-1]}"
                    assert lines[-1].count(": ") >= 2, f"{case}: no name: {lines[-1]}"
                try:
                    check_whole(here, fresh, wanted)
                except (AssertionError, ScratchLMError) as error:
                    raise AssertionError(f"{case}: {error}") from error
                if status:  # otherwise the fault did no harm
                    status, _, err = attempt(here, command, 0, False)
                    assert status == 0, f"{case}: with room again: {err[-600:]}"
                assert content(here) == wanted, f"{case}: another result with room again"
                if (here / "run").exists():
                    assert same_log(here / "run", undisturbed / "run"), case
                n += stride
        summary[name] = tried
        print(f"{name}: {tried}", file=sys.stderr, flush=True)
    print(json.dumps(summary))


if __name__ == "__main__":
    main_(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
