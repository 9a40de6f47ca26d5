"""Hand-written kernels, in Triton for GPUs, in C++ for a CPU: imported only where they run.

Each has its reference in `ops/`, a test that runs its logic on the CPU in Triton's interpreter, and
a line in docs/speed-log.md that says what it gained. Those for Hopper alone (`turns.py`,
`swiglu.py`, `exp_product.py`, `project_attend.py`) are in Gluon, which nothing interprets: formulas
stand for them in the tests of what is around them, and a test compiles them for that GPU. Attention
on a CPU (`attention.cpp`, `cpu_tiles.h`) is compiled where it runs, by `native.py`.
"""

from importlib.util import find_spec

_FOUND = find_spec("triton") is not None


def has_triton() -> bool:
    """Whether the kernels can be imported here."""
    return _FOUND
