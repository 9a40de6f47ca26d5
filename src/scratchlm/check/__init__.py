"""A learner's own functions, run apart, compared with the definition and diagnosed.

from scratchlm.check import check_file
for verdict in check_file(Path("my_ops.py")):
    print(verdict.task.short, verdict.state, verdict.mistake)
"""

from __future__ import annotations

from scratchlm.check.diagnosis import Verdict, check_file, wrong_names
from scratchlm.check.tasks import TASKS, Task, find_task

__all__ = ["TASKS", "Task", "Verdict", "check_file", "find_task", "wrong_names"]
