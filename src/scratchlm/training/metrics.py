"""`metrics.jsonl`: one line a step, one an evaluation; and what reading it back must survive.

    {"step": 7, "loss": 3.2, "lr": 0.001, "grad_norm": 0.8, "tokens": 7168, "clock": {…}}
    {"step": 7, "val_loss": 3.3, "val_perplexity": 27.1, "bits_per_byte": 2.1, "best": true, …}
    {"step": 7, "tasks": {"capitals": {"accuracy": {"value": 0.8, "low": 0.6, "high": 0.9}}}}
    {"step": 7, "samples": ["Once upon …"]}

Everything but `clock` is a function of the config, the data and the machine: it is the same to
the last bit however often a run was killed and resumed. `clock` holds what a wall clock says
(seconds, tokens per second, MFU, memory).

Lines are handed to the system whole and at once, so a kill leaves at most a torn last line. A run
that resumes from step s drops every line after s: the steps will be made, and written, again. A
line that something else has damaged is set aside in `metrics.damaged`; the good ones stay.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import open_regular

NAME, DAMAGED = "metrics.jsonl", "metrics.damaged"
MAX_LINE_BYTES = 16 << 20


class MetricsFile:
    """A run's log, open for appending."""

    def __init__(
        self,
        path: Path,
        step: int,
        evaluated: int,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Open it as it was when the run stood at `step`, last evaluated at `evaluated`."""
        if path.exists():
            _cut_back(path, step, evaluated, warn)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)

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


class NoMetrics(MetricsFile):
    """The log of a rank whose lines another one writes."""

    def __init__(self) -> None:
        """Open nothing."""

    def write(self, record: dict[str, Any]) -> None:
        """Write nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _Line:
    """One line of the file: what it says, or what is wrong with it."""

    number: int
    text: bytes
    record: dict[str, Any]
    wrong: str | None
    is_torn: bool  # the last one, without its end


def _cut_back(path: Path, step: int, evaluated: int, warn: Callable[[str], None] | None) -> None:
    """Keep the lines of a run that stands at `step`, and set damaged ones aside."""
    kept: list[bytes] = []
    damaged: list[_Line] = []
    dropped = False
    for line in _lines(path):
        if line.wrong is not None and not line.is_torn:
            damaged.append(line)
        elif line.is_torn or line.record["step"] > (step if "loss" in line.record else evaluated):
            dropped = True
        else:
            kept.append(line.text)
    if not damaged and not dropped:
        return
    if damaged:
        aside = path.with_name(DAMAGED)
        before = aside.read_bytes() if aside.is_file() else b""
        write_atomically(aside, before + b"".join(line.text for line in damaged))
        if warn is not None:
            first = damaged[0]
            warn(
                f"{path}: line {first.number}: {first.wrong}; set aside in {aside.name}, with "
                f"{len(damaged) - 1} more damaged lines"
            )
    write_atomically(path, b"".join(kept))


def _lines(path: Path) -> Iterator[_Line]:
    """Yield every line of the file, good or not."""
    with open_regular(path) as file:
        for number, text in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if len(text) == MAX_LINE_BYTES:  # what follows may be terabytes of it
                raise ScratchLMError(
                    f"{path}: line {number}: must be shorter than {MAX_LINE_BYTES:,} bytes"
                )
            record, wrong = _record(text)
            yield _Line(number, text, record, wrong, not text.endswith(b"\n"))


def _record(text: bytes) -> tuple[dict[str, Any], str | None]:
    """Read a line; say what is wrong with it, if anything is."""
    try:
        record = json.loads(text)
    except RecursionError:
        return {}, "nested too deeply"
    except ValueError:
        return {}, "not JSON"
    if not isinstance(record, dict):
        return {}, "not a JSON object"
    step = record.get("step")
    if type(step) is not int or step < 0:
        return record, "step must be a whole number"
    if "loss" in record:
        clock = record.get("clock")
        numbers = [record.get(name) for name in ("loss", "lr", "tokens")]
        if not isinstance(clock, dict) or not all(map(_is_number, numbers)):
            return record, "a step must have loss, lr, tokens and clock"
        if not all(_is_number(clock.get(name)) for name in _CLOCK):
            return record, f"a step's clock must have {', '.join(_CLOCK)}"
    if record.get("val_loss") is not None and not _is_number(record["val_loss"]):
        return record, "val_loss must be a number"
    if not _are_tasks(record.get("tasks", {})):
        return record, "tasks must be tables of figures"
    samples = record.get("samples", [])
    if not isinstance(samples, list) or not all(isinstance(text, str) for text in samples):
        return record, "samples must be texts"
    return record, None


def _are_tasks(tasks: object) -> bool:
    return isinstance(tasks, dict) and all(
        isinstance(figures, dict)
        and all(
            isinstance(figure, dict)
            and {"value", "low", "high"} <= figure.keys()
            and all(end is None or _is_number(end) for end in figure.values())
            for figure in figures.values()
        )
        for figures in tasks.values()
    )


_CLOCK = ("seconds", "tokens_per_second", "memory_bytes")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def read_metrics(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a run's log; a torn last line is left out, a damaged one is named."""
    path = Path(run) / NAME
    if not path.exists():
        raise ScratchLMError(f"{run}: no {NAME} there; is it a run directory?")
    records = []
    for line in _lines(path):
        if line.wrong is not None and not line.is_torn:
            raise ScratchLMError(f"{path}: line {line.number}: {line.wrong}")
        if not line.is_torn:
            records.append(line.record)
    return records


def finite(value: float | None) -> float | None:
    """Return a number JSON can hold; infinity is none."""
    return value if value is not None and math.isfinite(value) else None
