"""Quantised layers with kernels: the bytes in the order a kernel reads them in, and read once.

On a CPU a product is one call of `kernels/cpu/step.cpp`, the same that the CPU runner makes of all
layers at once: the numbers are the same to the bit. On a GPU a product of few rows is one Triton
kernel (`quantized_gemv.py`), which can be recorded; of many rows, the matrix is made wide first.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scratchlm.accelerate.kernels import launches_for
from scratchlm.accelerate.table import Fusion, accelerates, is_class_patched, is_patched
from scratchlm.model import TransformerLM
from scratchlm.model.layers import TiedHead, check_width
from scratchlm.ops import native
from scratchlm.ops.ranges import is_transformed
from scratchlm.quantization.layers import (
    QuantizedEmbedding,
    QuantizedExpertLinear,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedTiedHead,
)
from scratchlm.quantization.layouts import PANEL_ROWS, PANELS, PLANES, ROWS

SOURCE = Path(__file__).parent / "kernels" / "cpu" / "step.cpp"
CPU_FORMATS = {"q8_0": 1, "q4_0": 2, "q4_k": 3, "q6_k": 4}  # as step.cpp numbers them
FEW_ROWS = 8  # for which a GPU reads the bytes themselves; its L2 serves all but the first row


def lay_out(model: TransformerLM, device: torch.device) -> None:
    """Put the bytes of a model's layers in the order that the kernels of a device read."""
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.lay_out(_layout_for(module, device))


def _layout_for(layer: QuantizedLayer, device: torch.device) -> str:
    if isinstance(layer, QuantizedExpertLinear) and (
        device.type == "cuda" or layer.shape[-2] % PANEL_ROWS  # a panel is of one expert
    ):
        return ROWS
    if device.type == "cuda" and find_spec("triton") is not None:
        from scratchlm.accelerate.kernels.triton.quantized_gemv import has_kernel

        return PLANES if has_kernel(layer.format.name, *layer.shape) else ROWS
    has_panels = layer.format.name in CPU_FORMATS and device.type == "cpu"
    return PANELS if has_panels and native.library(SOURCE) is not None else ROWS


def _table(module: Any) -> QuantizedLayer:
    """Return the layer whose bytes a module multiplies by."""
    found: Any = module.tied_to[0] if isinstance(module, TiedHead) else module
    return found


def _why_no_product(layer: QuantizedLayer, x: Tensor, layout: str) -> str | None:
    if is_patched(layer) or is_class_patched(type(layer)):
        return "a method of the matrix's layer is patched"
    if layer.layout != layout:
        return f"bytes laid out in {layer.layout}, not in {layout}"
    if torch.is_grad_enabled() and x.requires_grad:
        return "a gradient is asked for"
    if torch.compiler.is_compiling():
        return "a compiler looks on"
    return "functions are being transformed (torch.func)" if is_transformed() else None


def _why_no_cpu_product(module: Any, x: Tensor, context: object) -> str | None:
    if x.device.type != "cpu":
        return "not on a CPU"
    return _why_no_product(_table(module), x, PANELS)


def _why_no_gpu_product(module: Any, x: Tensor, context: object) -> str | None:
    if not launches_for(x):
        return "no GPU for our kernels"
    if x.numel() // x.shape[-1] > FEW_ROWS:
        return f"more than {FEW_ROWS} rows"
    return _why_no_product(_table(module), x, PLANES)


def _fusions(takes: type[nn.Module], name: str, what: str) -> tuple[Fusion, Fusion]:
    return (
        Fusion(
            f"cpu_quantized_{name}",
            f"{what}: whole numbers times panels of bytes, in C++",
            takes=takes,
            absorbs=(),
            ops=("linear",),
            condition=_why_no_cpu_product,
        ),
        Fusion(
            f"gpu_quantized_{name}",
            f"{what}: few rows times planes of bytes, each read once",
            takes=takes,
            absorbs=(),
            ops=("linear",),
            condition=_why_no_gpu_product,
            kernels=("_gemv_", "_round_rows_kernel"),
        ),
    )


CPU_LINEAR, GPU_LINEAR = _fusions(QuantizedLinear, "linear", "Ŵ x")
CPU_HEAD, GPU_HEAD = _fusions(QuantizedTiedHead, "head", "Ê x of a tied head")
CPU_EXPERTS = Fusion(
    "cpu_quantized_experts",
    "Ŵₑ x of each expert's rows: whole numbers times panels of bytes, in C++",
    takes=QuantizedExpertLinear,
    absorbs=(),
    ops=("linear",),
    condition=_why_no_cpu_product,
)


@accelerates(QuantizedLinear, CPU_LINEAR, GPU_LINEAR)
class AcceleratedQuantizedLinear(QuantizedLinear):
    """y = Ŵ x (+ b)."""

    left_out: frozenset[str] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to the last dimension."""
        check_width(x, self.shape[1], "Linear")
        if CPU_LINEAR.runs(self, x):
            return cpu_product(self, x, self.bias)
        if GPU_LINEAR.runs(self, x):
            return gpu_product(self, x, self.bias)
        return super().forward(x)


@accelerates(QuantizedEmbedding)
class AcceleratedQuantizedEmbedding(QuantizedEmbedding):
    """A table of vectors, looked up by id."""

    left_out: frozenset[str] = frozenset()


@accelerates(QuantizedTiedHead, CPU_HEAD, GPU_HEAD)
class AcceleratedQuantizedTiedHead(QuantizedTiedHead):
    """y = Ê x."""

    left_out: frozenset[str] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        """Compare every vector with every row of the table."""
        table = self.tied_to[0]
        if isinstance(table, QuantizedEmbedding) and x.shape[-1] == table.shape[1]:
            if CPU_HEAD.runs(self, x):
                return cpu_product(table, x, None)
            if GPU_HEAD.runs(self, x):
                return gpu_product(table, x, None)
        return super().forward(x)


@accelerates(QuantizedExpertLinear, CPU_EXPERTS)
class AcceleratedQuantizedExpertLinear(QuantizedExpertLinear):
    """One matrix per expert."""

    left_out: frozenset[str] = frozenset()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert's map to its rows; those of expert e end before row `ends[e]`."""
        if not CPU_EXPERTS.runs(self, x):
            return super().forward(x, ends)
        panels = self.stored.view(self.shape[0], -1, self.stored.shape[-1])
        groups = x.tensor_split(ends[:-1].long())
        found = [
            panel_product(own, self.format.name, self.shape[1], rows)
            for rows, own in zip(groups, panels, strict=True)
        ]
        return torch.cat(found).to(x.dtype)


def gpu_product(layer: QuantizedLayer, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply few rows by a layer's planes; nothing waits for the device."""
    from scratchlm.accelerate.kernels.triton.quantized_gemv import planes_of, quantized_gemv

    kept = layer.__dict__.get("_planes")
    if kept is None or kept[0] is not layer.stored:  # splitting them takes as long as a product
        planes = planes_of(layer.stored, layer.format.name, layer.shape[0])
        kept = layer.__dict__["_planes"] = (layer.stored, planes)
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    y = quantized_gemv(kept[1], layer.format.name, rows, bias)
    return y.view(*x.shape[:-1], layer.shape[0])


def cpu_product(layer: QuantizedLayer, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a layer's panels."""
    width = layer.shape[0]
    y = panel_product(layer.stored, layer.format.name, width, x.reshape(-1, x.shape[-1]))
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], width)


def panel_product(panels: Tensor, format: str, width: int, x: Tensor) -> Tensor:
    """Return x times the `width` rows that panels hold, in float32."""
    library = native.library(SOURCE)
    assert library is not None
    rows = x.detach().float().contiguous()
    y = torch.empty(len(rows), width)
    if len(rows):
        failed = library.run_product(
            ctypes.c_void_p(rows.data_ptr()),
            *map(ctypes.c_int64, rows.shape),
            ctypes.c_void_p(panels.data_ptr()),
            ctypes.c_int64(CPU_FORMATS[format]),
            ctypes.c_int64(width),
            ctypes.c_void_p(y.data_ptr()),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the product")
    return y
