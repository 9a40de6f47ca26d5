"""Generation: prefill, then one token at a time.

    logits = prefill(model, prompts, cache)               the prompts, all at once
    token  = sample(logits, …)
    logits = decode_one_token(model, token, cache)        again and again

`stream` is this loop, for a batch of prompts of any lengths, giving every token out as it is
chosen; `generate` collects what it gives.

Past the context. A model sees at most `context_length` = C tokens. With `past_context="error"`
(the default) a request that would not fit is refused before anything is computed. With "slide" the
model forgets: whenever the C tokens are full it goes on with the newer half of them, read anew
from position 0. What a row of n tokens sees is a function of n alone (`window_start`), so that the
cache, and the rows beside it, change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm import acceleration
from scratchlm.inference.prompts import AnyTokenizer, Prompts
from scratchlm.inference.requests import PastContext, check_num_logprobs, make_rows
from scratchlm.inference.rows import Generation, Piece, Row, TokenLogprob
from scratchlm.inference.sampling import AS_IS, Sampling, Seen, sample, uniform
from scratchlm.model import KVCache, TransformerLM
from scratchlm.threads import share_cores

if TYPE_CHECKING:
    from scratchlm.accelerate.decoding import Decoder

# On a GPU a decoder records a CUDA graph, which costs about as much as this many plain steps.
WORTH_RECORDING = 16
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


def window_start(length: int, context_length: int) -> int:
    """Return the first token that a row of `length` tokens still sees."""
    if length <= context_length:
        return 0
    stride = max(context_length // 2, 1)
    return -(-(length - context_length) // stride) * stride


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
    if model.token_embeddings.weight.device.type == "cpu":
        share_cores()
    return _run(model, rows, num_logprobs, use_cache, accelerate)


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
    model: TransformerLM,
    rows: list[Row],
    num_logprobs: int | None,
    use_cache: bool,
    accelerate: bool,
) -> Iterator[Piece]:
    reader = _Reader(model, rows, use_cache, accelerate)
    seen = None
    if any(row.sampling.penalizes for row in rows):
        prompts = [row.ids for row in rows]
        weight = model.token_embeddings.weight
        seen = Seen.of(prompts, model.config.vocab_size, weight.device)
    while rows:
        logits = reader.read(rows)
        tokens = choose(logits, rows, seen)
        logprobs = _logprobs(logits, tokens, num_logprobs)
        if seen is not None:
            seen.add(tokens)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            yield row.take(token, logprob)
        going = [i for i, row in enumerate(rows) if row.finish_reason is None]
        if len(going) < len(rows):
            rows = [rows[i] for i in going]
            if rows:
                reader.keep(going)
                seen = None if seen is None else seen.rows(going)


class _Reader:
    """Bring the model up to date with rows that grow, reading only what is new."""

    def __init__(
        self, model: TransformerLM, rows: Sequence[Row], use_cache: bool, accelerate: bool
    ) -> None:
        self.model, self.context = model, model.config.context_length
        self.cache: KVCache | None = None
        self.starts: list[int] | None = None  # of the windows the cache holds
        self.decoder: Decoder | None = None
        on_cpu = model.token_embeddings.weight.device.type == "cpu"
        longest = max(row.limit for row in rows)
        self.may_decode = accelerate and (on_cpu or longest >= WORTH_RECORDING)
        # A recording is for one set of rows. Once rows have begun to end, more may soon follow.
        self.plain_steps, self.patience = 0, 0
        self.patience_after_an_end = 0 if on_cpu else WORTH_RECORDING
        if use_cache:
            capacity = max(row.num_prompt + row.limit for row in rows)
            with torch.inference_mode():
                self.cache = model.new_cache(len(rows), min(capacity, self.context))

    def read(self, rows: Sequence[Row]) -> Float[Tensor, "batch vocab"]:
        """Return the logits after every row's last token."""
        starts = [window_start(len(row.ids), self.context) for row in rows]
        if self.cache is not None and starts == self.starts:
            return self._decode([row.ids[-1] for row in rows], self.cache)
        self.starts = starts
        if self.cache is not None:
            self.cache.reset()
        windows = [row.ids[start:] for row, start in zip(rows, starts, strict=True)]
        return prefill(self.model, windows, self.cache)

    def _decode(self, tokens: list[int], cache: KVCache) -> Float[Tensor, "batch vocab"]:
        """Read one token of every row, by a decoder where there is one and it pays."""
        if self.decoder is None and self.may_decode and self.plain_steps >= self.patience:
            with torch.inference_mode():
                self.decoder = acceleration.make_decoder(self.model, cache)
            self.may_decode = self.decoder is not None
        if self.decoder is not None:
            return self.decoder.step(tokens)
        self.plain_steps += 1
        return decode_one_token(self.model, tokens, cache)

    @torch.inference_mode()
    def keep(self, going: list[int]) -> None:
        """Forget the rows that have ended."""
        if self.cache is not None and self.starts is not None:
            self.cache.select_rows(torch.tensor(going, device=self.cache.keys.device))
            self.starts = [self.starts[i] for i in going]
            self.decoder, self.plain_steps = None, 0
            self.patience = self.patience_after_an_end


@torch.inference_mode()
def choose(
    logits: Float[Tensor, "batch vocab"], rows: Sequence[Row], seen: Seen | None
) -> list[int]:
    """Choose every row's next token, by its own sampling and its own seed."""
    first = rows[0].sampling
    numbers = [uniform(row.seed, row.step) for row in rows]
    if all(row.sampling is first or row.sampling == first for row in rows):
        return sample(logits, first, numbers, seen)
    tokens = []
    for i, row in enumerate(rows):
        told = None if seen is None else seen.rows([i])
        tokens += sample(logits[i : i + 1], row.sampling, numbers[i : i + 1], told)
    return tokens


@torch.inference_mode()
def _logprobs(
    logits: Float[Tensor, "batch vocab"], tokens: Sequence[int], best: int | None
) -> Sequence[TokenLogprob | None]:
    if best is None:
        return [None] * len(tokens)
    table = logits.double().log_softmax(dim=-1)
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in table.topk(best, dim=-1))
    return [
        TokenLogprob(token, logprob, tuple(zip(row_ids, row_values, strict=True)))
        for token, logprob, row_ids, row_values in zip(tokens, chosen, ids, values, strict=True)
    ]
