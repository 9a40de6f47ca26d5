"""Compile the AdamW kernel for a Hopper GPU, on a machine without one.

A separate program, because the tests run in Triton's interpreter. Prints a line per variant: the
dtype of the gradients, loads of 16 and of 8 bytes, stores of 16 and of 8, and uses of shared
memory. With bfloat16 gradients the first moment is bfloat16 too, and shadow weights are written.
"""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate.kernels.triton.adamw import COLUMNS, Tiling, _adamw_kernel

FLOATS = (
    *("decay", "step_size", "inv_sqrt_correction", "eps"),
    *("beta1", "one_minus_beta1", "beta2", "one_minus_beta2"),
)


def compiled(grad, tiling, aligned=True, scaled=True):
    """Compile the kernel for gradients of this dtype."""
    constants = {
        "GRAD": grad,
        "MOMENT": grad,
        "GRAD_ALIGNMENT": grad.primitive_bitwidth // 2,
        "MOMENT_ALIGNMENT": grad.primitive_bitwidth // 2,
        "SHADOW": grad == tl.bfloat16,
        "ALIGNED": aligned,
        "BLOCK": tiling.block,
        "CHUNK": tiling.block * tiling.blocks_per_program,
        "TAIL_BLOCK": min(tiling.block, 32 * tiling.warps),
        "COLUMNS": COLUMNS,
        "EVICTION": tiling.eviction_policy,
    }
    if not scaled:
        constants["scale"] = None
    signature = {"rows": "*i64", "grads": "*i64", "owners": "*i32", "scale": "*fp32"}
    signature |= dict.fromkeys(FLOATS, "fp32")
    source = ASTSource(
        _adamw_kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constexprs={
            (_adamw_kernel.arg_names.index(name),): value for name, value in constants.items()
        },
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3 + scaled)},
    )
    options = {"num_warps": tiling.warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    for grad in (tl.float32, tl.bfloat16):
        text = compiled(grad, Tiling()).asm["ptx"]
        wide = [rf"{op}\.global\S*\.v{n}" for op in ("ld", "st") for n in (4, 2)]
        print(grad, *(len(re.findall(pattern, text)) for pattern in (*wide, r"\.shared")))
    for scaled in (True, False):
        compiled(tl.float32, Tiling(), aligned=False, scaled=scaled)


if __name__ == "__main__":
    main()
