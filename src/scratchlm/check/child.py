"""The process in which a learner's code runs: it calls every function and reports, line by line.

Nothing of the learner's is trusted to return, to keep quiet or to leave its input alone. What is
reported is JSON (`outcomes.pack`), written to a pipe.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scratchlm.check.driving import Case, Complaint, to_dtype
from scratchlm.check.loading import borrow, function_of, load_module, read_source
from scratchlm.check.outcomes import Outcome, agree, pack
from scratchlm.check.tasks import BY_NAME, Task, expected

PRINTED = 200  # characters of what a function printed that are reported


class Reporter:
    """Writes messages to the pipe, and collects what is printed meanwhile."""

    def __init__(self, pipe: int, printed: int) -> None:
        self.pipe = os.fdopen(pipe, "w", encoding="utf-8")
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = sys.stderr = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        self.printed, self.read = printed, os.lseek(printed, 0, os.SEEK_END)

    def send(self, **message: Any) -> None:
        """Report one thing."""
        self.pipe.write(json.dumps(message) + "\n")
        self.pipe.flush()

    def new_output(self) -> str:
        """Return what was printed since the last time."""
        sys.stdout.flush()
        size = os.lseek(self.printed, 0, os.SEEK_END)
        text = os.pread(self.printed, min(PRINTED * 4, size - self.read), self.read)
        self.read = size
        return text.decode("utf-8", errors="replace")[:PRINTED]


def run_child(
    report: Reporter, path: Path, names: list[str], borrowed: set[str], course: bool
) -> None:
    """Load the file and run its functions in order; a wrong one is then borrowed by the rest."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        module = load_module(path)
    except BaseException as error:
        report.send(failed=f"does not load: {one_line(error, path)}")
        return
    source = read_source(path)
    absent = {name for name in BY_NAME if function_of(module, name) is None}
    borrow(module, source.unwritten | absent | borrowed)
    report.send(loaded=report.new_output())
    for name in (name for name in names if name not in absent):
        task = BY_NAME[name]
        right = True
        for index, case in enumerate(task.cases):
            if course and not case.course:
                continue
            report.send(begin=[name, index])
            torch.manual_seed(0)
            outcome = attempt(task, function_of(module, name), case, path)
            report.send(end=[name, index], outcome=pack(outcome))
            right = right and agree(outcome, expected(name)[index])
            if "complaint" in outcome:
                break
        report.send(done=name, printed=report.new_output())
        if not right:
            borrow(module, {name})


def attempt(task: Task, function: Callable[..., Any], case: Case, path: Path) -> Outcome:
    """Run one case; a function that cannot take float64 is tried with float32."""
    narrow = dataclasses.replace(case, arguments=to_dtype(case.arguments, torch.float32))
    first: BaseException | None = None
    for one in (case, narrow):
        try:
            return task.drive(function, one)
        except Complaint as complaint:
            return {"complaint": str(complaint)}
        except NotImplementedError:
            return {"complaint": "is not written yet (NotImplementedError)"}
        except SystemExit:
            return {"complaint": "calls exit()"}
        except EOFError:
            return {"complaint": "waits for input"}
        except BaseException as error:
            first = first or error
    assert first is not None
    return {"raises": one_line(first, path)}


def one_line(error: BaseException, path: Path) -> str:
    """Say an error on one line, with the learner's line where it arose."""
    lines = [
        entry.lineno
        for entry in traceback.extract_tb(error.__traceback__)
        if Path(entry.filename).name == path.name
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}{where}"


def fork(work: Callable[[Reporter], None], output: int) -> tuple[int, int]:
    """Start a process that reports to a pipe; return its id and the pipe."""
    reading, writing = os.pipe()
    gc.freeze()  # the child's collector leaves the parent's objects, and so their pages, alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of ours hold no locks here
        pid = os.fork()
    if pid:
        gc.unfreeze()
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.setsid()
        faulthandler.disable()  # a crash is one line
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.close(reading)
        work(Reporter(writing, output))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
