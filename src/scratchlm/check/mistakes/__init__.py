"""Known mistakes, by function: wrong implementations."""

from __future__ import annotations

from functools import cache

from scratchlm.check.driving import Complaint
from scratchlm.check.mistakes.attention import ATTENTION
from scratchlm.check.mistakes.bpe_encoding import BPE_ENCODING
from scratchlm.check.mistakes.bpe_training import BPE_TRAINING
from scratchlm.check.mistakes.layers import LAYERS
from scratchlm.check.mistakes.loss import LOSS
from scratchlm.check.mistakes.model import MODEL
from scratchlm.check.mistakes.norms import NORMS
from scratchlm.check.mistakes.optimizers import ALSO_RIGHT, OPTIMIZERS
from scratchlm.check.mistakes.table import Mistake
from scratchlm.check.outcomes import Outcome
from scratchlm.check.tasks import BY_NAME, Task

MISTAKES: dict[str, list[Mistake]] = {
    **LAYERS,
    **NORMS,
    **ATTENTION,
    **MODEL,
    **LOSS,
    **OPTIMIZERS,
    **BPE_TRAINING,
    **BPE_ENCODING,
}


@cache
def outcomes_of(mistake: Mistake) -> tuple[tuple[Outcome, ...], ...]:
    """Return what each spelling of a mistake gives in every case."""
    task = BY_NAME[mistake.task]
    return tuple(_run(task, function) for function in mistake.functions)


@cache
def also_right(name: str) -> tuple[tuple[Outcome, ...], ...]:
    """Return what other right forms of a function give in every case."""
    task = BY_NAME[name]
    return tuple(_run(task, function) for function in ALSO_RIGHT.get(name, ()))


def _run(task: Task, function: object) -> tuple[Outcome, ...]:
    found: list[Outcome] = []
    for case in task.cases:
        try:
            found.append(task.drive(function, case))  # type: ignore[arg-type]
        except Complaint as complaint:
            found.append({"complaint": str(complaint)})
        except Exception as error:
            found.append({"raises": f"{type(error).__name__}: {error}"})
    return tuple(found)


__all__ = ["MISTAKES", "Mistake", "also_right", "outcomes_of"]
