"""The likeliest next tokens, with their probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from scratchlm.inference.decoding import prefill
from scratchlm.inference.prompts import AnyTokenizer, Prompts, prompt_rows
from scratchlm.inference.rows import UNKNOWN
from scratchlm.inference.sampling import MIN_TEMPERATURE
from scratchlm.model import TransformerLM


@dataclass(frozen=True)
class Candidate:
    """A candidate for the next token."""

    token_id: int
    text: str
    probability: float


@torch.inference_mode()
def next_tokens(
    model: TransformerLM,
    prompt: Prompts,
    *,
    tokenizer: AnyTokenizer | None = None,
    best: int = 10,
    temperature: float = 1.0,
) -> list[Candidate]:
    """Return the most likely next tokens after one prompt, with softmax(logits / temperature)."""
    rows = prompt_rows(prompt, tokenizer, model.config.vocab_size)
    if len(rows) != 1:
        raise ValueError(f"next tokens are shown for one prompt at a time; got {len(rows)}")
    if not 1 <= best <= model.config.vocab_size:
        raise ValueError(f"best must lie in [1, {model.config.vocab_size}]; got {best}")
    if not (temperature >= MIN_TEMPERATURE and math.isfinite(temperature)):
        raise ValueError(
            f"temperature must be finite and at least {MIN_TEMPERATURE:g}; got {temperature}"
        )
    if len(rows[0]) > model.config.context_length:
        raise ValueError(
            f"the prompt must not exceed context_length={model.config.context_length}; "
            f"got {len(rows[0])} tokens"
        )
    logits = prefill(model, rows)[0].double()
    probability, ids = ((logits / temperature).softmax(dim=-1)).topk(best)
    return [
        Candidate(token, token_text(tokenizer, token), p)
        for token, p in zip(ids.tolist(), probability.tolist(), strict=True)
    ]


def token_text(tokenizer: AnyTokenizer | None, token: int) -> str:
    """Return a token's text; bytes that are no whole character, and unknown ids, as U+FFFD."""
    if tokenizer is None:
        return ""
    try:
        return tokenizer.decode([token])
    except ValueError:
        return UNKNOWN
