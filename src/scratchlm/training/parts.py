"""One rank's part of a learner: what it writes to a checkpoint, and how it is filled.

Where its numbers lie in the whole tensors is the layout's to say; how many ranks wrote a
checkpoint, or will read it, does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scratchlm.checkpoint import MODEL, TRAINING_STATE, Piece, read_piece, tensor_shapes
from scratchlm.config import ModelConfig
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.parallel.rows import as_rows, local
from scratchlm.training.learner import Learner, load_optimizer

if TYPE_CHECKING:
    from scratchlm.parallel.layout import Layout
    from scratchlm.parallel.tensor import Box

PieceOf = Callable[["Box"], Tensor]


def model_pieces(learner: Learner) -> dict[str, list[Piece]]:
    """Return this rank's part of the weights."""
    layout = _layout(learner)
    return {name: _pieces(layout, name, p.detach()) for name, p in layout.updated.items()}


def training_state_pieces(learner: Learner) -> dict[str, list[Piece]]:
    """Return this rank's part of what else the next step depends on."""
    layout = _layout(learner)
    pieces: dict[str, list[Piece]] = {}
    for optimizer in learner.optimizers:
        for name, p in layout.updated.items():
            for key, value in optimizer.state.get(p, {}).items():
                pieces[f"{key}.{name}"] = _pieces(layout, name, value)
    return pieces


def load_pieces(learner: Learner, path: Path) -> None:
    """Take up this rank's part of a checkpoint, however many ranks wrote it."""
    layout, shapes = _layout(learner), tensor_shapes(path, TRAINING_STATE)
    keys: dict[str, list[str]] = {}
    for full_name in shapes:
        key, _, name = full_name.partition(".")
        keys.setdefault(name, []).append(key)

    def read(stored: str, file: str, box: Box) -> Tensor:
        return read_piece(path, stored, box.offsets, box.lengths, file, learner.device)

    state: dict[str, dict[str, Tensor]] = {}
    for name, p in layout.updated.items():
        _place(layout, name, p.data, partial(read, name, MODEL))
        for key in keys.get(name, ()):
            stored = f"{key}.{name}"
            if shapes[stored]:
                value = torch.zeros_like(p.data)
                _place(layout, name, value, partial(read, stored, TRAINING_STATE))
            else:  # one number
                value = read_piece(path, stored, (), (), TRAINING_STATE, learner.device)
            state.setdefault(name, {})[key] = value
    for optimizer in learner.optimizers:
        load_optimizer(optimizer, layout.updated, state)
    layout.share_weights()


@torch.no_grad()
def fill(learner: Learner, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Take this rank's part of whole weights, which come one after the other."""
    layout = _layout(learner)
    missing = set(layout.updated)
    for name, whole in weights:
        if name in layout.updated:
            _place(layout, name, layout.updated[name].data, partial(_cut, name, whole))
            missing.remove(name)
    if missing:
        raise ScratchLMError(f"the weights lack {', '.join(sorted(missing)[:3])}")
    layout.share_weights()


def first_weights(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights `build_model` gives a model, whole, one module's after the other's.

    What is not kept is gone: nobody needs room for all of them.
    """
    generator, model = torch.Generator().manual_seed(seed), TransformerLM(config, device="meta")
    for place, module in model.named_modules():
        if place and hasattr(module, "reset_parameters"):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters(generator)
            for name, p in module.named_parameters(place, recurse=False):
                yield name, p.detach()
            module.to_empty(device="meta", recurse=False)


def _layout(learner: Learner) -> Layout:
    assert learner.layout is not None, "there are no ranks"
    return learner.layout


def _pieces(layout: Layout, name: str, value: Tensor) -> list[Piece]:
    found = layout.boxes_of(name, value)
    return [Piece(box.shape, box.offsets, tensor.detach()) for box, tensor in found]


def _place(layout: Layout, name: str, value: Tensor, piece_of: PieceOf) -> None:
    """Fill what belongs to this rank's part of a parameter, piece by piece."""
    place, begin = as_rows(local(value)), 0
    for box in layout.wanted(name):
        rows = as_rows(piece_of(box))
        place[begin : begin + len(rows)].copy_(rows)
        begin += len(rows)


def _cut(name: str, whole: Tensor, box: Box) -> Tensor:
    if tuple(whole.shape) != box.shape:
        raise ScratchLMError(f"{name} must have the shape {box.shape}; got {tuple(whole.shape)}")
    return box.of(whole).contiguous()
