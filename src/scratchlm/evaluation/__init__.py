"""Evaluation: tasks from plain files, run on the engine, with confidence intervals."""

from scratchlm.evaluation.intervals import Estimate, mean_interval, ratio_interval, wilson_interval
from scratchlm.evaluation.running import Evaluator, Result
from scratchlm.evaluation.tasks import KINDS, Task, parse_task, read_task

__all__ = [
    "read_task",
    "parse_task",
    "Task",
    "KINDS",
    "Evaluator",
    "Result",
    "Estimate",
    "wilson_interval",
    "ratio_interval",
    "mean_interval",
]
