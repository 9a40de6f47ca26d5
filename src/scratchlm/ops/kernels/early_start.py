"""Kernels that begin before the one ahead of them has ended (programmatic dependent launch).

A kernel asks for what depends on nothing, lets the next kernel's programs in, and waits until the
kernel before has ended and all it wrote can be seen:

    weights = tl.load(…)
    ready(PDL)                          let_next_in, then wait
    vector = tl.load(…)
    … packed(weights, PDL) …
"""

# mypy: disallow_untyped_defs=False
# Arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_in(PDL: tl.constexpr):
    """Let the next kernel begin once every program of this one has come here, or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernel before has ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def ready(PDL: tl.constexpr):
    """Let the next kernel in, then wait for the one before."""
    let_next_in(PDL)
    wait(PDL)


@triton.jit
def packed(block, PDL: tl.constexpr):
    """Return what was loaded as it is; to be called where it is used, after the wait.

    Elements of 16 bits come two to a register. The compiler would take them apart where they are
    loaded, and so stand there, before `ready`, until they have arrived. It cannot see through this.
    """
    if PDL and block.dtype.primitive_bitwidth == 16:
        block = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [block], block.dtype, is_pure=False, pack=2
        )
    return block
