"""`scratchlm train` on a GPU, killed with SIGKILL and resumed: to the bit the undisturbed run.

A start takes seconds (imports, CUDA, compiling), so several runs are killed side by side:

    pytest -m cuda tests/training/test_gpu_kills.py
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from scratchlm.accounting import CHECKPOINTING
from scratchlm.checkpoint import find_checkpoints, verify_checkpoint
from scratchlm.data import prepare
from scratchlm.tokenizer import train_bpe
from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.training.settings import COMPILE
from test_architecture import SRC
from training.tiny import log_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COMMAND = "from scratchlm.cli import main; main()"
STEPS = 300
# A shape that every fused kernel takes (tests/acceleration/test_training_on_gpu.py).
SMALL = (
    "model.d_model=512", "model.num_heads=8", "model.num_layers=2", "model.d_ff=1024",
    "model.context_length=128", "train.batch_size=16", f"train.steps={STEPS}",
    "train.save_every=15", "train.eval_every=60", "train.deterministic=true",
)  # fmt: skip
SETTINGS = [
    (f"train.compile={how}", f"train.cuda_graph={graph}", f"train.checkpointing={policy}")
    for how, graph, policy in product(COMPILE, ("true", "false"), (*CHECKPOINTING, "selective"))
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text_data(tmp_path_factory.mktemp("text"))


def write_text_data(folder: Path) -> Path:
    """Prepare a text of random words, with a tokenizer: the run samples, too."""
    chance, text = random.Random(0), folder / "text.txt"
    words = ("the", "cat", "dog", "sat", "on", "a", "mat", "and", "saw", "it", "run", "far")
    text.write_text(" ".join(chance.choice(words) for _ in range(20_000)))
    tokenizer = Tokenizer(*train_bpe(text, 264, ["<|endoftext|>"]), ["<|endoftext|>"])
    prepare([text], tokenizer, folder / "data", split="tail", workers=1)
    return folder / "data"


def start(run: Path, data: Path, settings: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start the command as a user does, its messages in a file."""
    command = [sys.executable, "-c", COMMAND, "train", str(data), "--out", str(run), "--resume"]
    paths = os.pathsep.join((str(SRC.parent), os.environ.get("PYTHONPATH", "")))
    # A pool of compilers in each of many processes would only fight for the cores.
    env = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with run.with_suffix(".messages").open("a", encoding="utf-8") as messages:
        return subprocess.Popen(
            [*command, *SMALL, *settings], stdout=subprocess.DEVNULL, stderr=messages, env=env
        )


def finish(run: Path, data: Path, settings: tuple[str, ...]) -> Path:
    """Let a run come to its end; what was asked for was done, not left out with a warning."""
    status = start(run, data, settings).wait()
    messages = run.with_suffix(".messages").read_text(encoding="utf-8")
    assert status == 0, messages[-3000:]
    assert "failed" not in messages, messages
    return run


def steps_in(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b'"grad_norm"') if log.exists() else 0


def kill_again_and_again(
    run: Path, data: Path, kills: int, seed: int, settings: tuple[str, ...] = ()
) -> Path:
    """Kill a run at random steps, each later than the one before; then let it end."""
    chance = random.Random(seed)
    for wanted in sorted(chance.sample(range(1, STEPS - 60), kills)):
        step = max(wanted, steps_in(run) + 1)  # of this life, not of those before
        process = start(run, data, settings)
        while steps_in(run) < step and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)  # also inside an evaluation or a write
        assert process.poll() is None, run.with_suffix(".messages").read_text()[-3000:]
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in find_checkpoints(run):
            verify_checkpoint(path)
    return finish(run, data, settings)


def assert_same(run: Path, whole: Path) -> None:
    """The whole log (losses, norms, evaluations, samples) and the last checkpoint, to the bit."""
    assert log_of(run) == log_of(whole), f"the log of {run.name} differs"
    files = [verify_checkpoint(find_checkpoints(each)[-1])["files"] for each in (run, whole)]
    assert files[0] == files[1], f"the state of {run.name} differs"


def test_twenty_kills_lose_nothing(tmp_path, data, tried):
    whole = finish(tmp_path / "whole", data, ())  # the compiler's cache is warm afterwards
    assert "on cuda" in (tmp_path / "whole.messages").read_text()
    assert sum("loss" in line for line in log_of(whole)) == STEPS
    with ThreadPoolExecutor(5) as pool:
        runs = pool.map(lambda i: kill_again_and_again(tmp_path / f"run{i}", data, 4, i), range(5))
        for run in runs:
            assert_same(run, whole)
    tried("kills of training on a GPU, log and state bit-identical", 20)


def test_a_kill_loses_nothing_whatever_is_compiled_recorded_or_recomputed(tmp_path, data, tried):
    def one(number: int) -> None:
        settings = SETTINGS[number]
        whole = finish(tmp_path / f"whole{number}", data, settings)
        run = kill_again_and_again(tmp_path / f"run{number}", data, 1, number, settings)
        assert_same(run, whole)
        shutil.rmtree(run)
        shutil.rmtree(whole)

    failed = []
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        found = [pool.submit(one, number) for number in range(len(SETTINGS))]
    for settings, future in zip(SETTINGS, found, strict=True):
        if future.exception() is not None:
            failed.append(f"{' '.join(settings)}: {future.exception()}")
    assert not failed, "\n".join(failed)
    tried("settings of compile, cuda_graph, checkpointing killed on a GPU", len(SETTINGS))
