"""Kill a training run for real, again and again, and see whether anything is lost.

    python tests/training/killer.py DIRECTORY KILLS SEED [KIND]

KIND is training, or one of fine-tuning: lora, qlora, full, dpo, head.

Each life of a run is a forked child (torch is imported once) that resumes and trains. Every other
one is sent SIGKILL after a random time, the rest at a flush or a rename that is drawn; then every
checkpoint on disk is checked. When a run has reached its end, its log and its last checkpoint must
equal those of an uninterrupted run. Runs follow each other until there have been enough kills. The
last line printed is a JSON summary.
"""

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from faults.dying import die_at, end_within, fork
from scratchlm.checkpoint import find_checkpoints, verify_checkpoint
from scratchlm.config.heads import TaskHead
from scratchlm.config.lora import LoRA
from scratchlm.data.conversations import Example
from scratchlm.data.examples import write_examples
from scratchlm.training import DataFiles, Plan, Start, build_model, run_plan
from scratchlm.training.tuning import Tuning
from training.tiny import MODEL, SETTINGS, log_of, make_learner, run_training, write_data

Train = Callable[[Path], object]
# Saving every third step, a run spends much of its time writing checkpoints.
HARASSED = replace(SETTINGS, steps=150, eval_every=12, save_every=3, ema=0.9)
TUNINGS = {
    "lora": Tuning(LoRA(2, dropout=0.2, dora=True)),
    "qlora": Tuning(LoRA(2), quantize="int8"),
    "full": Tuning(),
    "dpo": Tuning(LoRA(2), packed=False, preference="dpo"),
    "head": Tuning(packed=False, head=TaskHead("classification", ("a", "b"))),
}


def training(directory: Path) -> Train:
    """Return what trains a run."""
    data = write_data(directory / "data")
    return lambda run: run_training(run, data, HARASSED, warn=None)


def fine_tuning(directory: Path, kind: str) -> Train:
    """Return what fine-tunes a run: examples of a few tokens, the first of them a prompt."""
    chance = random.Random(0)
    examples = []
    for _ in range(40):
        ids = [chance.randrange(2, 12) for _ in range(chance.randrange(3, 8))]
        examples.append(Example([*ids, ids[0] % 2], [False, *[True] * len(ids)]))
    files = [directory / f"{name}.examples" for name in ("train", "val")]
    write_examples(files[0], examples, "t")
    write_examples(files[1], examples[:8], "t")
    weights = build_model(MODEL, 0, "cpu").state_dict()
    settings = replace(HARASSED, steps=45, ema=0.0, row_length=8)
    plan = Plan(MODEL, settings, DataFiles(*files), start=directory, tuning=TUNINGS[kind])
    start = Start(weights, (0,), directory, "base")
    return lambda run: run_plan(run, own(plan, run), resume=True, start=lambda: start)


def own(plan: Plan, run: Path) -> Plan:
    """Give a run data of its own: what is computed of them is kept beside them."""
    folder = run / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (plan.data.train, plan.data.val):
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    files = DataFiles(folder / plan.data.train.name, folder / plan.data.val.name)
    return replace(plan, data=files)


def last_checkpoint(run: Path) -> dict[str, str]:
    files = verify_checkpoint(find_checkpoints(run)[-1])["files"]
    return {name: file["sha256"] for name, file in files.items()}


def main(directory: Path, kills_wanted: int, seed: int, kind: str = "training") -> None:
    torch.set_num_threads(1)
    make_learner(HARASSED)  # imports what is imported late, but never runs autograd here
    train = training(directory) if kind == "training" else fine_tuning(directory, kind)
    quiet = directory / "quiet"
    began = time.monotonic()
    assert end_within(fork(lambda: train(quiet)), 1e9) == 0
    whole = time.monotonic() - began
    chance = random.Random(seed)
    kills = in_a_write = torn = runs = 0
    while kills < kills_wanted:
        run, lives = directory / f"run{runs}", 0
        while True:
            # A tenth of a whole run or so: each life gets somewhere, none far.
            patience, die = 1e9, lambda: None
            if kills < kills_wanted and lives % 2:
                patience = chance.uniform(0, 0.2) * whole
            elif kills < kills_wanted:
                call, most = chance.choice((("rename", 7), ("fsync", 40)))
                die = partial(die_at, chance.randrange(1, most), call)
            code = end_within(fork(lambda die=die, run=run: (die(), train(run))), patience)
            lives += 1
            if code == 0:
                break
            assert code == -signal.SIGKILL, f"life {lives} of {run} ended with {code}"
            kills += 1
            in_a_write += any((run / "checkpoints").glob(".*-*"))
            log = run / "metrics.jsonl"
            torn += log.exists() and not log.read_bytes().endswith(b"\n")
            for path in find_checkpoints(run):
                verify_checkpoint(path)
        assert log_of(run) == log_of(quiet), f"the log of {run} differs"
        assert last_checkpoint(run) == last_checkpoint(quiet), f"the state of {run} differs"
        runs += 1
    print(json.dumps({"kills": kills, "in_a_write": in_a_write, "torn": torn, "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
