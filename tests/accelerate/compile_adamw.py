"""Compile AdamW's kernel for a Hopper GPU, on a machine without one.

A program of its own, because the tests run under Triton's interpreter. Prints a line per variant:
the gradients' type, loads of 16 and of 8 bytes, stores of 16 and of 8, and uses of shared memory.
With gradients in bfloat16 the first moment is so too, and twins are written.
"""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate.kernels.triton.adamw import COLUMNS, Tiling, _adamw

FLOATS = ("decay", "rate", "root", "eps", "beta1", "rest1", "beta2", "rest2")


def compiled(gradient, tiling, aligned=True, scaled=True):
    """Compile the kernel for gradients of a type."""
    constants = {
        "GRADIENT": gradient,
        "MOMENT": gradient,
        "FOUR_G": gradient.primitive_bitwidth // 2,
        "FOUR_M": gradient.primitive_bitwidth // 2,
        "TWIN": gradient == tl.bfloat16,
        "ALIGNED": aligned,
        "BLOCK": tiling.block,
        "CHUNK": tiling.block * tiling.rounds,
        "REST": min(tiling.block, 32 * tiling.warps),
        "COLUMNS": COLUMNS,
        "HINT": tiling.hint,
    }
    if not scaled:
        constants["scale"] = None
    kinds = {"places": "*i64", "gradients": "*i64", "owners": "*i32", "scale": "*fp32"}
    kinds |= dict.fromkeys(FLOATS, "fp32")
    source = ASTSource(
        _adamw,
        kinds | dict.fromkeys(constants, "constexpr"),
        constexprs={(_adamw.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3 + scaled)},
    )
    options = {"num_warps": tiling.warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    for gradient in (tl.float32, tl.bfloat16):
        text = compiled(gradient, Tiling()).asm["ptx"]
        wide = [rf"{way}\.global\S*\.v{n}" for way in ("ld", "st") for n in (4, 2)]
        print(gradient, *(len(re.findall(pattern, text)) for pattern in (*wide, r"\.shared")))
    for scaled in (True, False):
        compiled(tl.float32, Tiling(), aligned=False, scaled=scaled)


if __name__ == "__main__":
    main()
