"""One row of a batch during generation: its tokens, its text so far, its finish reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scratchlm.inference.prompts import AnyTokenizer
from scratchlm.inference.sampling import Sampling
from scratchlm.inference.stopping import StopStrings
from scratchlm.tokenizer import StreamDecoder

FinishReason = Literal["end", "stop", "length"]
UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class TokenLogprob:
    """The natural log-probability of a chosen token, and those of the top candidates.

    Under the model's raw distribution: before temperature, penalties and filters.
    """

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """One step of one row: a token, and the text that is now final (possibly none)."""

    row: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class ScoredTokens:
    """Some of a row's tokens that were there, and not chosen: lists of the same length."""

    row: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    best_ids: Sequence[Sequence[int]]
    best_logprobs: Sequence[Sequence[float]]
    finish_reason: FinishReason | None

    @property
    def best(self) -> Iterator[tuple[tuple[int, float], ...]]:
        """The best tokens at each place, with their log-probabilities."""
        for ids, values in zip(self.best_ids, self.best_logprobs, strict=True):
            yield tuple(zip(ids, values, strict=True))

    def pieces(self) -> Iterator[Piece]:
        """Take them one by one."""
        last = len(self.token_ids) - 1
        columns = zip(self.token_ids, self.logprobs, self.best, strict=True)
        for i, (token, logprob, best) in enumerate(columns):
            reason = self.finish_reason if i == last else None
            yield Piece(self.row, token, "", TokenLogprob(token, logprob, best), reason)


@dataclass
class Generation:
    """The continuation of one prompt.

    `token_ids` are all the tokens chosen, the end token included. `text` ends before the end token
    and before a stop string. `finish_reason`: "end" (an end token), "stop" (a stop string),
    "length" (`max_new_tokens`, or the context is full).
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        """Append the next piece."""
        self.token_ids.append(piece.token_id)
        self.text += piece.text
        self.finish_reason = piece.finish_reason
        if piece.logprob is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.append(piece.logprob)


class Row:
    """A prompt, its sampling settings, and its continuation so far."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        *,
        limit: int,
        seed: int,
        sampling: Sampling,
        tokenizer: AnyTokenizer | None,
        stop: Sequence[str],
        eos_ids: Collection[int],
    ) -> None:
        self.index, self.ids = index, list(prompt)
        self.num_prompt, self.limit = len(self.ids), limit
        self.seed, self.sampling = seed, sampling
        self.finish_reason: FinishReason | None = None
        self.targets: Sequence[int] = ()  # of a row that is scored: what is still to be
        self._eos_ids = frozenset(eos_ids)
        self._stop = StopStrings(stop)
        self._decoder = None if tokenizer is None else tokenizer.stream_decoder()

    @property
    def step(self) -> int:
        """The number of tokens generated so far."""
        return len(self.ids) - self.num_prompt

    def take(self, token: int, logprob: TokenLogprob | None) -> Piece:
        """Append a token; return it with the text that is now final."""
        self.ids.append(token)
        ended = token in self._eos_ids
        text = "" if ended else self._stop.push(push_token(self._decoder, token))
        full = self.step >= self.limit
        if (ended or full) and self._stop.found is None:
            text += self._stop.push("" if self._decoder is None else self._decoder.finish())
            text += self._stop.finish()
        if ended:
            self.finish_reason = "end"
        elif self._stop.found is not None:
            self.finish_reason = "stop"
        elif full:
            self.finish_reason = "length"
        return Piece(self.index, token, text, logprob, self.finish_reason)


def push_token(decoder: StreamDecoder | None, token: int) -> str:
    """Decode one more token; an id that stands for none as U+FFFD, without a tokenizer nothing."""
    if decoder is None:
        return ""
    try:
        return decoder.push(token)
    except ValueError:  # a model's vocabulary may be padded beyond its tokenizer's
        return decoder.finish() + UNKNOWN
