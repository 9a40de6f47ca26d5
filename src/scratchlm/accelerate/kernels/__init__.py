"""Kernels: `triton/` for any recent GPU, `hopper/` (Gluon) for Hopper GPUs, `cpu/` in C++.

They are imported, or compiled, only where they run. Each has its reference in `ops/` and a line in
docs/speed-log.md with its gain. Tests run the Triton kernels on a CPU in Triton's interpreter.
Gluon has no interpreter: tests compile those kernels, and use the formulas in their place.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from scratchlm.ops.ranges import constant_in_graphs

_HAS_TRITON = find_spec("triton") is not None


@constant_in_graphs
def is_current(device: int) -> bool:
    """Whether this is the current GPU, where Triton launches: it ignores the tensors' device."""
    return device == torch.cuda.current_device()


def launches_for(x: Tensor) -> bool:
    """Whether kernels can be launched for this tensor; elsewhere torch's ops are used."""
    return x.is_cuda and _HAS_TRITON and is_current(x.device.index)
