"""Train a task head with its trunk: rows with a label, or with the two ends of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.config.heads import TaskHead
from scratchlm.data.batches import IGNORE_INDEX, Batch
from scratchlm.data.examples import ExampleBatches, Examples, ExampleValidation, Rows
from scratchlm.errors import ScratchLMError
from scratchlm.model import QuestionAnswering, SequenceClassifier
from scratchlm.ops import Ops

STEP = 32  # rows are padded to a multiple of it: few shapes, little padding


def build_head(
    config: ModelConfig,
    head: TaskHead,
    tensors: Any,
    seed: int,
    device: torch.device,
    ops: str | Ops,
) -> Any:
    """Make a trunk with a head: the head drawn from the seed, the trunk from `tensors` if given."""
    model: Any
    if head.kind == "classification":
        model = SequenceClassifier(config, len(head.labels), ops)
    else:
        model = QuestionAnswering(config, ops)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    if tensors is not None:
        trunk = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        missing, unexpected = model.load_state_dict(trunk, strict=False)
        own = {name for name in model.state_dict() if name.split(".")[0] in ("score", "span")}
        if unexpected or set(missing) != own:
            raise ScratchLMError("the trunk's tensors are not those of the config")
    return model.to(device)


# Batches


@dataclass(frozen=True)
class HeadBatch(Batch):
    """Rows of ids, what is real of them, and each row's label or two ends (−100: none)."""

    mask: Bool[Tensor, "rows seq"] | None = None

    def num_targets(self) -> int:
        """Count the rows: the loss is their mean."""
        return len(self.inputs)


class _HeadRows(Rows):
    """Rows of one example each, for a head; arguments as of the other base class."""

    def __init__(self, examples: Examples, *args: Any, head: TaskHead, **options: Any) -> None:
        super().__init__(examples, *args, packed=False, **options)
        self.head = head

    def read(self, chosen: Iterable[int | None]) -> HeadBatch:
        """Return these rows; there is none of padding."""
        rows, targets = [], []
        for index in chosen:
            if index is None:
                continue
            ids, marked = self.examples[index]
            if self.head.kind == "classification":
                rows.append(ids[:-1])
                targets.append(ids[-1])
            else:
                rows.append(ids)
                ends = np.flatnonzero(marked)
                targets.append((ends[0], ends[-1]) if len(ends) else (IGNORE_INDEX, IGNORE_INDEX))
        longest = max(map(len, rows))
        width = max(longest, min(self.row_length, -(-longest // STEP) * STEP))
        inputs = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=bool)
        for at, row in enumerate(rows):
            inputs[at, : len(row)], mask[at, : len(row)] = row, True
        wanted = np.array(targets, dtype=np.int64)
        tensors = [torch.from_numpy(array) for array in (inputs, wanted, mask)]
        return HeadBatch(tensors[0], tensors[1], None, tensors[2])


class HeadBatches(_HeadRows, ExampleBatches):
    """Training batches of one example to a row."""


class HeadValidation(_HeadRows, ExampleValidation):
    """Every example once, in order."""


# Learning


def head_loss(model: Any, batch: Batch) -> Tensor:
    """Return the mean loss of a batch's rows."""
    assert isinstance(batch, HeadBatch)
    targets = batch.targets
    ends = (targets,) if targets.ndim == 1 else targets.unbind(-1)
    loss: Tensor = model.loss(batch.inputs, *ends, attention_mask=batch.mask)
    return loss


@torch.no_grad()
def count_right(model: Any, batches: Iterable[Batch]) -> tuple[int, int]:
    """Count the rows whose label, or both ends of whose answer, the model finds; and all rows."""
    device = next(model.parameters()).device
    right = count = 0
    for batch in batches:
        on_device = batch.to(device)
        assert isinstance(on_device, HeadBatch)
        found = model(on_device.inputs, attention_mask=on_device.mask)
        if on_device.targets.ndim == 1:
            hits = found.argmax(-1) == on_device.targets
        else:
            ends = torch.stack((found.start.argmax(-1), found.end.argmax(-1)), dim=-1)
            hits = (ends == on_device.targets).all(-1)
        right, count = right + int(hits.sum()), count + len(hits)
    return right, count
