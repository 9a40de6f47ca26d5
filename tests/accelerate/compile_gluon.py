"""Compile the kernels written in Gluon for a Hopper GPU, on a machine without one.

A program of its own, because the tests run under Triton's interpreter. Prints a line per kernel:
its name, bytes a thread spills to memory, bytes of shared memory, and how many instructions there
are of the kind it is about: of tensor cores, or stores into another multiprocessor's memory.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from scratchlm.accelerate.kernels.hopper import attention_backward as attend_back
from scratchlm.accelerate.kernels.hopper import decode_qkv_attention as project_attend
from scratchlm.accelerate.kernels.hopper import lm_head_exp as exp_product
from scratchlm.accelerate.kernels.hopper import pingpong_gemm as turns
from scratchlm.accelerate.kernels.hopper import qkv_rope as project_heads
from scratchlm.accelerate.kernels.hopper import swiglu

TALL, WIDE, SMALL = (128, 64), (64, 128), (64, 64)  # blocks of the matrices described to TMA
FLOATS = ("*fp32", "*fp32", "i32", "i32")
KERNELS = [
    (swiglu._forward, [TALL, SMALL, SMALL, TALL, "*bf16"], {"STAGES": swiglu.FORWARD_STAGES}),
    (swiglu._back, [TALL, WIDE, TALL, TALL, "*bf16", "i32"], {}),
    (exp_product._exp_product, [TALL, TALL, TALL, *FLOATS], {"CAP": exp_product.CAP}),
    (project_heads._project, [TALL, TALL, TALL, "*fp32", "i32", "i32"], {"INTERLEAVED": True}),
    (project_heads._project, [TALL, TALL, TALL, "*fp32", "i32", "i32"], {"INTERLEAVED": False}),
]
STATS = f"tensordesc<fp32[1, 64],{attend_back.NUMBERS!r}>"
HEADS = [SMALL, TALL, SMALL, SMALL, SMALL, STATS, "*fp32", "*fp32", "*i32"]
OF_HEADS = {"STAGES": attend_back.STAGES, "SHELVES": attend_back.SHELVES}
KERNELS += [
    (attend_back._attend_back, HEADS, {**OF_HEADS, "INTERLEAVED": turned, "CUT": cut})
    for turned in (True, False)
    for cut in (False, True)
]
COUNTS = (*turns.SIZES, *attend_back.COUNTS)


def compiled(kernel, arguments, constants):
    names = kernel.arg_names
    kinds = {
        name: kind
        if isinstance(kind, str)
        else f"tensordesc<bf16[{kind[0]}, {kind[1]}],{turns.LINES!r}>"
        for name, kind in zip(names, arguments, strict=False)
    }
    common = {name: getattr(turns, name) for name in ("STAGES", "GROUP", "REGISTERS")}
    whole = {name: value for name, value in common.items() if name in names} | constants
    sizes = [name for name in COUNTS if name in names]
    kinds |= dict.fromkeys(sizes, "i32") | dict.fromkeys(whole, "constexpr")
    places = {(names.index(name),): value for name, value in whole.items()}
    whole = {name for name, kind in kinds.items() if kind.startswith("*")}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
    source = GluonASTSource(kernel, kinds, constexprs=places, attrs=attrs)
    options = {"num_warps": 4, "maxnreg": turns.BEFORE}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


POINTERS = {
    "x": "*fp32",
    **dict.fromkeys(("gain", "w_q", "w_k", "w_v"), "*bf16"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("keys", "values", "out"), "*bf16"),
    "lengths": "*i64",
}


def compiled_attention(width, keys, rope):
    kernel = project_attend.project_attend
    names = kernel.arg_names
    block = 1 << (width - 1).bit_length()
    values = {"K": width, "BLOCK_K": block, "CAPACITY": 1024, "KEYS": keys, "EPS": 1e-5}
    values |= {"ROPE": rope, "SCALE": 0.125, "PDL": True}
    source = GluonASTSource(
        kernel,
        POINTERS | dict.fromkeys(values, "constexpr"),
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS},
    )
    options = {"num_warps": project_attend.WARPS, "num_ctas": project_attend.CTAS}
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={**options, "launch_pdl": True})


def report(name, done, instruction):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(done.asm["ptx"])
        file.flush()
        command = [tool, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    print(name, spilled, done.metadata.shared, len(re.findall(instruction, done.asm["ptx"])))


def main() -> None:
    for kernel, arguments, constants in KERNELS:
        done = compiled(kernel, arguments, constants)
        report(kernel.__name__, done, r"wgmma\.mma_async")
    for width, keys, rope in ((1024, 8, 2), (1024, 32, 1), (768, 4, 0)):
        done = compiled_attention(width, keys, rope)
        report("project_attend", done, r"st\.shared::cluster")


if __name__ == "__main__":
    main()
