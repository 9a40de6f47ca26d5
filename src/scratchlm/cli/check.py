"""`scratchlm check`: a learner's own functions, compared with the definition and diagnosed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.terminal import say

if TYPE_CHECKING:
    from scratchlm.check import Task, Verdict
    from scratchlm.check.scratch import Refused

POLL = 0.1  # seconds between two looks at a file that is watched
HINTS = ("a nudge", "a pointer", "the line")


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("check")(check)


def check(
    file: Annotated[
        Path | None, typer.Argument(help="Your file of functions.", show_default=False)
    ] = None,
    functions: Annotated[
        list[str] | None,
        typer.Argument(help="Some of them: softmax, attention, …", show_default="all"),
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write FILE, with every function to write.")
    ] = False,
    hint: Annotated[
        int,
        typer.Option(
            "--hint", count=True, help="Hints: once a nudge, twice a pointer, thrice the line."
        ),
    ] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever you save.")] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Train with your functions, beside the definitions.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=2, help="With --train: updates to make.", show_default="200")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="With --train: the folder to write.", show_default="runs/check"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    adapters: Annotated[
        Path | None, typer.Option(help="The CS336 course's adapters.py, as it is.")
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Refuse torch.nn.functional, nn.Linear and the like."),
    ] = False,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds one call may take.")] = 10.0,
) -> None:
    """Check your own linear, softmax, attention, …, AdamW, BPE against the definition.

    What is wrong is named: the smallest failing example, the first wrong cell, and the known
    mistake that gives your very numbers. Your file runs in a process of its own. Exit status 0:
    everything asked for is right; 1: something is wrong or not written yet.
    """
    _refuse_together(watch=watch, train=train, json=as_json, init=init)
    for option, value in (("--steps", steps), ("--out", out)):
        if value is not None and not train:
            raise ValueError(f"{option} is for --train")
    path = _path(file, adapters, init)
    if init:
        _write_stubs(path)
        return
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before torch: a process with threads is not forked
    import torch

    from scratchlm.check import TASKS, find_task

    torch.set_num_threads(1)
    tasks = [find_task(name) for name in functions] if functions else list(TASKS)
    checker = _Checker(path, tasks, adapters is not None, from_scratch, time_limit, hint)
    if watch:
        for line in checker.watch():
            say(line)
    verdicts, refused = checker.check()
    if as_json:
        say(json.dumps(checker.as_json(verdicts, refused), indent=2, ensure_ascii=False))
    elif not train:
        for line in checker.lines(verdicts, refused):
            say(line)
    status = int(bool(refused) or any(v.state != "right" for v in verdicts))
    if train:
        from scratchlm.cli.check_training import train_both

        place, updates = out or Path("runs/check"), steps or 200
        status = train_both(
            checker.path, verdicts, updates, place, adapters is not None, time_limit
        )
    if status:
        raise typer.Exit(status)


def _refuse_together(**chosen: bool) -> None:
    """Refuse two options that each say what to do."""
    given = [f"--{name}" for name, wanted in chosen.items() if wanted]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be used together")


def _path(file: Path | None, adapters: Path | None, init: bool) -> Path:
    if file is not None and adapters is not None:
        raise ValueError("give a FILE or --adapters, not both")
    path = adapters if file is None else file
    if path is None:
        raise ValueError("give a FILE; `scratchlm check --init my_ops.py` writes one to start from")
    if not init and not path.is_file():
        raise ValueError(f"{path} is no file; `scratchlm check --init {path}` writes one")
    return path


def _write_stubs(path: Path) -> None:
    from scratchlm.check.stubs import write_stubs
    from scratchlm.durable import write_atomically

    if path.exists():
        raise ValueError(f"{path} exists already; it is left as it is")
    write_atomically(path, write_stubs(path.name).encode())
    say(f"wrote {path}; now write run_linear in it, and: scratchlm check {path}")


class _Checker:
    """One file, what to check of it, and how to say it."""

    def __init__(
        self,
        path: Path,
        tasks: Sequence[Task],
        course: bool,
        from_scratch: bool,
        limit: float,
        hints: int,
    ) -> None:
        self.path, self.tasks, self.course = path, list(tasks), course
        self.from_scratch, self.limit, self.hints = from_scratch, limit, hints

    def check(self) -> tuple[list[Verdict], list[Refused]]:
        """Check all that was asked for."""
        from scratchlm.check import check_file
        from scratchlm.check.scratch import find_refused

        refused = find_refused(self.path) if self.from_scratch else []
        return check_file(self.path, self.tasks, course=self.course, limit=self.limit), refused

    def as_json(self, verdicts: list[Verdict], refused: list[Refused]) -> dict[str, Any]:
        """Return everything, for programs."""
        states = [verdict.state for verdict in verdicts]
        found: dict[str, Any] = {
            "file": str(self.path),
            "passed": not refused and set(states) <= {"right"},
            **{state: states.count(state) for state in ("right", "wrong", "missing")},
            "functions": [verdict.as_json(self.hints) for verdict in verdicts],
        }
        if self.from_scratch:
            found["refused"] = [
                {"file": str(r.path), "line": r.line, "name": r.name} for r in refused
            ]
        return found

    def lines(self, verdicts: list[Verdict], refused: list[Refused]) -> Iterator[str]:
        """Say everything, for people."""
        for verdict in verdicts:
            yield from self._verdict(verdict)
        for one in refused:
            yield f"not from scratch: {one}"
        states = [verdict.state for verdict in verdicts]
        parts = [f"{states.count('right')} of {len(states)} right"]
        parts += [f"{states.count('wrong')} wrong"] if "wrong" in states else []
        parts += [f"{states.count('missing')} to write"] if "missing" in states else []
        yield ", ".join(parts)
        known = [v for v in verdicts if v.mistake]
        if known and self.hints < len(HINTS):
            again = " --hint" * (self.hints + 1)
            yield f"{HINTS[self.hints]}: scratchlm check {self.path} {known[0].task.short}{again}"

    def _verdict(self, verdict: Verdict) -> Iterator[str]:
        name = f"{verdict.task.short:<14}"
        if verdict.state != "wrong":
            yield name + {"right": "right", "missing": "not written"}[verdict.state]
        else:
            assert verdict.first is not None
            assert verdict.case is not None
            plain = verdict.first.what in ("complaint", "raises")
            mistake = verdict.mistake.name if verdict.mistake else "not a mistake I know"
            if verdict.first.what == "complaint":
                yield f"{name}WRONG: {verdict.first.text}"
            else:
                yield f"{name}WRONG: {mistake}"
                what = "" if plain else f"{verdict.first.what} "
                yield f"{'':<14}  {verdict.case.name}: {verdict.example}"
                yield f"{'':<14}  {what}{verdict.first.text}"
            if verdict.mistake:
                for label, text in zip(HINTS[: self.hints], verdict.mistake.hints, strict=False):
                    yield f"{'':<14}  {label}: {text}"
        if verdict.note:
            yield f"{'':<14}  prints: {verdict.note[:80]}"

    def watch(self) -> Iterator[str]:
        """Check everything, and after every save what has changed, for ever."""
        from scratchlm.check import check_file, wrong_names
        from scratchlm.check.loading import Source, read_source
        from scratchlm.errors import ScratchLMError

        before: Source | None = None
        known: dict[str, Verdict] = {}
        stamp = None
        while True:
            now = self.path.stat().st_mtime_ns if self.path.exists() else stamp
            if now == stamp:
                time.sleep(POLL)
                continue
            stamp, began = now, time.perf_counter()
            try:
                source = read_source(self.path)
                changed = source.changed_since(before) if before else None
                tasks = [t for t in self.tasks if changed is None or t.name in changed]
                wrong = wrong_names(known.values())
                options = {"course": self.course, "limit": self.limit}
                found = check_file(self.path, tasks, wrong=wrong, source=source, **options)  # type: ignore[arg-type]
                before = source
            except ScratchLMError as error:
                yield f"error: {error}"
                continue
            known |= {verdict.task.name: verdict for verdict in found}
            for verdict in found:
                if changed is not None or verdict.state != "missing":
                    yield from self._verdict(verdict)
            right = sum(verdict.state == "right" for verdict in known.values())
            seconds = time.perf_counter() - began
            yield f"{right} of {len(self.tasks)} right ({seconds:.1f} s); waiting for a save"
