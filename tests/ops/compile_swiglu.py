"""Compile the products with SwiGLU's gate inside for a Hopper GPU, on a machine without one.

A program of its own, because the tests run under Triton's interpreter. Prints a line per kernel:
its name, registers a thread that spill to memory, bytes of shared memory, tensor-core instructions.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from scratchlm.ops.kernels import swiglu

BLOCKS = {  # of the matrices described to TMA
    swiglu._forward: [(128, 64), (64, 64), (64, 64), (128, 64), (128, 64), (128, 64)],
    swiglu._back: [(128, 64), (64, 128), (128, 64), (128, 64), (128, 64), (128, 64)],
}
CONSTANTS = {name: getattr(swiglu, name) for name in ("STAGES", "GROUP", "REGISTERS")}


def compiled(kernel):
    names = kernel.arg_names
    kinds = {
        name: f"tensordesc<bf16[{rows}, {columns}],{swiglu._LINES!r}>"
        for name, (rows, columns) in zip(names, BLOCKS[kernel], strict=False)
    }
    kinds |= dict.fromkeys(swiglu._SIZES, "i32") | dict.fromkeys(CONSTANTS, "constexpr")
    constants = {(names.index(name),): value for name, value in CONSTANTS.items()}
    source = GluonASTSource(kernel, kinds, constexprs=constants, attrs={})
    options = {"num_warps": 4, "maxnreg": 168}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    for kernel in BLOCKS:
        done = compiled(kernel)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(done.asm["ptx"])
            file.flush()
            command = [tool, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
        products = len(re.findall(r"wgmma\.mma_async", done.asm["ptx"]))
        print(kernel.__name__, spilled, done.metadata.shared, products)


if __name__ == "__main__":
    main()
