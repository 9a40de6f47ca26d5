"""The memory of an engine's pool: how many pages, of which dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scratchlm.accounting.pool import SCALE, bytes_per_page, pages_in
from scratchlm.model import TransformerLM
from scratchlm.paged import DTYPES, KVDtype, PagedCache


def check_kv_dtype(kv_dtype: KVDtype | None, device: torch.device, accelerate: bool) -> None:
    """Refuse codes of 8 bits where nothing reads them."""
    if kv_dtype is not None and kv_dtype not in DTYPES:
        raise ValueError(f"kv_dtype must be one of {', '.join(DTYPES)}; got {kv_dtype!r}")
    if kv_dtype is not None and accelerate and device.type == "cuda":
        raise ValueError(
            f"kv_dtype={kv_dtype!r} is not read by the kernels for a GPU; with accelerate=False "
            "the model's own forward reads it"
        )


def new_cache(
    model: TransformerLM, num_pages: int, page_size: int, kv_dtype: KVDtype | None
) -> PagedCache:
    """Take the memory of a model's pages, where the model is."""
    weight = model.token_embeddings.weight
    return PagedCache(
        model.config_of_cache,
        num_pages,
        page_size,
        device=weight.device,
        dtype=weight.dtype,
        kv_dtype=kv_dtype,
    )


def num_pool_pages(
    models: Sequence[TransformerLM],
    num_pages: int | None,
    memory: int | None,
    page_size: int,
    kv_dtype: KVDtype | None,
) -> int:
    """Return how many pages the pool has: as many as said, or as fit, for all models together."""
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1; got page_size={page_size}")
    if (num_pages is None) == (memory is None):
        raise ValueError(
            "the pool's size must be given as num_pages or as memory in bytes, one of them; "
            f"got num_pages={num_pages}, memory={memory}"
        )
    if memory is not None:
        page = 0
        for model in models:
            size, scale = model.token_embeddings.weight.element_size(), 0
            if kv_dtype is not None:
                size, scale = 1, SCALE
            page += bytes_per_page(model.config_of_cache, page_size, size, scale)
        return pages_in(memory, page)
    assert num_pages is not None
    return num_pages
