"""Generation: prompts of any lengths, continued by the engine.

`stream` gives every token out as it is chosen; `generate` collects what it gives. What the engine
does all at once, for who wants it step by step:

    logits = prefill(model, prompts, cache)               the prompts, all at once
    logits = decode_one_token(model, tokens, cache)       again and again

Past the context. A model sees at most `context_length` = C tokens. With `past_context="error"`
(the default) a request that would not fit is refused before anything is computed. With "slide" the
model forgets: whenever the C tokens are full it goes on with the newer half of them, read anew
from position 0. What a row of n tokens sees is a function of n alone (`scheduler.window_start`), so
that the cache, and the rows beside it, change nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.accounting.pool import PAGE_SIZE
from scratchlm.inference.engine import Engine, MakeRunner
from scratchlm.inference.kept_engine import engine_of
from scratchlm.inference.prompts import AnyTokenizer, Prompts
from scratchlm.inference.requests import PastContext, check_num_logprobs, make_rows
from scratchlm.inference.rows import Generation, Piece, Row
from scratchlm.inference.sampling import AS_IS, Sampling
from scratchlm.inference.speculation import Speculate
from scratchlm.inference.uncached import UncachedRunner
from scratchlm.model import KVCache, TransformerLM
from scratchlm.paged import KVDtype

TOKENS_PER_STEP = 2048
# A CPU reads the weights of a large model once in the time it computes about this many tokens.
TOKENS_PER_READING = 16


@torch.inference_mode()
def prefill(
    model: TransformerLM, rows: Sequence[Sequence[int]], cache: KVCache | None = None
) -> Float[Tensor, "batch vocab"]:
    """Read rows of any lengths, into `cache` if given; return the logits after each row's end."""
    device = model.token_embeddings.weight.device
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    if device.type == "cpu" and sum(padding) > TOKENS_PER_READING * len(rows):
        return _prefill_one_by_one(model, rows, cache)
    ids = torch.tensor([[0] * pad + list(row) for pad, row in zip(padding, rows, strict=True)])
    mask = None
    if any(padding):  # on the left, so that every row ends in the last column
        mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).to(device)
    hidden = model.hidden(ids.to(device), cache=cache, attention_mask=mask)
    return model.lm_head(hidden[:, -1])


def _prefill_one_by_one(
    model: TransformerLM, rows: Sequence[Sequence[int]], cache: KVCache | None
) -> Float[Tensor, "batch vocab"]:
    """Read every row alone: the weights once more for each, and no padding."""
    apart = [None] * len(rows) if cache is None else cache.apart()
    last = [
        model.hidden(torch.tensor([row]), cache=own)[:, -1]
        for row, own in zip(rows, apart, strict=True)
    ]
    if cache is not None:
        cache.rejoin([own for own in apart if own is not None])
    return model.lm_head(torch.cat(last))


@torch.inference_mode()
def decode_one_token(
    model: TransformerLM, tokens: Sequence[int], cache: KVCache
) -> Float[Tensor, "batch vocab"]:
    """Read one more token of every row; return the logits after it."""
    ids = torch.tensor(tokens, device=model.token_embeddings.weight.device)[:, None]
    return model.lm_head(model.hidden(ids, cache=cache)[:, -1])


def stream(
    model: TransformerLM,
    prompts: Prompts,
    *,
    tokenizer: AnyTokenizer | None = None,
    max_new_tokens: int | None = None,
    sampling: Sampling | Sequence[Sampling] = AS_IS,
    stop: str | Sequence[str] = (),
    eos_ids: Collection[int] | None = None,
    seed: int | Sequence[int] | None = None,
    num_logprobs: int | None = None,
    past_context: PastContext = "error",
    draft: TransformerLM | None = None,
    speculate: Speculate | None = None,
    kv_dtype: KVDtype | None = None,
    use_cache: bool = True,
    accelerate: bool = True,
) -> Iterator[Piece]:
    """Continue prompts, giving out every token of every row as it is chosen.

    - `prompts`: a text, texts, token ids, or rows of token ids.
    - `max_new_tokens`: None means until the context is full.
    - `sampling`: for all rows, or one for each.
    - `stop`: strings that end a row; they are not part of its text.
    - `eos_ids`: tokens that end a row; None means the tokenizer's `<|endoftext|>`.
    - `seed`: row i draws with seed + i, or with seed[i]; None means fresh ones.
    - `num_logprobs`: log-probabilities of the chosen token and of the best n (0: none besides).
    - `past_context`: "error" or "slide", see the head of this file.
    - `draft`: a smaller model that proposes tokens; `speculate="lookup"`: the row's own text does.
      Several are then verified at once: the same tokens where greedy, the same distribution.
    - `kv_dtype`: keys and values in 8 bits, "int8" or "fp8"; None: in the weights' dtype.
    - `use_cache=False` computes every step from scratch: the same result, slowly.
    - `accelerate=False` decodes by the model's own forward.
    """
    rows = make_rows(
        prompts,
        model.config,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        eos_ids=eos_ids,
        seed=seed,
        past_context=past_context,
    )
    check_num_logprobs(num_logprobs, model.config.vocab_size)
    if not use_cache:
        _check_uncached(draft, speculate, kv_dtype)
    engine = _engine_for(model, rows, use_cache, accelerate, draft, kv_dtype)
    if (speculate or engine.speculate) != "off" and engine.why_not_verified is not None:
        warnings.warn(f"speculation gains nothing: {engine.why_not_verified}", stacklevel=2)
    return _run(engine, rows, num_logprobs, speculate)


class Options(TypedDict, total=False):
    """The options of `stream`, for those who pass them on."""

    tokenizer: AnyTokenizer | None
    max_new_tokens: int | None
    sampling: Sampling | Sequence[Sampling]
    stop: str | Sequence[str]
    eos_ids: Collection[int] | None
    seed: int | Sequence[int] | None
    num_logprobs: int | None
    past_context: PastContext
    draft: TransformerLM | None
    speculate: Speculate | None
    kv_dtype: KVDtype | None
    use_cache: bool
    accelerate: bool


def generate(
    model: TransformerLM, prompts: Prompts, **options: Unpack[Options]
) -> list[Generation]:
    """Continue prompts and return it all, one `Generation` per prompt; options as in `stream`."""
    done: dict[int, Generation] = {}
    for piece in stream(model, prompts, **options):
        done.setdefault(piece.row, Generation()).add(piece)
    return [done[row] for row in sorted(done)]


def _run(
    engine: Engine, rows: list[Row], num_logprobs: int | None, speculate: Speculate | None
) -> Iterator[Piece]:
    handles = [
        engine.submit_row(row, num_logprobs=num_logprobs, speculate=speculate) for row in rows
    ]
    try:
        while handles:
            engine.step()
            for handle in handles:
                yield from handle.ready()
            handles = [handle for handle in handles if not handle.done]
    finally:
        for handle in handles:
            handle.cancel()


def _check_uncached(
    draft: TransformerLM | None, speculate: Speculate | None, kv_dtype: KVDtype | None
) -> None:
    if draft is not None or speculate not in (None, "off"):
        raise ValueError("speculation needs the cache; got use_cache=False")
    if kv_dtype is not None:
        raise ValueError(f"kv_dtype={kv_dtype!r} needs the cache; got use_cache=False")


def _engine_for(
    model: TransformerLM,
    rows: Sequence[Row],
    use_cache: bool,
    accelerate: bool,
    draft: TransformerLM | None,
    kv_dtype: KVDtype | None,
) -> Engine:
    """Return an engine that has room for all of these rows at once."""
    context = model.config.context_length
    lengths = [min(row.num_prompt + row.limit, context) for row in rows]
    num_pages = sum(-(-length // PAGE_SIZE) for length in lengths)
    usual = use_cache and accelerate and draft is None and kv_dtype is None
    if usual and model.token_embeddings.weight.is_cuda:
        return engine_of(model, num_pages, len(rows))
    make_runner: MakeRunner | None = None
    if not use_cache:
        make_runner = UncachedRunner
    return Engine(
        model,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_rows=len(rows),
        max_tokens_per_step=max(TOKENS_PER_STEP, len(rows)),
        accelerate=accelerate,
        draft=draft,
        kv_dtype=kv_dtype,
        make_runner=make_runner,
    )
