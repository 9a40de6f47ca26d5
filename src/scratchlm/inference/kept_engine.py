"""The engine of a model on a GPU, kept from one call of `generate` to the next.

What a call would make anew, the pool and the recordings of whole steps, costs as much as some
hundred tokens. The engine lives as long as its model: it is given a copy of the model's outermost
object, which shares all that is in it, so that nothing kept here keeps the model alive.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch

from scratchlm.inference.engine import Engine
from scratchlm.model import TransformerLM

PAGE_SIZE = 64
SHARE = 0.05  # of the device's memory: a larger pool goes with the call that needed it
_kept: WeakKeyDictionary[TransformerLM, tuple[Any, Engine]] = WeakKeyDictionary()


def engine_of(model: TransformerLM, num_pages: int, max_rows: int) -> Engine:
    """Return the model's engine, or a new one where it is too small or the model has changed."""
    signature, (old_signature, engine) = _signature(model), _kept.get(model, (None, None))
    if engine is not None and old_signature == signature:
        if engine.pool.num_pages >= num_pages and engine.max_rows >= max_rows:
            engine.forget_prefixes()  # weights may have changed in place
            return engine
        num_pages = max(num_pages, min(2 * num_pages, 2 * engine.pool.num_pages))
        max_rows = max(max_rows, engine.max_rows)
    engine = Engine(
        copy.copy(model),
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_rows=max_rows,
    )
    memory = torch.cuda.get_device_properties(engine.device).total_memory
    if engine.cache.keys.nbytes + engine.cache.values.nbytes <= SHARE * memory:
        _kept[model] = signature, engine
        finalize(model, _empty, ref(engine))
    return engine


def _empty(gone: ref[Engine]) -> None:
    """Let go of the pool and the weights at once: an engine and its scheduler hold each other."""
    engine = gone()
    if engine is not None:
        vars(engine).clear()


def _signature(model: TransformerLM) -> Any:
    """Return what a copy of the outermost object does not see change."""
    weight = model.token_embeddings.weight
    own = tuple((name, id(value)) for name, value in vars(model).items() if name != "training")
    return type(model), weight.device, weight.dtype, own
