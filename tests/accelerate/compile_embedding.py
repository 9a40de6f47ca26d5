"""Compile the embedding's kernels for a Hopper GPU, on a machine without one.

A program of its own, because the tests run under Triton's interpreter, which lets pass what the
compiler refuses. Prints a line per kernel and type of the gradients: 16-byte loads and stores, all
loads and stores, and uses of shared memory.
"""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate.kernels.triton import embedding

WIDTH = 768


def compiled(kernel, pointers, numbers, warps, **constants):
    """Compile a kernel for pointers to these types; `numbers` are 32-bit integers."""
    kinds = {name: f"*{kind}" for name, kind in pointers.items()}
    kinds |= dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        kinds,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(name, text):
    wide = [rf"{way}\.global\S*\.v4" for way in ("ld", "st")]
    every = [rf"{way}\.global" for way in ("ld", "st")]
    print(name, *(len(re.findall(pattern, text)) for pattern in (*wide, *every, r"\.shared")))


def main() -> None:
    sizes = {"WIDTH": WIDTH, "BLOCK": embedding.BLOCK}
    warps = embedding._warps(embedding.BLOCK)
    for out in ("fp32", "bf16"):
        pointers = {"ids": "i64", "table": "fp32", "out": out}
        found = compiled(embedding._look_up, pointers, ["vocab"], warps, **sizes)
        report(f"look_up {out}", found.asm["ptx"])
    numbers = ["count", "vocab", "padding"]
    sizes |= {"CHUNK": embedding.CHUNK}
    for above in ("fp32", "bf16"):
        for key in ("i16", "i32"):
            pointers = {"above": above, "keys": key, "order": "i64", "out": "fp32"}
            pointers |= {"shares": "fp32"}
            rows = {"ROWS": embedding.ROWS}
            found = compiled(embedding._sum_in_chunk, pointers, numbers, warps, **sizes, **rows)
            report(f"sum_in_chunk {above} {key}", found.asm["ptx"])
    sizes |= {"BLOCK": embedding.SHARE_BLOCK, "SHARES": embedding.SHARES}
    for key in ("i16", "i32"):
        pointers = {"keys": key, "out": "fp32", "shares": "fp32"}
        found = compiled(embedding._join_shares, pointers, numbers, 4, **sizes)
        report(f"join_shares {key}", found.asm["ptx"])


if __name__ == "__main__":
    main()
