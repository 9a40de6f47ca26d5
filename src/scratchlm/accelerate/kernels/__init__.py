"""Hand-written kernels, in Triton for GPUs, in C++ for a CPU: imported only where they run.

Each has its reference in `ops/`, a test that runs its logic on the CPU in Triton's interpreter, and
a line in docs/speed-log.md that says what it gained. Those for Hopper alone (`turns.py`,
`swiglu.py`, `project_heads.py`, `attend.py`, `attend_back.py` with `head_tiles.py`, `query_sums.py`
and `plan.py`, `exp_product.py`, `project_attend.py`) are in Gluon, which nothing interprets:
formulas stand for them in the tests of what is around them, and a test compiles them for that GPU.
Attention on a CPU (`attention.cpp`, `cpu_tiles.h`) is compiled where it runs, by `native.py`.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

_FOUND = find_spec("triton") is not None  # else they cannot be imported


@torch.compiler.assume_constant_result  # a compiler asks once, and does not look inside
def is_current(device: int) -> bool:
    """Whether this is the GPU that kernels are launched on: Triton looks at no tensor's."""
    return device == torch.cuda.current_device()


def launches_for(x: Tensor) -> bool:
    """Whether kernels can be launched for this tensor; on another GPU, torch's own ops serve."""
    return x.is_cuda and _FOUND and is_current(x.device.index)
