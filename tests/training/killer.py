"""Kill a training run for real, again and again, and see whether anything is lost.

    python tests/training/killer.py DIRECTORY KILLS SEED

Each life of a run is a forked child (torch is imported once) that resumes and trains; this process
sends it SIGKILL after a random time, then checks every checkpoint on disk. When a run has reached
its end, its log and its last checkpoint must equal those of an uninterrupted run. Runs follow
each other until there have been enough kills. The last line printed is a JSON summary.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from scratchlm.checkpoint import find_checkpoints, verify_checkpoint
from training.tiny import SETTINGS, log_of, make_learner, run_training, write_data

# Saving every third step, a run spends much of its time writing checkpoints.
HARASSED = replace(SETTINGS, steps=150, eval_every=12, save_every=3, ema=0.9)


def life(run: Path, data: Path) -> int:
    """Fork a child that resumes the run and trains to its end; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run_training(run, data, HARASSED, warn=None)
        os._exit(0)
    except BaseException as error:
        print(f"a life ended in {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def ended_within(pid: int, seconds: float) -> int | None:
    """Wait for a child; return its exit code, or None where time ran out."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def last_checkpoint(run: Path) -> dict[str, str]:
    files = verify_checkpoint(find_checkpoints(run)[-1])["files"]
    return {name: file["sha256"] for name, file in files.items()}


def main(directory: Path, kills_wanted: int, seed: int) -> None:
    torch.set_num_threads(1)
    make_learner(HARASSED)  # imports what is imported late, but never runs autograd here
    data = write_data(directory / "data")
    quiet = directory / "quiet"
    began = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(life(quiet, data), 0)[1]) == 0
    whole = time.monotonic() - began
    chance = random.Random(seed)
    kills = in_a_write = torn = runs = 0
    while kills < kills_wanted:
        run, lives = directory / f"run{runs}", 0
        while True:
            pid = life(run, data)
            # A tenth of a whole run or so: each life gets somewhere, none far.
            patience = chance.uniform(0, 0.2) * whole if kills < kills_wanted else 1e9
            code = ended_within(pid, patience)
            lives += 1
            if code is not None:
                assert code == 0, f"life {lives} of {run} ended with {code}"
                break
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
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
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
