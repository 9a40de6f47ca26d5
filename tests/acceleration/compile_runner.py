"""Compile the kernels that read steps and choose tokens for a Hopper GPU, on a machine without one.

A separate program, because the tests run in Triton's interpreter, which accepts code that the
compiler rejects. Prints a line per kernel: name, registers that spill.
"""

import re
import sys
from typing import ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate import flat_forward, gpu_runner
from scratchlm.accelerate.kernels.triton import choose_token, invariant_linear
from scratchlm.paged import LAST, PagedCache, Step
from tiny_models import FAMILIES, build

TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


class Recorder:
    """Stands in for a kernel: takes note of its launches, and does nothing."""

    launches: ClassVar[dict] = {}

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, **more):
            key = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args)
            self.launches[self.kernel.__name__, key] = (self.kernel, args, num_warps)

        return launch


def compiled(kernel, args, warps):
    """Compile a kernel for the arguments of a launch."""
    signature, constants, attrs = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=True)):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif value is not None and not kernel.params[i].is_constexpr:
            signature[name] = "i32"
        else:
            signature[name] = "constexpr"
            constants[(i,)] = value
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def read_steps(family: str, exact: bool) -> None:
    """Read a prompt and a decoded token of many rows."""
    sizes = {"d_model": 256, "d_ff": 512, "d_head": 128, "num_layers": 1, "context_length": 4096}
    model = build(FAMILIES[family].replace(**sizes), dtype=torch.bfloat16)
    cache = PagedCache(model.config, 1, 64, dtype=torch.bfloat16)
    runner = gpu_runner.GPURunner(model, cache, max_rows=48, exact=exact)
    forward = runner._forward
    forward._launch = lambda kernel, grid, *args, warps=4, **more: Recorder(kernel)[grid](
        *args, num_warps=warps
    )
    tables, last = torch.zeros(40, 64, dtype=torch.int32), torch.zeros(40, dtype=torch.int64)
    runner.run(Step([1] * 9, [3, 3, 3], [0] * 3, [0, 1, 2], [True] * 3), tables, last)
    rows = list(range(40))  # more than `gpu_decode_batch.py` takes
    runner.run(Step([LAST] * 40, [1] * 40, [2000] * 40, rows, [True] * 40), tables, last)


def main(family: str) -> None:
    linear = invariant_linear._invariant_linear_kernel
    choosing = {name: getattr(choose_token, name) for name in ("group_maxima", "collect", "draw")}
    invariant_linear._invariant_linear_kernel = Recorder(linear)
    flat_forward.F.linear = lambda x, w, b=None: x.new_empty(len(x), len(w))
    read_steps(family, exact=False)
    read_steps(family, exact=True)
    for name, kernel in choosing.items():
        setattr(choose_token, name, Recorder(kernel))
    wide, whole = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        for numbers in (None, wide):
            logits = torch.zeros(2, 50_304, dtype=dtype)
            choose_token.choose_tokens(logits, wide, whole, wide, numbers, whole, whole)
    invariant_linear._invariant_linear_kernel = linear
    for name, kernel in choosing.items():
        setattr(choose_token, name, kernel)
    for (name, _), (kernel, args, warps) in Recorder.launches.items():
        text = compiled(kernel, args, warps).asm["ptx"]
        print(name, len(re.findall(r"\.local", text)))


if __name__ == "__main__":
    main(*sys.argv[1:])
