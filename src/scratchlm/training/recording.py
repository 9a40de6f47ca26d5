"""Forward and backward as one CUDA graph: recorded once, replayed for every batch of that shape.

The host then only says "again", so a step costs what the device needs, however many kernels it is
made of. The batch is copied into tensors that stay where they are; the gradients appear in tensors
that stay where they are. The clipping and the update happen outside, as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scratchlm.data import Batch

Backward = Callable[[Batch, Tensor], Tensor]  # fill the gradients with those of loss × weight

PLAIN_STEPS = 2  # before the recording: what is compiled or planned on first use has been then


class RecordedBackward:
    """Runs `backward` for batches of one shape; after the first few, from a recording."""

    def __init__(self, backward: Backward, parameters: list[torch.nn.Parameter]) -> None:
        self.backward, self.parameters = backward, parameters
        self.calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch
        self._weight: Tensor
        self._loss: Tensor
        self._gradients: list[Tensor | None]

    def __call__(self, batch: Batch, weight: Tensor) -> Tensor:
        """Fill the gradients; return the weighted loss."""
        self.calls += 1
        if self.calls <= PLAIN_STEPS:
            return self.backward(batch, weight)
        if self._graph is None:
            self._record(batch, weight)
        if batch.inputs.shape != self._batch.inputs.shape:
            return self.backward(batch, weight)  # a last, shorter batch
        for place, new in zip(_tensors(self._batch), _tensors(batch), strict=True):
            place.copy_(new, non_blocking=True)
        self._weight.copy_(weight, non_blocking=True)
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad = gradient
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()

    def _record(self, batch: Batch, weight: Tensor) -> None:
        device = self.parameters[0].device
        self._batch = batch.to(device)
        self._batch = Batch(*(None if t is None else t.clone() for t in _fields(self._batch)))  # type: ignore[arg-type]
        self._weight = weight.to(device).clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # once outside the default stream, as a recording runs
            self.backward(self._batch, self._weight)
        torch.cuda.current_stream().wait_stream(aside)
        for p in self.parameters:
            p.grad = None
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self.backward(self._batch, self._weight)
        self._gradients = [p.grad for p in self.parameters]


def _fields(batch: Batch) -> tuple[Tensor | None, ...]:
    return batch.inputs, batch.targets, batch.document_ids


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for tensor in _fields(batch) if tensor is not None]
