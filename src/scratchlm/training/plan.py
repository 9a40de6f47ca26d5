"""What a run is made from, and `config.toml`, where that is written down.

[model]   the ModelConfig
[train]   the TrainConfig, resolved
[data]    train, val and tokenizer: paths, relative to the run where they lie inside it
[changed] settings of [train] that a later session was asked to change; others may not differ
          from those of the checkpoint a run goes on from
[start]   from: the model whose weights the run began with, if any
[tuning]  what makes it a run of fine-tuning, if it is one
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scratchlm.checkpoint import find_checkpoints
from scratchlm.config import ModelConfig, from_dict, to_dict, toml_text
from scratchlm.data.examples import Rows, read_examples
from scratchlm.data.token_file import read_sidecar
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError, check_keys
from scratchlm.training.settings import TrainConfig
from scratchlm.training.tuning import Tuning
from scratchlm.untrusted import read_toml

NAME = "config.toml"


@dataclass(frozen=True)
class DataFiles:
    """The token files of a run, and the tokenizer they were made with."""

    train: Path
    val: Path | None = None
    tokenizer: Path | None = None  # tokenizer.json

    def to_dict(self, run: Path) -> dict[str, str]:
        """Write as plain values."""
        paths = {"train": self.train, "val": self.val, "tokenizer": self.tokenizer}
        return {name: _written(path, run) for name, path in paths.items() if path is not None}

    @staticmethod
    def check_keys(values: dict[str, Any]) -> None:
        """Refuse a key that there is not."""
        check_keys(values, [field.name for field in fields(DataFiles)], "data.")

    @classmethod
    def from_dict(cls, values: dict[str, Any], run: Path) -> DataFiles:
        """Read what `to_dict` wrote."""
        cls.check_keys(values)
        if "train" not in values:
            raise ValueError("no data.train")
        return cls(**{name: run / path for name, path in values.items()})


def _written(path: Path, run: Path) -> str:
    path, run = path.absolute(), run.absolute()
    name = str(path.relative_to(run)) if path.is_relative_to(run) else str(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ScratchLMError(f"{name!r}: {NAME} can only name paths in UTF-8") from None
    return name


@dataclass(frozen=True)
class Plan:
    """Everything a run's outcome depends on, besides the machine."""

    model: ModelConfig
    train: TrainConfig
    data: DataFiles
    changed: frozenset[tuple[str, Any]] = frozenset()  # settings that were asked for later
    start: Path | None = None  # the model whose weights the run began with
    tuning: Tuning | None = None  # of a run of fine-tuning


def epochs(plan: Plan, steps: int | None = None) -> float:
    """Return how often a run reads its data, or has read it after some of its steps."""
    settings, count = plan.train, read_sidecar(plan.data.train) if plan.tuning is None else None
    rows = (settings.steps if steps is None else steps) * settings.batch_size
    if count is not None and settings.rows == "documents" and count.documents:
        return rows / count.documents
    if count is not None:
        return rows * settings.row_tokens(plan.model) / max(1, count.count)
    assert plan.tuning is not None
    examples = read_examples(plan.data.train)
    if plan.tuning.preference is not None:
        return rows / len(examples)
    length = settings.row_tokens(plan.model)
    return rows / len(Rows(examples, length, packed=plan.tuning.packed).rows)


def plan_tables(run: Path, plan: Plan) -> dict[str, Any]:
    """Write a plan as plain values."""
    return {
        "model": to_dict(plan.model),
        "train": plan.train.to_dict(),
        "data": plan.data.to_dict(run),
        **({"changed": dict(sorted(plan.changed))} if plan.changed else {}),
        **({} if plan.start is None else {"start": {"from": str(plan.start.absolute())}}),
        **({} if plan.tuning is None else {"tuning": plan.tuning.to_dict()}),
    }


def plan_of(run: Path, tables: dict[str, Any]) -> Plan:
    """Read what `plan_tables` wrote."""
    start = tables.get("start", {}).get("from")
    return Plan(
        from_dict(tables["model"]),
        TrainConfig.from_dict(tables["train"]),
        DataFiles.from_dict(tables["data"], run),
        frozenset(tables.get("changed", {}).items()),
        None if start is None else Path(start),
        Tuning.from_dict(tables["tuning"]) if "tuning" in tables else None,
    )


def write_plan(run: Path, plan: Plan) -> None:
    """Write RUN/config.toml, whole or not at all."""
    text = toml_text(plan_tables(run, plan))
    write_atomically(run / NAME, text.lstrip("\n").encode())


def read_plan(run: str | os.PathLike[str]) -> Plan:
    """Read RUN/config.toml."""
    path = Path(run) / NAME
    try:
        return plan_of(Path(run), read_toml(path))
    except FileNotFoundError:
        raise ScratchLMError(f"{run}: no {NAME} there; is it a run directory?") from None
    except KeyError as error:
        raise ScratchLMError(f"{path}: no [{error.args[0]}] table") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ScratchLMError(f"{path}: {error}") from None


def has_run(directory: str | os.PathLike[str]) -> bool:
    """Say whether a directory holds a run that was begun."""
    return (Path(directory) / NAME).exists() or bool(find_checkpoints(directory))
