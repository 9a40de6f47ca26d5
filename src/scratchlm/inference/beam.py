"""Beam search: keep the `num_beams` most likely hypotheses, and extend each by every token.

    score = log p(tokens | prompt) / (number of tokens)^length_penalty

A hypothesis whose next token is an end token is finished and leaves the search. Of all candidates
of a step only the first `num_beams` may finish; the rest replace them. The search ends

- `early_stopping=True`: as soon as `num_beams` are finished;
- `False`: when the best hypothesis, scored at its current length, is no better than the worst of
  `num_beams` finished ones;
- `"never"`: when not even its best possible length could make it better.

These are the rules of transformers' beam search; the results match it token for token.
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
from scratchlm.inference.requests import generation_limits
from scratchlm.inference.rows import FinishReason, push_token
from scratchlm.model import TransformerLM

EarlyStopping = bool | Literal["never"]
MAX_BEAMS, MAX_PENALTY = 4096, 30


@dataclass(frozen=True)
class Beam:
    """A finished continuation; `token_ids` include the end token, `text` does not."""

    token_ids: list[int]
    text: str
    score: float
    logprob: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class _Hypothesis:
    ids: tuple[int, ...]
    logprob: float
    parent: int  # row of the previous step that it extends


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
    """Return the most likely continuations of one prompt, up to `num_beams`, best first."""
    rows = prompt_rows(prompt, tokenizer, model.config.vocab_size)
    if len(rows) != 1:
        raise ValueError(f"beam search takes one prompt at a time; got {len(rows)}")
    if num_beams < 1:
        raise ValueError(f"num_beams must be at least 1; got num_beams={num_beams}")
    if num_beams > MAX_BEAMS:
        raise ValueError(f"num_beams must not exceed {MAX_BEAMS:,}; got num_beams={num_beams:,}")
    if not abs(length_penalty) <= MAX_PENALTY:  # length^penalty must stay a number
        raise ValueError(
            f"length_penalty must lie in [-{MAX_PENALTY}, {MAX_PENALTY}]; got {length_penalty}"
        )
    if early_stopping not in (True, False, "never"):
        raise ValueError(
            f"early_stopping must be True, False or 'never'; got early_stopping={early_stopping!r}"
        )
    [limit] = generation_limits(rows, max_new_tokens, model.config.context_length, "error")
    eos = frozenset(default_eos_ids(tokenizer) if eos_ids is None else eos_ids)

    cache = model.new_cache(1, len(rows[0]) + limit)
    logits = prefill(model, rows, cache)
    running, finished = [_Hypothesis((), 0.0, 0)], list[tuple[float, _Hypothesis]]()
    for length in range(1, limit + 1):
        candidates = _extend(logits, running, max(2, 1 + len(eos)) * num_beams)
        done = [c.ids[-1] in eos or length == limit for c in candidates]
        finished += [
            (candidate.logprob / length**length_penalty, candidate)
            for candidate, is_done in zip(candidates[:num_beams], done, strict=False)
            if is_done
        ]
        finished = sorted(finished, key=lambda beam: -beam[0])[:num_beams]
        running = [c for c, is_done in zip(candidates, done, strict=True) if not is_done]
        running = running[:num_beams]
        if not running or _is_done(
            finished, running[0].logprob, num_beams, length, limit, length_penalty, early_stopping
        ):
            break
        parents = torch.tensor([hypothesis.parent for hypothesis in running])
        cache.select_rows(parents.to(cache.keys.device))
        logits = decode_one_token(model, [hypothesis.ids[-1] for hypothesis in running], cache)
    return [_as_beam(score, beam, eos, tokenizer) for score, beam in finished]


def _extend(
    logits: Float[Tensor, "beams vocab"], running: list[_Hypothesis], count: int
) -> list[_Hypothesis]:
    """Return the most likely hypotheses one token longer, best first."""
    prefix_logprobs = torch.tensor(
        [b.logprob for b in running], dtype=torch.float64, device=logits.device
    )
    total = (logits.double().log_softmax(dim=-1) + prefix_logprobs[:, None]).flatten()
    values, index = (part.tolist() for part in total.topk(min(count, len(total))))
    vocab_size = logits.shape[-1]
    return [
        _Hypothesis((*running[i // vocab_size].ids, i % vocab_size), value, i // vocab_size)
        for value, i in zip(values, index, strict=True)
    ]


def _is_done(
    finished: list[tuple[float, _Hypothesis]],
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
    scored_length = limit if early_stopping == "never" and length_penalty > 0 else length
    return best_running / scored_length**length_penalty <= finished[-1][0]


def _as_beam(
    score: float, beam: _Hypothesis, eos: frozenset[int], tokenizer: AnyTokenizer | None
) -> Beam:
    ended = beam.ids[-1] in eos
    text_ids = beam.ids[:-1] if ended else beam.ids
    decoder = None if tokenizer is None else tokenizer.stream_decoder()
    text = "".join(push_token(decoder, token) for token in text_ids)
    text += "" if decoder is None else decoder.finish()
    return Beam(list(beam.ids), text, score, beam.logprob, "end" if ended else "length")
