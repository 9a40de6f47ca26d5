"""Layers whose matrix is stored in few bits.

Each stands for a layer of the model and computes the same formula with the matrix its bytes stand
for. The products of q8_0, q4_0, q4_k and q6_k round the other factor to 8 bits too
(`ops/quantized.py`), with a kernel or without, for any number of rows; where a gradient is asked
for it stays as it is. `weight` is the matrix itself, which is computed when somebody computes with
it; in a state dict and in a file it is `weight_FORMAT`, rows of bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from scratchlm.model.layers import Embedding, Linear, TiedHead, check_width
from scratchlm.model.moe import ExpertLinear
from scratchlm.ops import Ops
from scratchlm.ops.quantized import dequantize, get_format, quantized_linear, rounded
from scratchlm.ops.ranges import check_range, goes_forward, is_transformed, keep_in_range, mark
from scratchlm.quantization.layouts import ROWS, copy_into, from_layout, to_layout


class QuantizedWeight(Tensor):
    """A matrix that is stored in few bits: any computation with it reads its bytes."""

    layer: QuantizedLayer

    @staticmethod
    def __new__(cls, layer: QuantizedLayer) -> QuantizedWeight:
        """Take the shape, the dtype and the device of a layer's matrix, and no memory."""
        made = Tensor._make_wrapper_subclass(
            cls, layer.shape, dtype=layer.dtype, device=layer.stored.device
        )
        made.layer = layer
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        """Compute with what the bytes stand for."""
        args, kwargs = torch.utils._pytree.tree_map_only(
            cls, lambda weight: weight.layer.dequantized(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


class QuantizedLayer(nn.Module):
    """A matrix (…, rows, d_in) as bytes (…, rows, bytes_per_row)."""

    stored: Tensor  # the bytes in their layout, on their device
    recomputes = False  # whether a backward pass computes the matrix again and does not keep it

    def __init__(
        self, packed: UInt8[Tensor, "*experts rows bytes"], format: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.format, self.dtype, self.layout = get_format(format), dtype, ROWS
        d_in = self.format.weights_per_row(packed.shape[-1])
        self.shape = torch.Size((*packed.shape[:-1], d_in))
        self.register_buffer("stored", packed, persistent=False)

    @property
    def packed(self) -> UInt8[Tensor, "*experts rows bytes"]:
        """The bytes row by row, as in a file."""
        return self._rows(self.stored).view(*self.shape[:-1], -1)

    def _rows(self, stored: Tensor) -> UInt8[Tensor, "rows bytes"]:
        return from_layout(stored, self.format.name, self.layout, self.shape[:-1].numel())

    @property
    def weight(self) -> Tensor:
        """The matrix, computed when somebody computes with it."""
        return self.dequantized() if torch.compiler.is_compiling() else QuantizedWeight(self)

    def dequantized(self, stored: Tensor | None = None) -> Float[Tensor, "*experts rows d_in"]:
        """Return the matrix that the bytes stand for."""
        rows = self._rows(self.stored if stored is None else stored)
        return dequantize(rows, self.format).view(self.shape).to(self.dtype)

    def lay_out(self, layout: str) -> None:
        """Put the bytes in the order that a kernel reads them in; their number stays."""
        if layout != self.layout:
            rows = self.packed.flatten(0, -2)
            self.stored, self.layout = to_layout(rows, self.format.name, layout), layout

    @torch.no_grad()
    def fill(self, packed: UInt8[Tensor, "*experts rows bytes"]) -> None:
        """Copy rows of bytes into the memory that is there."""
        rows = packed.reshape(self.shape[:-1].numel(), -1)
        copy_into(self.stored, rows, self.format.name, self.layout)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        before = self.stored.device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=before)).dtype
        super()._apply(fn, recurse)
        return self

    # Files have the rows, under the name that says their format

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight_{self.format.name}"] = self.packed

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        given = state.pop(f"{prefix}weight_{self.format.name}", None)
        super()._load_from_state_dict(state, prefix, *rest)
        if given is not None:
            layout, self.layout = self.layout, ROWS
            self.stored = given.to(self.stored.device)
            self.lay_out(layout)

    def extra_repr(self) -> str:
        """Say sizes and format in `print(model)`."""
        return f"{'×'.join(map(str, self.shape))}, {self.format.name}"


class QuantizedLinear(QuantizedLayer):
    """y = Ŵ x (+ b)."""

    def __init__(
        self,
        packed: UInt8[Tensor, "d_out bytes"],
        format: str,
        bias: nn.Parameter | None,
        *,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        super().__init__(packed, format, dtype)
        self.ops, self.bias = ops, bias

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Apply the map to the last dimension."""
        check_width(x, self.shape[1], "Linear")
        return product(self, x, self.bias)


class QuantizedEmbedding(QuantizedLayer):
    """A table of vectors, looked up by id."""

    def __init__(
        self,
        packed: UInt8[Tensor, "vocab bytes"],
        format: str,
        padding_id: int | None,
        *,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        super().__init__(packed, format, dtype)
        self.padding_id, self.ops = padding_id, ops

    def forward(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Look every id up."""
        check_range(token_ids, self.shape[0], "token id")
        safe, wrong = keep_in_range(token_ids, self.shape[0])
        count = self.shape[0]
        rows = from_layout(self.stored, self.format.name, self.layout, count, safe.flatten())
        found = dequantize(rows, self.format).to(self.dtype)
        return mark(found.view(*token_ids.shape, -1), wrong)


class QuantizedTiedHead(TiedHead):
    """y = Ê x with E the quantised token embeddings."""

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab"]:
        """Compare every vector with every row of the table."""
        table = self.tied_to[0]
        if not isinstance(table, QuantizedEmbedding):  # replaced since
            return super().forward(x)
        return product(table, x, None)


class QuantizedExpertLinear(QuantizedLayer):
    """One matrix per expert."""

    def __init__(
        self,
        packed: UInt8[Tensor, "experts d_out bytes"],
        format: str,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        super().__init__(packed, format, dtype)
        self.ops = ops

    def forward(
        self, x: Float[Tensor, "rows d_in"], ends: Int[Tensor, " experts"]
    ) -> Float[Tensor, "rows d_out"]:
        """Apply each expert's map to its rows; matrices of experts without rows are not read."""
        if is_transformed():
            return self.ops.grouped_linear(x, self.dequantized().to(x.dtype), ends)
        stored = self.stored.view(self.shape[0], -1, self.stored.shape[-1])
        groups = x.tensor_split(ends[:-1].long().cpu())
        wide = [
            quantized_linear(
                rows,
                from_layout(own, self.format.name, self.layout, self.shape[1]),
                self.format,
                int8_activations=rounds(self, x),
            )
            for rows, own in zip(groups, stored, strict=True)
            if len(rows)
        ]
        return torch.cat(wide) if wide else x.new_empty(0, self.shape[1])


def rounds(layer: QuantizedLayer, x: Tensor) -> bool:
    """Whether a product rounds x to 8 bits."""
    wanted = torch.is_grad_enabled() and x.requires_grad
    return layer.format.int8_activations and not (wanted or goes_forward())


def product(layer: QuantizedLayer, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the matrix of a layer, by the formula."""
    if layer.recomputes and torch.is_grad_enabled() and x.requires_grad and not is_transformed():
        y: Tensor = _Recomputed.apply(x, layer)
        return y if bias is None else y + bias.to(y.dtype)
    if rounds(layer, x):
        x = rounded(x)
    ops: Any = layer.ops
    return ops.linear(x, layer.dequantized().to(x.dtype), bias)


class _Recomputed(torch.autograd.Function):
    """y = Ŵ x, and going backward dx = Ŵᵀ dy: the matrix is not kept between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLayer) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        ops: Any = layer.ops
        y: Tensor = ops.linear(x, layer.dequantized().to(x.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        stored = ctx.layer.stored
        if torch.compiler.is_compiling():  # or it would see the same matrix twice, and keep one
            stored = torch.ops.scratchlm.copy_after(stored, dy)
        weight = ctx.layer.dequantized(stored).to(dy.dtype)
        return (dy @ weight).to(ctx.dtype), None


@torch.library.custom_op("scratchlm::copy_after", mutates_args=())
def _copy_after(stored: Tensor, later: Tensor) -> Tensor:
    """Copy bytes, at a time when `later` is there."""
    return stored.clone()


@_copy_after.register_fake
def _(stored: Tensor, later: Tensor) -> Tensor:
    return torch.empty_like(stored)


def quantized_layer(module: nn.Module, packed: Tensor, format: str) -> nn.Module:
    """Return the quantised layer that stands for a layer of ours."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    ops: Ops = module.ops  # type: ignore[assignment]
    match module:
        case Linear():
            return QuantizedLinear(packed, format, module.bias, dtype=weight.dtype, ops=ops)
        case Embedding():
            padding = module.padding_id
            return QuantizedEmbedding(packed, format, padding, dtype=weight.dtype, ops=ops)
        case ExpertLinear():
            return QuantizedExpertLinear(packed, format, weight.dtype, ops)
    raise ValueError(f"a {type(module).__name__} cannot be quantised")
