"""Compile the embedding kernels for a Hopper GPU, on a machine without one.

A separate program, because the tests run in Triton's interpreter, which accepts code that the
compiler rejects. Prints a line per kernel and dtype: 16-byte loads and stores, all loads and
stores, and uses of shared memory.
"""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate.kernels.triton import embedding

WIDTH = 768


def compiled(kernel, pointers, integers, warps, **constants):
    """Compile a kernel for pointers to these types; `integers` are 32-bit."""
    signature = {name: f"*{dtype}" for name, dtype in pointers.items()}
    signature |= dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(name, text):
    vectorized = [rf"{op}\.global\S*\.v4" for op in ("ld", "st")]
    every = [rf"{op}\.global" for op in ("ld", "st")]
    print(name, *(len(re.findall(pattern, text)) for pattern in (*vectorized, *every, r"\.shared")))


def main() -> None:
    sizes = {"WIDTH": WIDTH, "BLOCK": embedding.BLOCK}
    warps = embedding._num_warps(embedding.BLOCK)
    for out in ("fp32", "bf16"):
        pointers = {"ids": "i64", "table": "fp32", "out": out}
        found = compiled(embedding._embedding_kernel, pointers, ["vocab"], warps, **sizes)
        report(f"embedding {out}", found.asm["ptx"])
    integers = ["count", "vocab", "padding"]
    sizes |= {"CHUNK": embedding.CHUNK}
    for grad in ("fp32", "bf16"):
        for key in ("i16", "i32"):
            pointers = {"grad_output": grad, "keys": key, "order": "i64", "out": "fp32"}
            pointers |= {"partial": "fp32"}
            rows = {"ROWS": embedding.ROWS}
            found = compiled(
                embedding._embedding_backward_kernel, pointers, integers, warps, **sizes, **rows
            )
            report(f"embedding_backward {grad} {key}", found.asm["ptx"])
    sizes |= {"BLOCK": embedding.COMBINE_BLOCK, "COMBINE_ROWS": embedding.COMBINE_ROWS}
    for key in ("i16", "i32"):
        pointers = {"keys": key, "out": "fp32", "partial": "fp32"}
        found = compiled(embedding._embedding_combine_kernel, pointers, integers, 4, **sizes)
        report(f"embedding_combine {key}", found.asm["ptx"])


if __name__ == "__main__":
    main()
