"""The workload of a phase: tokens through the matrices, and query-key pairs of attention.

Every phase is three formulas; the FLOPs of any model follow from them:

    rows         tokens that pass through every layer's matrices
    logit_rows   tokens that pass through the LM head
    pairs        query-key products, per layer and head

`full` counts a naive forward pass: every query with every key, logits at every position.
`causal` counts only what is needed: keys a query may attend to, logits that are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scratchlm.accounting.expr import Expr, Number, Sym, least
from scratchlm.accounting.symbols import A, B, C, M, P, S, T, W
from scratchlm.config import ModelConfig

PHASES = ("forward", "training", "prefill", "decode", "generation", "generation-no-cache")


@dataclass(frozen=True)
class Work:
    """The formulas of a phase; `where` defines their derived symbols."""

    phase: str
    rows: Expr
    logit_rows: Expr
    pairs: Expr
    where: tuple[tuple[str, Expr], ...] = ()


def triangle(n: Expr) -> Expr:
    """Return 1 + 2 + … + n: pairs of a causal sequence of n."""
    return n * (n + 1) / 2


def causal_pairs(n: Expr, window: bool) -> Expr:
    """Return the query-key pairs of a causal sequence of n, under the window if there is one."""
    if not window:
        return triangle(n)
    w = least(n, W)
    return triangle(w) + (n - w) * w


def work(config: ModelConfig, phase: str, causal: bool, packed: bool = False) -> Work:
    """Return a phase's formulas; `causal` counts only what is needed."""
    window = config.attention.sliding_window is not None
    if phase in ("forward", "training"):  # B sequences of S tokens
        if not causal:
            return Work(phase, B * S, B * S, B * S**2)
        if packed:  # A is bound by the caller, from the documents' lengths
            return Work(phase, B * S, B * S, B * A)
        return _with_pairs(phase, B * S, B * S, causal_pairs(S, window), window)
    if phase == "prefill":  # B prompts of P tokens into an empty cache
        if not causal:
            return Work(phase, B * P, B * P, B * P**2)
        return _with_pairs(phase, B * P, B, causal_pairs(P, window), window)
    if phase == "decode":  # one token for each of B sequences, C tokens cached
        keys = least(C + 1, W) if window and causal else C + 1
        return Work(phase, B, B, B * keys)
    if phase == "generation":
        return _generation(causal, window)
    if phase == "generation-no-cache":
        return _generation_without_cache(causal, window)
    raise ValueError(f"phase must be one of {', '.join(PHASES)}; got {phase!r}")


def _with_pairs(phase: str, rows: Expr, logit_rows: Expr, pairs: Expr, long: bool) -> Work:
    """Write the pairs out where that is short, else define A."""
    if not long:
        return Work(phase, rows, logit_rows, B * pairs)
    return Work(phase, rows, logit_rows, B * A, (("A", pairs),))


def _generation(causal: bool, window: bool) -> Work:
    """T tokens after P: a prefill, which gives the first, and T − 1 decode steps."""
    window = window and causal
    pairs = causal_pairs(M, window)
    if not causal:
        pairs = P**2 + pairs - triangle(P)  # the prompt S×S, then a row of keys per step
    logit_rows = B * T if causal else B * M
    return Work("generation", B * M, logit_rows, B * A, (("M", P + T - 1), ("A", pairs)))


def _generation_without_cache(causal: bool, window: bool) -> Work:
    """T tokens after P: T forward passes over P, P + 1, …, P + T − 1 tokens."""
    window = window and causal
    last = Sym("n")
    if causal:
        pairs = _summed_pairs(last, window) - _summed_pairs(P - 1, window)
    else:
        pairs = _squares(last) - _squares(P - 1)
    rows = triangle(last) - triangle(P - 1)
    logit_rows = B * T if causal else B * M
    where = (("n", P + T - 1), ("M", rows), ("A", pairs))
    return Work("generation-no-cache", B * M, logit_rows, B * A, where)


def _squares(n: Expr) -> Expr:
    """Return 1² + 2² + … + n²."""
    return n * (n + 1) * (2 * n + 1) / 6


def _summed_pairs(n: Expr, window: bool) -> Expr:
    """Return causal_pairs(1) + causal_pairs(2) + … + causal_pairs(n)."""
    if not window:
        return n * (n + 1) * (n + 2) / 6
    w = least(n, W)
    grown = w * (w + 1) * (w + 2) / 6
    return grown + (n - w) * triangle(w) + w * triangle(n - w)


def document_pairs(lengths: Sequence[int], window: int | None) -> Number:
    """Count the pairs of documents packed into one sequence: the value of A."""
    pairs = 0
    for n in lengths:
        w = min(n, window or n)
        pairs += w * (w + 1) // 2 + (n - w) * w
    return pairs
