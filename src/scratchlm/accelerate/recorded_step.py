"""A step that can be replayed: what it is told lies in one piece of device memory, always the same.

given = StepInput({"positions": Field((rows,), neutral=-1), …}, device)
work reads given["positions"], …          recorded once as a CUDA graph
given.send(positions=[7, 3])              one copy before each replay; the rest is neutral
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scratchlm.cuda_graphs import no_garbage_collection


@dataclass(frozen=True)
class Field:
    """One array of an input; `neutral` fills what a step leaves open."""

    shape: tuple[int, ...]
    neutral: int = 0
    wide: bool = False  # float64, else int32


class StepInput:
    """Arrays that the host writes and a recorded step reads."""

    def __init__(self, fields: dict[str, Field], device: torch.device) -> None:
        self._fields = fields
        sizes = {n: prod(f.shape) * (2 if f.wide else 1) for n, f in fields.items()}
        # Every array begins at a multiple of 16 bytes: Triton compiles anew for one that does not.
        room = {name: -(-size // 4) * 4 for name, size in sizes.items()}
        self._neutral = np.zeros(sum(room.values()), dtype=np.int32)
        self._memory = torch.empty(len(self._neutral), dtype=torch.int32, device=device)
        self._at: dict[str, tuple[int, int]] = {}
        self.arrays: dict[str, Tensor] = {}
        at = 0
        for name, field in fields.items():
            self._at[name] = at, at + sizes[name]
            flat = self._memory[at : at + sizes[name]]
            self.arrays[name] = (flat.view(torch.float64) if field.wide else flat).view(field.shape)
            at += room[name]
            self._view(self._neutral, name)[...] = field.neutral
        self.send()

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def _view(self, memory: Any, name: str) -> Any:
        field, (begin, end) = self._fields[name], self._at[name]
        flat = memory[begin:end]
        return (flat.view(np.float64) if field.wide else flat).reshape(field.shape)

    def send(self, **arrays: Any) -> None:
        """Copy arrays to the device, each into the corner of its place, without waiting."""
        pinned = self._memory.is_cuda
        host = torch.empty(len(self._neutral), dtype=torch.int32, pin_memory=pinned)
        there = host.numpy()
        there[:] = self._neutral
        for name, array in arrays.items():
            view = self._view(there, name)
            view[tuple(slice(size) for size in np.shape(array))] = array
        self._memory.copy_(host, non_blocking=True)


@dataclass
class RecordedStep:
    """Work over an input, and where its results lie; replayed where it has been recorded."""

    given: StepInput
    work: Callable[[], None]
    logits: Tensor
    tokens: Tensor | None = None  # where it also chooses
    graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Replay it, or do it kernel by kernel where it is not recorded."""
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()

    def record(self, pool: Any) -> RecordedStep:
        """Do it once with nothing in the input, to compile what it needs; then record it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with no_garbage_collection():
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self.work()
                finally:
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        return self
