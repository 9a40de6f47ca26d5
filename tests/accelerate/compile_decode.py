"""Compile what a fused step launches, for a Hopper GPU, on a machine without one.

Run as a program of its own, because the tests run under Triton's interpreter, which lets pass what
the compiler refuses. Prints a line per kernel: name, 16-byte loads before the wait, all loads.
"""

import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scratchlm.accelerate.kernels.triton.decode_tiles import Spread, Tile
from scratchlm.model.fused import FusedStep
from tiny_models import FAMILIES, build

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


def compiled(kernel, args, warps):
    """Compile a kernel for the arguments of one launch."""
    signature, constants, hints = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=True)):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            hints[(i,)] = [["tt.divisibility", 16]]
        elif value is not None and not kernel.params[i].is_constexpr:
            signature[name] = "i32"
        else:
            signature[name] = "constexpr"
            constants[(i,)] = value
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    options = {"num_warps": warps, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main(family: str) -> None:
    launches = {}

    class Recorder(FusedStep):
        def _launch(self, kernel, grid, *args, warps=4, first=False):
            key = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args)
            launches[kernel.__name__, key] = (kernel, args, warps)

    sizes = {"d_model": 1024, "d_ff": 1040, "d_head": 256, "vocab_size": 500, "num_layers": 1}
    config = FAMILIES[family].replace(**sizes)
    model = build(config, dtype=torch.bfloat16)
    tiles = {
        "gate": Tile(2, 4, 2),
        "qkv": Tile(8, 4),
        "out": Tile(2, 4, 2),
        "down": Tile(2, 4, 2, fourths=3),
    }
    with torch.inference_mode():
        by_tickets, handed_on = Spread(16, 4, 3), Spread(16, 4, 3, handed_on=True)
        for rows, spread in ((1, None), (2, by_tickets), (2, handed_on), (6, by_tickets)):
            cache = model.new_cache(rows, 16)
            Recorder(model, cache, pdl=True, greedy=True, tiles=tiles, spread=spread).run()
    for (name, _), (kernel, args, warps) in launches.items():
        text = compiled(kernel, args, warps).asm["ptx"]
        before, _, _ = text.partition("griddepcontrol.wait")
        early = len(re.findall(r"ld\.global[\w.:]*\.v4", before))
        print(name, early, len(re.findall(r"ld\.global", text)))


if __name__ == "__main__":
    main(sys.argv[1])
