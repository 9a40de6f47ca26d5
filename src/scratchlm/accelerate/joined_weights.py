"""Weights that multiply one input, laid side by side in memory: they read as one matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from scratchlm.model.block import TransformerBlock
from scratchlm.model.layers import Linear, SwiGLU
from scratchlm.model.transformer import TransformerLM


def join_weights(model: TransformerLM) -> None:
    """Lay weights that multiply one input one after the other in memory: they read as one matrix.

    Values and names stay.
    """
    for layer in model.layers:
        assert isinstance(layer, TransformerBlock)
        attn, ffn = layer.attn, layer.ffn
        _lay_side_by_side([attn.q_proj, attn.k_proj, attn.v_proj])
        if isinstance(ffn, SwiGLU):
            _lay_side_by_side([ffn.w1, ffn.w3])


def _lay_side_by_side(linears: Sequence[Linear]) -> None:
    weights = [m.weight for m in linears]
    sizes = [len(weight) for weight in weights]
    block = weights[0].data.new_empty(sum(sizes), weights[0].shape[1])
    for weight, part in zip(weights, block.split(sizes), strict=True):
        part.copy_(weight.data)
        weight.data = part


def as_one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix that these are the row blocks of, if they lie so in memory."""
    first = weights[0]
    address, rows = first.data_ptr(), 0
    for weight in weights:
        if weight.data_ptr() != address or not weight.is_contiguous():
            return None
        address += weight.nbytes
        rows += len(weight)
    end = (first.storage_offset() + rows * first.shape[1]) * first.element_size()
    if first.untyped_storage().nbytes() < end:  # neighbours by chance
        return None
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
