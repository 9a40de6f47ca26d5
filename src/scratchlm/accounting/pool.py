"""The pool of an engine: the bytes of a page of keys and values, and the pages of a budget."""

from __future__ import annotations

from scratchlm.accounting.memory import kv_cache_bytes
from scratchlm.config import ModelConfig

PAGE_SIZE = 64  # tokens, unless said


def bytes_per_page(config: ModelConfig, page_size: int, bytes_per_number: int) -> int:
    """Return the bytes of a page: keys and values of every layer for `page_size` tokens."""
    layers, heads, width = config.num_layers, config.num_kv_heads, config.d_head
    env = {"L": layers, "B": 1, "H_kv": heads, "d_h": width, "b_kv": bytes_per_number}
    return round(kv_cache_bytes().value({**env, "C": page_size - 1}))


def num_pages(config: ModelConfig, memory: int, page_size: int, bytes_per_number: int) -> int:
    """Return how many pages a budget of bytes holds; none is an error."""
    page = bytes_per_page(config, page_size, bytes_per_number)
    if memory < page:
        raise ValueError(f"memory must hold at least one page of {page} bytes; got memory={memory}")
    return memory // page
