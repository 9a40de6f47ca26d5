"""`kill -9` at random moments, also while a checkpoint is written: nothing is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLER = Path(__file__).with_name("killer.py")


def kill(directory, kills, seed):
    done = subprocess.run(
        [sys.executable, KILLER, str(directory), str(kills), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    print(summary)
    return summary


def test_fifty_kills_lose_nothing(tmp_path):
    summary = kill(tmp_path, 50, seed=0)
    assert summary["kills"] >= 50
    assert summary["in_a_write"] >= 5


@pytest.mark.slow
def test_four_hundred_kills_lose_nothing(tmp_path):
    summary = kill(tmp_path, 400, seed=1)
    assert summary["kills"] >= 400
    assert summary["in_a_write"] >= 40
