"""Compile the products written in Gluon for a Hopper GPU, on a machine without one.

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

from scratchlm.ops.kernels import exp_product, swiglu, turns

TALL, WIDE, SMALL = (128, 64), (64, 128), (64, 64)  # blocks of the matrices described to TMA
FLOATS = ("*fp32", "*fp32", "i32", "i32")
KERNELS = [
    (swiglu._forward, [TALL, SMALL, SMALL, TALL, TALL, TALL], {}),
    (swiglu._back, [TALL, WIDE, TALL, TALL, TALL, TALL], {}),
    (exp_product._exp_product, [TALL, TALL, TALL, *FLOATS], {"CAP": exp_product.CAP}),
]


def compiled(kernel, arguments, constants):
    names = kernel.arg_names
    kinds = {
        name: kind
        if isinstance(kind, str)
        else f"tensordesc<bf16[{kind[0]}, {kind[1]}],{turns.LINES!r}>"
        for name, kind in zip(names, arguments, strict=False)
    }
    whole = {name: getattr(turns, name) for name in ("STAGES", "GROUP", "REGISTERS")} | constants
    kinds |= dict.fromkeys(turns.SIZES, "i32") | dict.fromkeys(whole, "constexpr")
    places = {(names.index(name),): value for name, value in whole.items()}
    source = GluonASTSource(kernel, kinds, constexprs=places, attrs={})
    options = {"num_warps": 4, "maxnreg": 168}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    for kernel, arguments, constants in KERNELS:
        done = compiled(kernel, arguments, constants)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(done.asm["ptx"])
            file.flush()
            command = [tool, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
        instructions = len(re.findall(r"wgmma\.mma_async", done.asm["ptx"]))
        print(kernel.__name__, spilled, done.metadata.shared, instructions)


if __name__ == "__main__":
    main()
