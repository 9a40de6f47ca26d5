"""From what a function did to what is wrong with it.

A known mistake is named where it reproduces the learner's own numbers in every case, where no other
known mistake does, and where the definition does not. Two mistakes at once have numbers of their
own and are called neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from scratchlm.check.driving import Case
from scratchlm.check.loading import Source, read_source
from scratchlm.check.mistakes import MISTAKES, Mistake, also_right, outcomes_of
from scratchlm.check.outcomes import (
    LOW,
    MATCHING,
    Difference,
    Outcome,
    agree,
    differences,
    shown,
)
from scratchlm.check.runner import TIME_LIMIT, FunctionRun, run_file
from scratchlm.check.tasks import TASKS, Task, expected

State = Literal["right", "wrong", "missing"]

_DTYPE = Mistake(
    "",
    "the result does not have the input's dtype",
    (
        "Which dtype comes out where bfloat16 goes in?",
        "A float32 table or constant widens what it meets.",
        "return result.to(in_features.dtype)",
    ),
    (),
)
_GRADIENT = Mistake(
    "",
    "no gradient arrives: the function works on a copy",
    (
        "Which of your operations does autograd not follow?",
        ".data, detach(), load_state_dict, torch.tensor(…), .item() and no_grad() cut it off.",
        "use the argument itself",
    ),
    (),
)


@dataclass(frozen=True)
class Verdict:
    """What was found about one function."""

    task: Task
    state: State
    case: Case | None = None  # the smallest that fails
    first: Difference | None = None  # its first wrong cell, or what went wrong
    failing: tuple[str, ...] = ()  # the names of all cases that fail
    mistake: Mistake | None = None
    note: str = ""  # what it printed
    cut: tuple[str, ...] = ()  # the arguments that no gradient reaches

    @property
    def example(self) -> str:
        """The arguments of the smallest failing case, on one line."""
        if self.case is None:
            return ""
        if self.case.given:
            return self.case.given
        return ", ".join(f"{name}={shown(v)}" for name, v in self.case.arguments.items())

    def as_json(self, hints: int = 0) -> dict[str, Any]:
        """Return the verdict as JSON has it."""
        found: dict[str, Any] = {"function": self.task.name, "state": self.state}
        if self.first is not None and self.case is not None:
            found["case"], found["example"] = self.case.name, self.example
            found["what"], found["difference"] = self.first.what, self.first.text
            found["failing"] = list(self.failing)
            found["mistake"] = self.mistake.name if self.mistake else None
            if hints and self.mistake:
                found["hints"] = list(self.mistake.hints[:hints])
        if self.note:
            found["printed"] = self.note
        return found


def judge(task: Task, run: FunctionRun, course: bool) -> Verdict:
    """Compare what a function gave with the definition, and name the mistake."""
    wanted = expected(task.name)
    got = {index: _relaxed(outcome, course) for index, outcome in run.outcomes.items()}
    note = " ".join(run.printed.split())
    cut = _cut_off(run.outcomes.values())
    accepted = (wanted, *also_right(task.name))
    if any(_reproduces(form, got) for form in accepted):
        return Verdict(task, "right", note=note, cut=cut)
    found = {i: differences(_like(outcome, wanted[i]), wanted[i]) for i, outcome in got.items()}
    failing = [index for index, unlike in found.items() if unlike]
    first = failing[0]
    return Verdict(
        task,
        "wrong",
        task.cases[first],
        found[first][0],
        tuple(task.cases[index].name for index in failing),
        diagnose(task, got),
        note,
        cut,
    )


def diagnose(task: Task, got: dict[int, Outcome]) -> Mistake | None:
    """Return the one known mistake that gives these numbers in every case."""
    if any("complaint" in outcome for outcome in got.values()):
        return None
    wanted = expected(task.name)
    if all(agree(_cast(_like(o, wanted[i]), wanted[i]), wanted[i]) for i, o in got.items()):
        return _DTYPE
    known = [
        mistake
        for mistake in MISTAKES.get(task.name, ())
        if any(_reproduces(form, got, MATCHING) for form in outcomes_of(mistake))
    ]
    known = [mistake for mistake in known if not mistake.double] or known
    if len({mistake.name for mistake in known}) == 1:
        return known[0]
    unlike = [d for i, o in got.items() for d in differences(_like(o, wanted[i]), wanted[i])]
    if not known and all(d.what.startswith("gradient of") for d in unlike):
        cut = all(d.text.startswith("no gradient arrives") for d in unlike)
        return _GRADIENT if cut else None
    return None


def _cut_off(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Name the arguments whose gradient never arrived."""
    names = (k for o in outcomes for k, v in o.items() if k.startswith("gradient of") and v is None)
    return tuple(dict.fromkeys(name.removeprefix("gradient of ") for name in names))


def _reproduces(form: tuple[Outcome, ...], got: dict[int, Outcome], times: float = 1.0) -> bool:
    return bool(got) and all(agree(_like(o, form[i]), form[i], times) for i, o in got.items())


def _like(got: Outcome, form: Outcome) -> Outcome:
    """Take from a form the gradients that a relaxed outcome does not have."""
    return {**form, **got} if "relaxed" in got else got


def _relaxed(outcome: Outcome, course: bool) -> Outcome:
    """For adapters, which copy weights into layers: a gradient that never arrives is no mistake."""
    if not course:
        return outcome
    kept = {k: v for k, v in outcome.items() if not (k.startswith("gradient of") and v is None)}
    return kept if len(kept) == len(outcome) else {**kept, "relaxed": True}


def _cast(outcome: Outcome, wanted: Outcome) -> Outcome:
    """Return the outcome with its result in the dtype that was expected."""
    result, like = outcome.get("result"), wanted.get("result")
    if isinstance(result, Tensor) and isinstance(like, Tensor) and like.dtype in LOW:
        return {**outcome, "result": result.to(like.dtype)}
    return outcome


def check_file(
    path: Path,
    tasks: Iterable[Task] = TASKS,
    *,
    course: bool = False,
    limit: float = TIME_LIMIT,
    wrong: frozenset[str] = frozenset(),
    source: Source | None = None,
) -> list[Verdict]:
    """Check functions of a file; `wrong` ones, known from before, are borrowed by the others."""
    source = source or read_source(path)
    missing = source.unwritten | source.absent
    tasks = list(tasks)
    names = [task.name for task in tasks if task.name not in missing]
    ran = run_file(path, names, borrowed=wrong - set(names), course=course, limit=limit)
    return [
        judge(task, ran[task.name], course)
        if task.name in ran and ran[task.name].outcomes
        else Verdict(task, "missing")
        for task in tasks
    ]


def wrong_names(verdicts: Iterable[Verdict]) -> frozenset[str]:
    """Return the functions that were found wrong."""
    return frozenset(v.task.name for v in verdicts if v.state == "wrong")
