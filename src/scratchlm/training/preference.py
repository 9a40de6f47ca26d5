"""Direct preference optimization: learn from pairs which of two answers is the better one.

    L = −log σ(β · [log π(y⁺|x)/π₀(y⁺|x) − log π(y⁻|x)/π₀(y⁻|x)])        arXiv:2305.18290, eq. 7

π₀ is the model before it learns. Its log-probabilities do not change: they are computed once,
before the first step, and kept beside the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.data.batches import IGNORE_INDEX, Batch
from scratchlm.data.examples import ExampleBatches, Examples, ExampleValidation, Rows
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.training.learner import Learner
from scratchlm.untrusted import parse_json, read_bytes

NAME = "reference.json"
_MAX_BYTES = 1 << 30


def dpo_loss(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    reference_chosen: Float[Tensor, " pairs"],
    reference_rejected: Float[Tensor, " pairs"],
    beta: float,
) -> Float[Tensor, ""]:
    """Return the mean loss of pairs, from the log-probabilities of their answers."""
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return -F.logsigmoid(beta * margin).mean()


def sequence_logps(
    model: TransformerLM, inputs: Int[Tensor, "rows seq"], targets: Int[Tensor, "rows seq"]
) -> Float[Tensor, " rows"]:
    """Return the log-probability of each row's targets; those that are ignored count nothing."""
    hidden = model.hidden(inputs)
    learnt = targets != IGNORE_INDEX
    logits = model.lm_head(hidden[learnt]).float()  # (targets, vocab): of the answers alone
    logps = -F.cross_entropy(logits, targets[learnt], reduction="none")
    rows = torch.arange(len(inputs), device=inputs.device)[:, None].expand_as(targets)[learnt]
    return logps.new_zeros(len(inputs)).index_add(0, rows, logps)


@dataclass(frozen=True)
class PreferenceBatch(Batch):
    """Rows in pairs, the chosen and the rejected answer, with π₀'s log-probabilities."""

    reference: Float[Tensor, " rows"] | None = None

    def num_targets(self) -> int:
        """Count the pairs: the loss is their mean."""
        return len(self.inputs) // 2


def pair_loss(model: TransformerLM, batch: Batch, beta: float) -> Tensor:
    """Return the mean loss of a batch of pairs."""
    assert isinstance(batch, PreferenceBatch)
    assert batch.reference is not None
    logps = sequence_logps(model, batch.inputs, batch.targets)
    reference = batch.reference.to(logps)
    return dpo_loss(logps[::2], logps[1::2], reference[::2], reference[1::2], beta)


# Batches


class _PairRows(Rows):
    """Two rows for a pair; arguments as of the other base class, `batch_size` counts rows."""

    batch_size: int

    def __init__(
        self, examples: Examples, *args: Any, reference: np.ndarray, **options: Any
    ) -> None:
        super().__init__(examples, *args, packed=False, **options)
        self.reference = reference
        self.rows = [[2 * pair, 2 * pair + 1] for pair in range(len(examples) // 2)]
        self.batch_size = max(1, self.batch_size // 2)  # of pairs

    def read(self, chosen: Iterable[int | None]) -> PreferenceBatch:
        """Return these pairs, row by row; there is none of padding."""
        order = [index for pair in chosen if pair is not None for index in self.rows[pair]]
        rows = self.lay_out([[index] for index in order])
        reference = torch.from_numpy(self.reference[order])
        return PreferenceBatch(rows.inputs, rows.targets, None, reference)


class PreferenceBatches(_PairRows, ExampleBatches):
    """Batches of whole pairs."""

    def __init__(
        self, examples: Examples, row_length: int, batch_size: int, *args: Any, **options: Any
    ) -> None:
        if len(examples) % 2 or batch_size % 2:
            raise ScratchLMError(f"pairs need an even batch_size; got {batch_size}")
        super().__init__(examples, row_length, batch_size, *args, **options)


class PreferenceValidation(_PairRows, ExampleValidation):
    """Every pair once, in order."""


# The model before it learns


def reference_logps(
    path: Path,
    learner: Learner,
    examples: Examples,
    row_length: int,
    batch_size: int,
) -> np.ndarray:
    """Return π₀'s log-probabilities of all examples: from the file, or computed and written.

    To be called before any learnt weights are loaded.
    """
    crc = examples.fingerprint["crc32"]
    if path.exists():
        table = parse_json(read_bytes(path, _MAX_BYTES), str(path))
        found = table.get("logps")
        if table.get("examples") == crc and isinstance(found, list) and len(found) == len(examples):
            return np.array(found, dtype=np.float64)
        raise ScratchLMError(f"{path} is of other data: it is not what was written")
    rows = ExampleValidation(examples, row_length, batch_size, packed=False)
    logps: list[float] = []
    with torch.no_grad(), learner.autocast(), learner.evaluating():
        for batch in rows:
            on_device = batch.to(learner.device)
            logps += sequence_logps(learner.model, on_device.inputs, on_device.targets).tolist()
    logps = logps[: len(examples)]  # the rest is padding
    write_atomically(path, json.dumps({"examples": crc, "logps": logps}).encode())
    return np.array(logps, dtype=np.float64)
