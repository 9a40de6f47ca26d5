"""Compile the quantised products for a Hopper GPU, on a machine without one.

Prints a line per format: name, 16-byte loads, dp4a instructions.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate.kernels.triton import quantized_gemv as kernels
from scratchlm.ops.quantized import FORMATS, quantize
from scratchlm.quantization.layouts import PLANES, to_layout

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compiled(kernel, args, warps):
    signature, constants, attrs = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=True)):
        if isinstance(value, torch.Tensor):
            signature[name], attrs[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif value is not None and not kernel.params[i].is_constexpr:
            signature[name], attrs[(i,)] = "i32", [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(i,)] = value
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def main() -> None:
    x = torch.zeros(1, 1024, dtype=torch.bfloat16)
    words, scales = torch.zeros(1, 256, dtype=torch.int32), torch.zeros(1, 32)
    for name in ("q8_0", "q4_0", "q4_k", "q6_k", "int8", "fp8"):
        stored = to_layout(quantize(torch.ones(16, 1024), name), name, PLANES)
        planes = kernels.planes_of(stored, name, 16)
        y = torch.zeros(1, 16, dtype=torch.bfloat16)
        if FORMATS[name].int8_activations:
            sizes = (16, 1024, kernels.ROWS_AT_ONCE, kernels.BLOCKS_AT_ONCE, False, True)
            args, kernel = (*planes, words, scales, None, y, *sizes), kernels._KERNELS[name]
            warps = kernels.WARPS
        else:
            sizes = (16, 1024, kernels.ROWS_AT_ONCE, kernels.WEIGHTS_AT_ONCE, False)
            args, kernel = (*planes, x, None, y, *sizes), kernels._gemv_row_scale_kernel
            warps = 4
        text = compiled(kernel, args, warps).asm["ptx"]
        wide = len(re.findall(r"ld\.global\S*\.v4\.b32", text))
        print(name, wide, len(re.findall(r"dp4a", text)))


if __name__ == "__main__":
    main()
