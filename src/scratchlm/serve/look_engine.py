"""What a token cost, from the account, and what the engine's cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scratchlm.accounting import MACHINES, account
from scratchlm.inference import Engine
from scratchlm.inference.pages import page_keys
from scratchlm.model import TransformerLM

_PAGES_SHOWN = 4096


def precision_of(model: TransformerLM) -> str:
    """Return the account's name for the dtype of the weights."""
    return "fp32" if model.token_embeddings.weight.dtype == torch.float32 else "bf16"


def work_of(model: TransformerLM, at: int, num_prompt: int) -> dict[str, Any]:
    """Return the step that chose the token at place `at`, as the account is asked for it."""
    if not 1 <= at <= model.config.context_length:
        raise ValueError(f"at must lie in [1, {model.config.context_length}]; got {at}")
    length = {"prompt": at} if at <= num_prompt else {"cache": at - 1}
    phase = "prefill" if at <= num_prompt else "decode"
    return {"phase": phase, **length, "precision": precision_of(model)}


def cost(model: TransformerLM, at: int, num_prompt: int, machine: str) -> dict[str, Any]:
    """Return FLOPs, bytes and time of the step that chose the token at place `at`.

    The first token of an answer is chosen by reading the whole prompt; each later one by a step
    over the token before it, with the `at − 1` tokens before that in the cache.
    """
    work = work_of(model, at, num_prompt)
    found = account(model.config, machine=machine, **work)
    assert found.roofline is not None
    flops = found.flops["causal"]
    return {
        **work,
        "machine": found.roofline.machine,
        "machines": list(MACHINES),
        "flops": flops.value,
        "lines": [
            {
                "depth": depth,
                "name": item.name,
                "symbols": item.symbols,
                "numbers": item.numbers,
                "value": item.value,
            }
            for depth, item in flops.walk()
            if depth
        ],
        "parts": [
            {
                "name": part.name,
                "flops": part.flops,
                "bytes": part.bytes,
                "seconds": part.seconds,
                "bound": part.bound,
            }
            for part in found.roofline.parts
        ],
        "bytes": sum(part.bytes for part in found.roofline.parts),
        "seconds": found.roofline.seconds,
    }


def cache(engine: Engine, ids: Sequence[int]) -> dict[str, Any]:
    """Return the pool page by page, and which pages already hold the beginning of these ids."""
    pool, scheduler = engine.pool, engine.scheduler
    found = pool.find(page_keys(ids, scheduler.page_size))
    pages = pool.pages()
    memory, shared = engine.cache, set(found)
    counts = dict.fromkeys(("shared", "many", "held", "kept", "free"), 0)
    for index, page in enumerate(pages):
        held = "many" if page.holders > 1 else "held" if page.holders else None
        free = "kept" if page.is_found else "free"
        counts["shared" if index in shared else held or free] += 1
    return {
        "page_size": scheduler.page_size,
        "num_pages": pool.num_pages,
        "num_held": pool.num_held,
        "num_free": pool.num_free,
        "bytes_per_page": (memory.keys.nbytes + memory.values.nbytes) // pool.num_pages,
        "counts": counts,
        "pages": [[page.holders, page.is_found] for page in pages[:_PAGES_SHOWN]],
        "running": [
            {"pages": list(request.pages), "length": request.length}
            for request in list(scheduler.running)
        ],
        "waiting": len(scheduler.waiting),
        "tokens_found": scheduler.num_found,
        "put_back": scheduler.num_put_back,
        "shared": {"pages": found, "tokens": len(found) * scheduler.page_size},
    }
