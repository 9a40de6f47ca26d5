"""Kill commands that write one thing for real, again and again: it is whole, or not there.

    LD_PRELOAD=failing_calls.so python tests/faults/kill_writers.py DIRECTORY KILLS SEED [COMMAND …]

Each life is a forked child that quantises, exports, imports or merges in one small world; it gets
SIGKILL after a random time, or (every second round) at one of its first flushes and renames. What
stands in its place then is what an undisturbed command makes, or nothing; the next life of the same
command succeeds, makes the same, and removes what the killed one left beside. The last line printed
is a JSON summary.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from dying import die_at
from failing_calls import COMMANDS, content, make_world, warm

from scratchlm.cli import main

ALL = ("quantize", "export", "export gguf", "import", "merge", "export --adapter")


def life(folder: Path, command: list[str], dies_at: int = 0) -> int:
    pid = os.fork()
    if pid:
        return pid
    die_at(dies_at, "fsync", "rename", "replace")
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(folder.parent / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv = ["scratchlm", *command]
    try:
        main()
        os._exit(0)
    except SystemExit as ended:
        os._exit(ended.code or 0)
    except BaseException:
        os._exit(1)


def finish(folder: Path, command: list[str]) -> float:
    """Let a command run to its end; return its seconds."""
    began = time.monotonic()
    _, status = os.waitpid(life(folder, command), 0)
    assert status == 0, (command, (folder.parent / "stderr").read_text()[-600:])
    return time.monotonic() - began


def main_(directory: Path, wanted: int, seed: int, names: list[str]) -> None:
    warm()
    world, chance = directory / "world", random.Random(seed)
    make_world(world)
    fresh = content(world)
    truths, whole, names = {}, {}, names or list(ALL)
    for name in names:
        there = directory / "undisturbed"
        shutil.copytree(world, there)
        whole[name] = finish(there, COMMANDS[name])
        truths[name] = content(there)
        shutil.rmtree(there)
    kills = beside = 0
    while kills < wanted:
        name = names[kills % len(names)]
        here = directory / f"killed{kills}"
        shutil.copytree(world, here)
        before = set(os.listdir(here))
        dies_at = chance.randrange(1, 4) if kills // len(names) % 2 else 0
        pid = life(here, COMMANDS[name], dies_at)
        if not dies_at:
            time.sleep(chance.uniform(0, 1) * whole[name])
            os.kill(pid, signal.SIGKILL)  # it may have ended
        os.waitpid(pid, 0)
        kills += 1
        left = {name for name in set(os.listdir(here)) - before if name.startswith(".")}
        beside += bool(left)
        seen = {path: h for path, h in content(here).items() if path.split("/")[0] not in left}
        assert seen in (fresh, truths[name]), f"{name}: torn by kill {kills}"
        if seen == fresh:
            finish(here, COMMANDS[name])
            assert content(here) == truths[name], f"{name}: another result after kill {kills}"
        shutil.rmtree(here)
    print(json.dumps({"kills": kills, "beside": beside, "commands": len(names)}))


if __name__ == "__main__":
    main_(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
