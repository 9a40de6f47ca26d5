"""Forward and backward as one CUDA graph: recorded once, replayed for every batch of that shape.

The host then only says "again", so a step costs what the device needs, however many kernels it is
made of. The batch is copied into tensors that stay where they are; the gradients appear in tensors
that stay where they are. With micro-batches the gradients accumulate inside the recording. The
clipping and the update happen outside, as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scratchlm.cuda_graphs import no_garbage_collection
from scratchlm.data import Batch

Backward = Callable[[Batch, Tensor], Tensor]  # add to the gradients those of loss × weight

PLAIN_STEPS = 2  # before the recording: what is compiled or planned on first use has been then


class RecordedBackward:
    """Runs `backward` for batches of one shape; after the first few steps, from a recording.

    A step calls `begin_step`, then this object once for each of its micro-batches. Where recording
    fails, `warn` is told why, and every step is launched as the first ones were.
    """

    def __init__(
        self,
        backward: Backward,
        parameters: list[torch.nn.Parameter],
        *,
        accumulates: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.backward, self.parameters = backward, parameters
        self.accumulates, self.warn = accumulates, warn
        self.steps = 0
        self.failed = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._batch: Batch
        self._weight: Tensor
        self._loss: Tensor
        self._gradients: list[Tensor | None] = []

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.steps += 1
        for p in self.parameters:
            p.grad = None
        if self._graph is not None and self.accumulates:
            torch._foreach_zero_([g for g in self._gradients if g is not None])
            self._lend_gradients()

    def __call__(self, batch: Batch, weight: Tensor) -> Tensor:
        """Add to the gradients; return the weighted loss."""
        if self.failed or self.steps <= PLAIN_STEPS:
            return self._launch(batch, weight)
        if self._graph is None:
            try:
                self._record(batch, weight)
            except RuntimeError as error:
                self._give_up(error)
                return self._launch(batch, weight)
        if batch.inputs.shape != self._batch.inputs.shape:
            return self._launch(batch, weight)  # a last, shorter micro-batch
        for place, new in zip(_tensors(self._batch), _tensors(batch), strict=True):
            place.copy_(new, non_blocking=True)
        self._weight.copy_(weight, non_blocking=True)
        if not self.accumulates:
            self._lend_gradients()
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()

    def _launch(self, batch: Batch, weight: Tensor) -> Tensor:
        """Run kernel by kernel, on the stream of the recording.

        Autograd adds up a parameter's gradient on the stream on which it first met the parameter,
        and the default stream cannot take part in a recording.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self.backward(batch, weight)
        current.wait_stream(self._stream)
        return loss

    def _lend_gradients(self) -> None:
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad = gradient

    def _give_up(self, error: RuntimeError) -> None:
        """Go on without a recording, as if none had been tried."""
        self.failed, self._graph, self._gradients = True, None, []
        for p in self.parameters:
            p.grad = None
        root: BaseException = error
        while root.__context__ is not None:  # the end of a capture hides what broke it
            root = root.__context__
        why = " ".join(str(root).split())[:200]
        self.warn(f"train.cuda_graph: recording failed, steps are launched one by one: {why}")

    def _record(self, batch: Batch, weight: Tensor) -> None:
        """Record the first micro-batch of a step; nothing has been accumulated yet."""
        device = self.parameters[0].device
        self._batch = batch.to(device)
        self._batch = Batch(*(None if t is None else t.clone() for t in _fields(self._batch)))  # type: ignore[arg-type]
        self._weight = weight.to(device).clone()
        self._launch(self._batch, self._weight)
        for p in self.parameters:
            # A sum of several is float32, also where one micro-batch's is bfloat16.
            p.grad = torch.zeros_like(p) if self.accumulates and p.grad is not None else None
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(graph, stream=self._stream):
            self._loss = self.backward(self._batch, self._weight)
        self._gradients = [p.grad for p in self.parameters]
        self._graph = graph


def _fields(batch: Batch) -> tuple[Tensor | None, ...]:
    return batch.inputs, batch.targets, batch.document_ids


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for tensor in _fields(batch) if tensor is not None]
