"""Compile the kernels written in Gluon for a Hopper GPU, on a machine without one.

A program of its own, because the tests run under Triton's interpreter. Prints a line per kernel:
its name, the bytes of spills per thread, the bytes of shared memory, and the number of its
characteristic instructions: of tensor cores, or stores into another CTA's shared memory. Every
constant has each of its values; with the argument `all`, in every combination.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from scratchlm.accelerate.kernels.hopper import (
    attention_backward,
    decode_qkv_attention,
    lm_head_exp,
    pingpong_gemm,
    qkv_rope,
    swiglu,
)

TARGET = GPUTarget("cuda", 90, 32)
TALL, WIDE, SMALL = (128, 64), (64, 128), (64, 64)  # blocks of the matrices described to TMA
QKV_ROPE = [TALL, TALL, TALL, "*fp32", "i32", "i32"]
LM_HEAD = [TALL, TALL, TALL, "*fp32", "*fp32", "i32", "i32"]
SWIGLU_BACKWARD = [TALL, WIDE, TALL, TALL, "*bf16", "i32"]
KERNELS = [
    (
        swiglu._swiglu_gemm_kernel,
        [TALL, SMALL, SMALL, TALL, "*bf16"],
        {"STAGES": swiglu.FORWARD_STAGES},
    ),
    (swiglu._swiglu_gemm_backward_kernel, SWIGLU_BACKWARD, {}),
    (lm_head_exp._lm_head_exp_kernel, LM_HEAD, {"CAP": lm_head_exp.CAP}),
    (qkv_rope._qkv_rope_kernel, QKV_ROPE, {"INTERLEAVED": True}),
    (qkv_rope._qkv_rope_kernel, QKV_ROPE, {"INTERLEAVED": False}),
]
ALL = sys.argv[1:] == ["all"]
# One program for any number of query heads per key/value head: the group's size is an argument.
STATS = f"tensordesc<fp32[1, 64],{attention_backward.STATS_LAYOUT!r}>"
ATTENTION = [SMALL, TALL, SMALL, SMALL, SMALL, STATS, "*fp32", "*fp32", "*i32"]
ATTENTION_CONSTANTS = {
    "STAGES": attention_backward.STAGES,
    "SHARED_TILES": attention_backward.SHARED_TILES,
}
KERNELS += [
    (
        attention_backward._attention_backward_kernel,
        ATTENTION,
        {**ATTENTION_CONSTANTS, "INTERLEAVED": interleaved, "SPLIT": split},
    )
    for interleaved in (True, False)
    for split in (False, True)
    if ALL or interleaved != split
]
SIZES = (*pingpong_gemm.SIZES, *attention_backward.SIZES)


def compiled(kernel, arguments, constants):
    names = kernel.arg_names
    layout = pingpong_gemm.SHARED_LAYOUT
    kinds = {
        name: kind
        if isinstance(kind, str)
        else f"tensordesc<bf16[{kind[0]}, {kind[1]}],{layout!r}>"
        for name, kind in zip(names, arguments, strict=False)
    }
    common = {name: getattr(pingpong_gemm, name) for name in ("STAGES", "GROUP", "REGISTERS")}
    values = {name: value for name, value in common.items() if name in names} | constants
    sizes = [name for name in SIZES if name in names]
    kinds |= dict.fromkeys(sizes, "i32") | dict.fromkeys(values, "constexpr")
    constexprs = {(names.index(name),): value for name, value in values.items()}
    pointers = {name for name, kind in kinds.items() if kind.startswith("*")}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = GluonASTSource(kernel, kinds, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": 4, "maxnreg": pingpong_gemm.LAUNCH_REGISTERS}
    return triton.compile(source, target=TARGET, options=options)


POINTERS = {
    "x": "*fp32",
    **dict.fromkeys(("norm_weight", "w_q", "w_k", "w_v"), "*bf16"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("keys", "values", "out"), "*bf16"),
    **dict.fromkeys(("lengths", "table"), "*i32"),
}


def compiled_decode(width, keys, rope):
    kernel = decode_qkv_attention.decode_qkv_attention
    names = kernel.arg_names
    block = 1 << (width - 1).bit_length()
    values = {"K": width, "BLOCK_K": block, "HEADS": 16, "PAGE": 64, "KEYS": keys, "EPS": 1e-5}
    values |= {"ROPE": rope, "SCALE": 0.125, "PDL": True}
    source = GluonASTSource(
        kernel,
        POINTERS | dict.fromkeys(values, "constexpr"),
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS},
    )
    options = {"num_warps": decode_qkv_attention.WARPS, "num_ctas": decode_qkv_attention.CTAS}
    return triton.compile(source, target=TARGET, options={**options, "launch_pdl": True})


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
        done = compiled_decode(width, keys, rope)
        report("decode_qkv_attention", done, r"st\.shared::cluster")


if __name__ == "__main__":
    main()
