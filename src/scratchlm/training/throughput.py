"""Throughput of a run: tokens/s, and MFU against the machine's measured matmul rate.

    MFU = FLOPs per token (convention `full`: 6·N_matmul + 12·L·H·d_head·S) · tokens/s / matmul rate

The matmul rate is measured here on one large matmul at the run's precision, not taken from a data
sheet.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from scratchlm.accounting import training_flops_per_token
from scratchlm.config import ModelConfig
from scratchlm.threads import share_cores

CONVENTION = "full"


@dataclass
class Throughput:
    """Computes tokens/s and MFU over the last few steps."""

    tokens_per_step: int
    flops_per_token: float
    matmul_rate: float | None  # FLOP/s; None: not measured, no MFU
    device: torch.device
    ranks: int = 1
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def record(self, seconds: float, total_seconds: float) -> dict[str, Any]:
        """Return the `clock` field of a step's log line."""
        self.recent.append(seconds)
        # The median ignores a session's first steps, which warm caches and compile.
        typical = sorted(self.recent)[len(self.recent) // 2]
        rate = self.tokens_per_step / typical
        clock: dict[str, Any] = {
            "seconds": round(total_seconds, 4),
            "tokens_per_second": round(rate, 1),
            "memory_bytes": memory_bytes(self.device),
        }
        if self.ranks > 1:
            clock["ranks"] = self.ranks
        if self.matmul_rate:
            mfu = rate * self.flops_per_token / (self.matmul_rate * self.ranks)
            clock |= {"mfu": round(mfu, 4), "mfu_convention": CONVENTION}
        return clock


def make_throughput(
    model: ModelConfig,
    tokens_per_step: int,
    device: torch.device,
    matmul_rate: float | None = None,
    ranks: int = 1,
    *,
    row_length: int | None = None,
) -> Throughput:
    """Make the throughput meter of a run; without a matmul rate there is no MFU.

    `row_length`: the tokens of a sequence, if not the model's whole context.
    """
    flops = float(training_flops_per_token(model, row_length or model.context_length, CONVENTION))
    return Throughput(tokens_per_step, flops, matmul_rate, device, ranks)


def measure_matmul_rate(device: torch.device, precision: str, seconds: float = 0.2) -> float:
    """Return the FLOP/s of a large matmul on this device: the best of a few.

    On a CPU, of all its threads with a core each: time is what they ran, not what passed while
    other programs had the cores. Else a run beside them would be said to reach more than 100 %.
    """
    on_gpu = device.type == "cuda"
    share_cores(device)  # a thread that spins runs, too
    size = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    a = torch.ones(size, size, device=device, dtype=dtype)
    clock = time.perf_counter if on_gpu else time.process_time
    clocks = 1 if on_gpu else torch.get_num_threads()
    best, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = clock()
        for _ in range(3):
            torch.mm(a, a)
        if on_gpu:
            torch.cuda.synchronize(device)
        best = max(best, 3 * 2 * size**3 * clocks / (clock() - start))
    return best


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory: of torch's allocator on a GPU, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
