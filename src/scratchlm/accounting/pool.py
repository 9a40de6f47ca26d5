"""The pool of an engine: the bytes of a page of keys and values, and the pages of a budget."""

from __future__ import annotations

from scratchlm.accounting.memory import kv_cache_bytes
from scratchlm.config import ModelConfig

PAGE_SIZE = 64  # tokens, unless said
SCALE = 4  # bytes


def bytes_per_page(
    config: ModelConfig, page_size: int, bytes_per_number: int, bytes_per_scale: int = 0
) -> int:
    """Return the bytes of a page: keys and values of every layer for `page_size` tokens.

    Keys and values of 8 bits have a scale of `SCALE` bytes for every token and head.
    """
    layers, heads, width = config.num_layers, config.num_kv_heads, config.d_head
    env = {"L": layers, "B": 1, "H_kv": heads, "d_h": width, "b_kv": bytes_per_number}
    scales = {**env, "d_h": 1, "b_kv": bytes_per_scale}
    parts = (kv_cache_bytes().value({**one, "C": page_size - 1}) for one in (env, scales))
    return round(sum(parts))


def pages_in(memory: int, page: int) -> int:
    """Return how many pages of so many bytes a budget holds; none is an error."""
    if memory < page:
        raise ValueError(f"memory must hold at least one page of {page} bytes; got memory={memory}")
    return memory // page
