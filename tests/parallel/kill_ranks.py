"""Kill one rank of two for real, again and again, and see whether anything is lost.

    python tests/parallel/kill_ranks.py DIRECTORY KILLS SEED

Each life of the run is two forked children (torch is imported once) that train as those of
`torchrun` do; one gets SIGKILL, the first rank inside a write and the second before a step, and the
other must notice and end with one line. At the end the log must be that of one process, to the bit.
The last line printed is a JSON summary.
"""

import itertools
import json
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults.dying import die_at
from faults.failing_calls import warm
from parallel.test_torchrun import command, log_of
from scratchlm.checkpoint import find_checkpoints, verify_checkpoint
from scratchlm.cli import main
from scratchlm.training import loop
from training.tiny import write_data


def life(
    words: Sequence[str],
    messages: Path,
    die: Callable[[], None] = lambda: None,
    **environment: str,
) -> int:
    """Fork a child that runs the command; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        where = os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(where, 1)
        os.dup2(where, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update(environment)
        sys.argv = ["scratchlm", *words]
        die()
        main()
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def die_at_step(number: int) -> None:
    """Let SIGKILL come before the nth step that this process makes."""
    real, steps = loop.take_step, itertools.count(1)

    def take_step(*args: Any) -> Any:
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    loop.take_step = take_step


def two_ranks(words: Sequence[str], messages: Path, *die: Callable[[], None]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dies = die or (lambda: None, lambda: None)
    return [
        life(words, messages, moment, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank, moment in enumerate(dies)
    ]


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(directory: Path, kills: int, seed: int) -> None:
    warm()
    chance, data, out = random.Random(seed), write_data(directory / "data"), directory / "killed"
    steps, messages, inside = 20 * kills, directory / "messages", 0
    for kill in range(kills):
        is_first = kill % 2 == 0
        moments: tuple[Callable[[], None], ...] = (
            partial(die_at, chance.randrange(1, 4), "rename") if is_first else lambda: None,
            partial(die_at_step, chance.randrange(2, 16)) if not is_first else lambda: None,
        )
        ranks = two_ranks(command(out, data, steps, resume=kill > 0), messages, *moments)
        victim, other = ranks if is_first else reversed(ranks)
        assert ended(victim) == -signal.SIGKILL, f"kill {kill}: it had ended"
        assert ended(other) != 0, f"kill {kill}: a rank went on alone"
        inside += any((out / "checkpoints").glob(".*"))
        for path in find_checkpoints(out):
            verify_checkpoint(path)
    said = messages.read_text()
    assert "Traceback" not in said, said[-3000:]
    assert said.count("; the job ends (") == kills, said[-3000:]
    last = [ended(pid) for pid in two_ranks(command(out, data, steps, resume=True), messages)]
    assert last == [0, 0], messages.read_text()[-3000:]
    words = [*command(directory / "whole", data, steps), "train.micro_batch_size=4"]
    assert ended(life(words, messages)) == 0, messages.read_text()[-3000:]
    assert log_of(out) == log_of(directory / "whole")
    assert inside >= (kills + 1) // 2, "no kill of the first rank was inside a write"
    print(json.dumps({"kills": kills, "in_a_write": inside}))


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
