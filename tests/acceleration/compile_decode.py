"""Compile the kernels of a decode step for a Hopper GPU, on a machine without one.

A separate program, because the tests run in Triton's interpreter, which accepts code that the
compiler rejects. Prints a line per kernel: name, 16-byte loads and L2 prefetches before the PDL
wait, all loads.
"""

import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.gpu_decode_batch import GPUBatchStep
from scratchlm.accelerate.gpu_decode_quantized import GPUQuantizedStep
from scratchlm.accelerate.kernels.triton.decode_tiles import KVSplits, Tile
from scratchlm.paged import PagedCache
from scratchlm.quantization.convert import quantize_model
from scratchlm.quantization.layers import QuantizedLayer
from scratchlm.quantization.layouts import PLANES
from tiny_models import FAMILIES, build

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


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
    options = {"num_warps": warps, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main(family: str) -> None:
    launches, format = {}, ""

    def record(step, kernel, grid, *args, warps=4, first=False):
        key = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args)
        launches[kernel.__name__ + format, key] = (kernel, args, warps)

    def recorded(kind):
        return type("Recorder", (kind,), {"_launch": record})

    torch.mm = lambda a, b, out: out
    sizes = {"d_model": 1024, "d_ff": 1040, "d_head": 256, "vocab_size": 500, "num_layers": 1}
    config = FAMILIES[family].replace(**sizes)
    model = build(config, dtype=torch.bfloat16)
    tiles = {
        "gate": Tile(2, 4, 2),
        "qkv": Tile(8, 4),
        "out": Tile(2, 4, 2),
        "down": Tile(2, 4, 2, quarters=3),
    }
    with torch.inference_mode():
        splits, deferred = KVSplits(16, 4, 3), KVSplits(16, 4, 3, deferred_combine=True)
        cache = PagedCache(model.config, 1, 16, dtype=torch.bfloat16)
        for rows, kv_splits in ((1, None), (2, splits), (2, deferred)):
            recorded(GPUStep)(
                model,
                cache,
                rows=rows,
                max_kv_len=16,
                pdl=True,
                greedy=True,
                tiles=tiles,
                kv_splits=kv_splits,
            ).run()
        for rows in (8, 32):
            recorded(GPUBatchStep)(model, cache, rows=rows, max_kv_len=16, pdl=True).run()
        for to in ("int8", "q8_0", "q4_0", "q4_k"):
            few = build(config.replace(d_ff=1024, vocab_size=512), dtype=torch.bfloat16)
            quantize_model(few.requires_grad_(False), to)
            for layer in few.modules():
                if isinstance(layer, QuantizedLayer):
                    layer.lay_out(PLANES)
            step = recorded(GPUQuantizedStep)(few, cache, max_kv_len=16, pdl=True)
            step._embed = lambda: None
            few.lm_head.forward = lambda x: x.new_zeros(1, 512)
            format = f":{to}"
            step.run()
    for (name, _), (kernel, args, warps) in launches.items():
        text = compiled(kernel, args, warps).asm["ptx"]
        before, _, _ = text.partition("griddepcontrol.wait")
        prefetched = len(re.findall(r"ld\.global[\w.:]*\.v4|bulk\.prefetch", before))
        print(name, prefetched, len(re.findall(r"ld\.global", text)))


if __name__ == "__main__":
    main(sys.argv[1])
