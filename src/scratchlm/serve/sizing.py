"""The engine of a server: how much memory its pool of keys and values may take."""

from __future__ import annotations

import os

import torch

from scratchlm.accounting.pool import PAGE_SIZE, bytes_per_page
from scratchlm.inference.engine import Engine
from scratchlm.inference.loading import Loaded

SHARE = {"cuda": 0.8, "cpu": 0.25}  # of free memory, at most, for keys and values


def make_engine(
    loaded: Loaded, *, max_rows: int = 64, memory: int | None = None, exact: bool = False
) -> Engine:
    """Make the engine of a server; its pool holds `max_rows` full contexts, if memory allows."""
    weight = loaded.model.token_embeddings.weight
    page_size = page_size_for(loaded.config.context_length, weight.device)
    if memory is None:
        page = bytes_per_page(loaded.config, page_size, weight.element_size())
        pages = max_rows * -(-loaded.config.context_length // page_size)
        share = SHARE.get(weight.device.type, SHARE["cpu"])
        memory = max(page, min(pages * page, int(free_memory(weight.device) * share)))
    return Engine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        memory=memory,
        page_size=page_size,
        max_rows=max_rows,
        exact=exact,
        accelerate=loaded.accelerate,
    )


def page_size_for(context_length: int, device: torch.device) -> int:
    """Return the tokens of a page: only whole ones are shared, so a short context has short ones.

    On a GPU the kernels are made for pages of one size.
    """
    size = PAGE_SIZE
    while device.type == "cpu" and size > max(8, context_length // 8):
        size //= 2
    return size


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
