"""Quantise a model in place, or take quantised tensors into a model that has none yet.

    quantize_model(model, "q4_k")

replaces every layer whose matrix the rule chooses (`rule.py`); the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.model.layers import TiedHead
from scratchlm.ops.quantized import dequantize, quantize
from scratchlm.quantization.layers import QuantizedLayer, QuantizedTiedHead, quantized_layer
from scratchlm.quantization.rule import Choice, choose, choose_base


def quantize_model(model: TransformerLM, to: str) -> list[Choice]:
    """Replace the layers that the rule chooses, in place; return what became of every tensor."""
    return _quantize(model, choose(model.config, to))


def quantize_base(model: TransformerLM, to: str) -> list[Choice]:
    """Replace the matrices of the layers, in place, for an adapter to learn beside (QLoRA)."""
    choices = _quantize(model, choose_base(model.config, to))
    recompute_matrices(model)
    return choices


@torch.no_grad()
def _quantize(model: TransformerLM, choices: list[Choice]) -> list[Choice]:
    for choice in choices:
        if choice.format is None:
            continue
        module = model.get_submodule(choice.name.removesuffix(".weight"))
        if isinstance(module, QuantizedLayer):
            raise ValueError(f"{choice.name} is quantised already, to {module.format.name}")
        weight: Tensor = module.weight  # type: ignore[assignment]
        replace_layer(model, choice, packed_as(choice, weight.detach()))
    return choices


def replace_layer(model: TransformerLM, choice: Choice, packed: Tensor) -> None:
    """Put the quantised layer of a tensor in the place of a layer of ours."""
    assert choice.format is not None
    name = choice.name.removesuffix(".weight")
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(name)
    if tuple(packed.shape) != choice.stored_shape or packed.dtype != torch.uint8:
        raise ValueError(
            f"{choice.name} in {choice.format} takes bytes of shape {choice.stored_shape}; "
            f"got {packed.dtype} of shape {tuple(packed.shape)}"
        )
    setattr(model.get_submodule(parent), last, quantized_layer(module, packed, choice.format))
    head, table = model.lm_head, model.token_embeddings
    is_tied = isinstance(head, TiedHead) and head.tied_to[0] is table
    if is_tied and isinstance(table, QuantizedLayer) and not isinstance(head, QuantizedTiedHead):
        model.lm_head = QuantizedTiedHead(table, ops=head.ops)  # type: ignore[arg-type]


def make_room(model: TransformerLM, choices: Sequence[Choice]) -> None:
    """Replace layers by quantised ones without values, where `choices` say so."""
    for choice in choices:
        if choice.format is not None:
            shape, device = choice.stored_shape, model.token_embeddings.weight.device
            replace_layer(model, choice, torch.empty(shape, dtype=torch.uint8, device=device))


@torch.no_grad()
def fill(
    model: TransformerLM, choices: Sequence[Choice], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy tensors into a model that has room for them; wide ones are quantised on the way."""
    plain = {choice.name: choice for choice in choices}
    stored = {choice.stored_name: choice for choice in choices}
    for name, tensor in tensors:
        choice = stored.get(name) or plain[name]
        module = model.get_submodule(choice.name.rpartition(".")[0])
        if isinstance(module, QuantizedLayer) and choice.format is not None:
            module.fill(tensor if name == choice.stored_name else packed_as(choice, tensor))
        else:
            getattr(module, choice.name.rpartition(".")[2]).copy_(tensor)


def recompute_matrices(model: nn.Module) -> None:
    """Let a backward pass compute every matrix again: kept, they would take what bytes save."""
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.recomputes = True
            row = module.packed.flatten(0, -2)[:1]
            dequantize(row, module.format)  # before a step is recorded, what it reads is there


@torch.no_grad()
def round_weights(state: Mapping[str, Tensor], choices: Sequence[Choice]) -> None:
    """Give wide weights, in place, the values that are left of them where they are quantised."""
    for choice in choices:
        if choice.format is not None:
            weight = state[choice.name]
            rows = packed_as(choice, weight).flatten(0, -2)
            weight.copy_(dequantize(rows, choice.format).view(weight.shape))


def packed_as(choice: Choice, weight: Tensor) -> Tensor:
    """Return the bytes of a matrix, or of the matrices of experts."""
    assert choice.format is not None
    try:
        return quantize(weight.flatten(0, -2), choice.format).view(choice.stored_shape)
    except ValueError as error:
        raise ScratchLMError(f"{choice.name}: {error}") from None


def quantized_buffers(model: nn.Module) -> list[Tensor]:
    """Return the bytes of a model's quantised layers, in their layout."""
    return [module.stored for module in model.modules() if isinstance(module, QuantizedLayer)]


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights, quantised or not."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *quantized_buffers(model)))
