"""The arguments of `generate`, checked and turned into one `Row` per prompt."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Literal

import torch.distributed as dist

from scratchlm.config import ModelConfig
from scratchlm.inference.prompts import AnyTokenizer, Prompts, default_eos_ids, prompt_rows
from scratchlm.inference.rows import Row
from scratchlm.inference.sampling import Sampling

PastContext = Literal["error", "slide"]


def make_rows(
    prompts: Prompts,
    config: ModelConfig,
    *,
    tokenizer: AnyTokenizer | None,
    max_new_tokens: int | None,
    sampling: Sampling | Sequence[Sampling],
    stop: str | Sequence[str],
    eos_ids: Collection[int] | None,
    seed: int | Sequence[int] | None,
    past_context: PastContext,
) -> list[Row]:
    """Check every argument and make one row per prompt; arguments as in `decoding.stream`."""
    stop = [stop] if isinstance(stop, str) else list(stop)
    if stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer; got none")
    ids = prompt_rows(prompts, tokenizer, config.vocab_size)
    limits = generation_limits(ids, max_new_tokens, config.context_length, past_context)
    samplings = _per_row(sampling, Sampling, len(ids), "sampling")
    for one in samplings:
        _check_bias(one, config.vocab_size)
    eos_ids = default_eos_ids(tokenizer) if eos_ids is None else eos_ids
    return [
        Row(
            index,
            prompt,
            limit=limit,
            seed=row_seed,
            sampling=row_sampling,
            tokenizer=tokenizer,
            stop=stop,
            eos_ids=eos_ids,
        )
        for index, (prompt, limit, row_seed, row_sampling) in enumerate(
            zip(ids, limits, _seeds(seed, len(ids)), samplings, strict=True)
        )
    ]


def check_num_logprobs(wanted: int | None, vocab_size: int) -> None:
    """Refuse a number of top log-probabilities larger than the vocabulary."""
    if wanted is not None and not 0 <= wanted <= vocab_size:
        raise ValueError(f"num_logprobs must lie in [0, {vocab_size}]; got {wanted}")


def generation_limits(
    prompts: list[list[int]], new: int | None, context: int, past_context: PastContext
) -> list[int]:
    """Return how many tokens each row may generate."""
    if past_context not in ("error", "slide"):
        raise ValueError(f"past_context must be one of error, slide; got {past_context!r}")
    if new is not None and (isinstance(new, bool) or not isinstance(new, int) or new < 1):
        raise ValueError(f"max_new_tokens must be a whole number of at least 1; got {new!r}")
    if past_context == "slide":
        if new is None:
            raise ValueError("max_new_tokens must be given with past_context='slide'; got none")
        return [new] * len(prompts)
    for prompt in prompts:
        if len(prompt) + (new or 1) > context:
            raise ValueError(
                f"prompt and max_new_tokens must fit context_length={context}; got "
                f"{len(prompt)} + {new or 1} tokens (past_context='slide' forgets the oldest)"
            )
    return [new or context - len(prompt) for prompt in prompts]


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    if seed is None:
        if dist.is_available() and dist.is_initialized():
            raise ValueError("several ranks must draw alike: give a seed")
        return [secrets.randbits(63) for _ in range(rows)]
    if isinstance(seed, int):
        return [seed + row for row in range(rows)]
    return _per_row(seed, int, rows, "seed")


def _per_row(given: object, kind: type, rows: int, name: str) -> list:  # type: ignore[type-arg]
    """Return one value for every row, from one for all or one for each."""
    if isinstance(given, kind):
        return [given] * rows
    values = list(given) if isinstance(given, Sequence) else [given]
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must be of type {kind.__name__}; got {value!r:.60}")
    if len(values) != rows:
        raise ValueError(
            f"{name} must be one for all or one for each of {rows} rows; got {len(values)}"
        )
    return values


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    for token in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias must name tokens in [0, {vocab_size}); got {token}")
