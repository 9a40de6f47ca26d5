"""`metrics.jsonl`: one line a step, one an evaluation; and what reading it back must survive.

    {"step": 7, "loss": 3.2, "lr": 0.001, "grad_norm": 0.8, "tokens": 7168, "clock": {…}}
    {"step": 7, "val_loss": 3.3, "val_perplexity": 27.1, "bits_per_byte": 2.1, "best": true, …}
    {"step": 7, "samples": ["Once upon …"]}

Everything but `clock` is a function of the config, the data and the machine: it is the same to
the last bit however often a run was killed and resumed. `clock` holds what a wall clock says
(seconds, tokens per second, MFU, memory).

Lines are handed to the system whole and at once, so a kill leaves at most a torn last line. A run
that resumes from step s drops every line after s: the steps will be made, and written, again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scratchlm.errors import ScratchLMError

NAME = "metrics.jsonl"


class MetricsFile:
    """A run's log, open for appending."""

    def __init__(self, path: Path, step: int, evaluated: int) -> None:
        """Open it as it was when the run stood at `step`, last evaluated at `evaluated`."""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        keep = 0
        for end, record in _lines(path):
            at = record.get("step", -1)
            if at > (step if "loss" in record else evaluated):
                break
            keep = end
        self._file.truncate(keep)

    def write(self, record: dict[str, Any]) -> None:
        """Add one line."""
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            while line:  # a disk that is filling up takes a part first
                line = line[self._file.write(line) :]
        except OSError as error:
            raise ScratchLMError(f"{self._file.name}: {error.strerror}") from None

    def sync(self) -> None:
        """Make sure that what was written survives a power cut."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ScratchLMError(f"{self._file.name}: {error.strerror}") from None

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset of its end, record) of every whole line up to the first that is not."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            end += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(record, dict):
                return
            yield end, record


def read_metrics(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a run's log; a torn last line is left out."""
    path = Path(run) / NAME
    if not path.is_file():
        raise ScratchLMError(f"{run}: no {NAME} there; is it a run directory?")
    return [record for _, record in _lines(path)]


def finite(value: float | None) -> float | None:
    """Return a number JSON can hold; infinity is none."""
    return value if value is not None and math.isfinite(value) else None
