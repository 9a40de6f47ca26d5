"""Beam search: keep the `num_beams` likeliest beginnings, and extend each by every token.

    score = log p(tokens | prompt) / (number of tokens)^length_penalty

A beginning whose next token ends it is finished and leaves the search. Of all candidates of a step
only the first `num_beams` may finish; the rest are there to go on in their place. The search ends

- `early_stopping=True`: as soon as `num_beams` are finished;
- `False`: when the best beginning, scored at its present length, is no better than the worst of
  `num_beams` finished ones;
- `"never"`: when not even its best possible length could make it better.

These are the rules of transformers' beam search, whose results it gives token for token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inference.decoding import decode_one_token, prefill
from scratchlm.inference.prompts import AnyTokenizer, Prompts, default_eos_ids, prompt_rows
from scratchlm.inference.requests import room_for
from scratchlm.inference.rows import FinishReason
from scratchlm.model import TransformerLM

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beam:
    """A finished continuation; `token_ids` include the end token, `text` does not."""

    token_ids: list[int]
    text: str
    score: float
    logprob: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class _Beginning:
    ids: tuple[int, ...]
    logprob: float
    parent: int  # the row of the step before that it extends


@torch.inference_mode()
def beam_search(
    model: TransformerLM,
    prompt: Prompts,
    *,
    tokenizer: AnyTokenizer | None = None,
    num_beams: int = 4,
    max_new_tokens: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    eos_ids: Collection[int] | None = None,
) -> list[Beam]:
    """Return the likeliest continuations of one prompt, up to `num_beams`, best first."""
    rows = prompt_rows(prompt, tokenizer, model.config.vocab_size)
    if len(rows) != 1:
        raise ValueError(f"beam search takes one prompt at a time; got {len(rows)}")
    if num_beams < 1:
        raise ValueError(f"num_beams must be at least 1; got num_beams={num_beams}")
    if early_stopping not in (True, False, "never"):
        raise ValueError(
            f"early_stopping must be True, False or 'never'; got early_stopping={early_stopping!r}"
        )
    [limit] = room_for(rows, max_new_tokens, model.config.context_length, "error")
    ends = frozenset(default_eos_ids(tokenizer) if eos_ids is None else eos_ids)

    cache = model.new_cache(1, len(rows[0]) + limit)
    logits = prefill(model, rows, cache)
    running, finished = [_Beginning((), 0.0, 0)], list[tuple[float, _Beginning]]()
    for length in range(1, limit + 1):
        candidates = _extend(logits, running, max(2, 1 + len(ends)) * num_beams)
        done = [c.ids[-1] in ends or length == limit for c in candidates]
        finished += [
            (candidate.logprob / length**length_penalty, candidate)
            for candidate, is_done in zip(candidates[:num_beams], done, strict=False)
            if is_done
        ]
        finished = sorted(finished, key=lambda beam: -beam[0])[:num_beams]
        running = [c for c, is_done in zip(candidates, done, strict=True) if not is_done]
        running = running[:num_beams]
        if not running or _settled(
            finished, running[0].logprob, num_beams, length, limit, length_penalty, early_stopping
        ):
            break
        parents = torch.tensor([beginning.parent for beginning in running])
        cache.select_rows(parents.to(cache.keys.device))
        logits = decode_one_token(model, [beginning.ids[-1] for beginning in running], cache)
    return [_as_beam(score, beam, ends, tokenizer) for score, beam in finished]


def _extend(
    logits: Float[Tensor, "beams vocab"], running: list[_Beginning], how_many: int
) -> list[_Beginning]:
    """Return the likeliest beginnings that are one token longer, best first."""
    so_far = torch.tensor([b.logprob for b in running], dtype=torch.float64, device=logits.device)
    total = (logits.double().log_softmax(dim=-1) + so_far[:, None]).flatten()
    values, index = (part.tolist() for part in total.topk(min(how_many, len(total))))
    vocab_size = logits.shape[-1]
    return [
        _Beginning((*running[i // vocab_size].ids, i % vocab_size), value, i // vocab_size)
        for value, i in zip(values, index, strict=True)
    ]


def _settled(
    finished: list[tuple[float, _Beginning]],
    best_running: float,
    num_beams: int,
    length: int,
    limit: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> bool:
    if len(finished) < num_beams:
        return False
    if early_stopping is True:
        return True
    hoped = limit if early_stopping == "never" and length_penalty > 0 else length
    return best_running / hoped**length_penalty <= finished[-1][0]


def _as_beam(
    score: float, beam: _Beginning, ends: frozenset[int], tokenizer: AnyTokenizer | None
) -> Beam:
    ended = beam.ids[-1] in ends
    words = beam.ids[:-1] if ended else beam.ids
    text = "" if tokenizer is None else tokenizer.decode(words)
    return Beam(list(beam.ids), text, score, beam.logprob, "end" if ended else "length")
