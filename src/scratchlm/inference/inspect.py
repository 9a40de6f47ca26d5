"""Inspection: next-token probabilities, and the attention weights of every head."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inference.decoding import prefill
from scratchlm.inference.prompts import AnyTokenizer, Prompts, prompt_rows
from scratchlm.inference.rows import UNKNOWN
from scratchlm.inference.sampling import MIN_TEMPERATURE
from scratchlm.model import MultiHeadSelfAttention, TransformerLM


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


@torch.inference_mode()
def attention_weights(
    model: TransformerLM, token_ids: Sequence[int]
) -> Float[Tensor, "layers heads query key"]:
    """Return softmax(Q Kᵀ / √d_head) of every layer and head for one row of tokens.

    The model is left unchanged: a structural copy that shares its weights runs with an attention
    op that also records the weights, by the formula.
    """
    rows = prompt_rows([list(token_ids)], None, model.config.vocab_size)
    recorded: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        recorded.append(_weights(q, k, mask)[0])
        attn_out: Tensor = model.ops.attention(q, k, v, mask)
        return attn_out

    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    observed = copy.deepcopy(model, shared)
    for module in observed.modules():
        if isinstance(module, MultiHeadSelfAttention):
            module.ops = module.ops.replace(attention=attention)
    prefill(observed, rows)
    return torch.stack(recorded)


def _weights(
    q: Float[Tensor, "batch heads query d"], k: Float[Tensor, "batch kv_heads key d"], mask: Any
) -> Float[Tensor, "batch heads query key"]:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
    visible = mask.table(range(q.shape[-2]), range(k.shape[-2]), q.device)
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
