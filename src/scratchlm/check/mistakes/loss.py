"""Known mistakes in the cross-entropy and in the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from scratchlm.check.mistakes.table import Table
from scratchlm.ops import reference

LOSS = Table()

# Cross-entropy


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return every target's loss, 0 where it is ignored, and which count."""
    counts = targets != -100
    chosen = logits.gather(-1, targets.masked_fill(~counts, 0)[..., None])[..., 0]
    return (reference.log_sum_exp(logits) - chosen).masked_fill(~counts, 0.0), counts


def _mean(losses: Tensor, counts: Tensor) -> Tensor:
    return losses.masked_fill(~counts, 0.0).sum() / counts.sum().clamp(min=1)


def _at_target(values: Tensor, targets: Tensor) -> Tensor:
    safe = targets.clamp(min=0)
    return _mean(values.gather(-1, safe[..., None])[..., 0], targets != -100)


def _unshifted(logits: Tensor, targets: Tensor) -> Tensor:
    total = logits.exp().sum(-1, keepdim=True).log()
    return _at_target(total - logits, targets)


def _unhandled(logits: Tensor, targets: Tensor) -> Tensor:
    chosen = logits.gather(-1, targets[..., None])[..., 0]  # refuses −100
    return (reference.log_sum_exp(logits) - chosen).mean()


def _over_rows(logits: Tensor, targets: Tensor) -> Tensor:
    x, t = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    x, t = x[t != -100], t[t != -100]
    x = x - x.amax(-1, keepdim=True)
    return _at_target(x.exp().sum(0, keepdim=True).log() - x, t)


def _scaled_mean(factor: Callable[[Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    return lambda x, t: _mean(*_losses(x, t)) * factor(x, t)


def _entropy(name: str, hints: tuple[str, str, str], *functions: Callable[..., Any]) -> None:
    LOSS.add("run_cross_entropy", name, hints, *functions)


_MEAN = "losses[targets != ignore_index].mean()"
_entropy(
    "the sum, not the mean",
    ("Repeat every row: should the loss change?", "It is a mean over the targets.", _MEAN),
    lambda x, t: _losses(x, t)[0].sum(),
)
_entropy(
    "ignored targets count: a mean over padding",
    (
        "By what number is the sum divided?",
        "Targets of −100 are neither in the sum nor in the number.",
        _MEAN,
    ),
    lambda x, t: _losses(x, t)[0].sum() / t.numel(),
)
_entropy(
    "targets of −100 are not left out",
    (
        "What does your function do with a target of −100?",
        "Keep the rows whose target is not ignore_index.",
        "keep = targets != ignore_index",
    ),
    _unhandled,
    lambda x, t: (
        reference.log_sum_exp(x) - x.gather(-1, t.clamp(min=0)[..., None])[..., 0]
    ).mean(),
)
_entropy(
    "the logarithm of a softmax that has become 0",
    (
        "What is log(0)?",
        "Subtract logarithms instead of dividing: log Σ exp(x) − x[target].",
        "x - x.exp().sum(-1, keepdim=True).log(), after the shift",
    ),
    lambda x, t: _at_target(-reference.softmax(x).log(), t),
)
_entropy(
    "the maximum is not subtracted: exp overflows",
    (
        "What is exp(1000)?",
        "log Σ exp(x) = m + log Σ exp(x − m), m the maximum.",
        "x = inputs - inputs.amax(-1, keepdim=True)",
    ),
    _unshifted,
)
LOSS.add(
    "run_cross_entropy",
    "exp overflows without the shift; and the logarithm of a softmax",
    (
        "What is exp(1000)? What is log(0)?",
        "Shift by the maximum, and subtract logarithms instead of dividing.",
        "x - x.exp().sum(-1, keepdim=True).log(), x = inputs - inputs.amax(-1, keepdim=True)",
    ),
    lambda x, t: _at_target(-(x.exp() / x.exp().sum(-1, keepdim=True)).log(), t),
    double=True,
)
_entropy(
    "the sign is turned around",
    ("Is your loss negative?", "−log p is positive.", "log_sum_exp - inputs[target]"),
    _scaled_mean(lambda x, t: -1.0),
)
_entropy(
    "the logarithm to base 2",
    ("In which unit is your loss?", "Nats: the natural logarithm.", "torch.log, not torch.log2"),
    _scaled_mean(lambda x, t: 1 / math.log(2)),
)
_entropy(
    "divided by the vocabulary, too",
    ("By what number is the sum divided?", "By the number of targets alone.", _MEAN),
    _scaled_mean(lambda x, t: 1 / x.shape[-1]),
)
_entropy(
    "the probability, not its logarithm",
    ("What is the loss of a certain answer?", "−log p.", "-log_probability[target].mean()"),
    lambda x, t: -_at_target(reference.softmax(x), t),
    lambda x, t: _at_target(1 - reference.softmax(x), t),
)
_entropy(
    "normalised over the rows, not over the vocabulary",
    ("Which axis holds the vocabulary?", "The last one.", ".sum(-1, keepdim=True)"),
    lambda x, t: _at_target(-reference.log_softmax(x, 0), t),
    _over_rows,
)

# The schedule


def _rate(name: str, hints: tuple[str, str, str], *functions: Callable[..., Any]) -> None:
    LOSS.add("run_get_lr_cosine_schedule", name, hints, *functions)


def _between(share: float, high: float, low: float) -> float:
    return low + share * (high - low)


def _schedule(**knobs: Any) -> Callable[..., float]:
    def rate(it: int, high: float, low: float, warmup: int, cycle: int) -> float:
        if it < warmup:
            return float(knobs.get("warm", lambda high, it, w: high * it / w)(high, it, warmup))
        if it > cycle and not knobs.get("endless"):
            return float(knobs.get("end", low))
        p = knobs.get("progress", lambda it, w, c: (it - w) / (c - w))(it, warmup, cycle)
        shape = knobs.get("shape", lambda p: 0.5 * (1 + math.cos(math.pi * p)))(p)
        return float(knobs.get("mix", _between)(shape, high, low))

    return rate


_COSINE = "min + 0.5 * (1 + math.cos(math.pi * p)) * (max - min)"
_rate(
    "the warm-up counts from 1",
    ("What is the rate at step 0?", "0: the line starts there.", "max * it / warmup"),
    _schedule(warm=lambda high, it, w: high * (it + 1) / w),
    _schedule(warm=lambda high, it, w: high * (it + 1) / (w + 1)),
)
_rate(
    "no warm-up",
    ("What is the rate at step 0?", "It rises linearly to max first.", "if it < warmup_iters: …"),
    _schedule(warm=lambda high, it, w: high),
)
_rate(
    "the cosine counts from step 0, not from the warm-up's end",
    (
        "Is there a jump where the warm-up ends?",
        "p is 0 at the end of the warm-up.",
        "p = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)",
    ),
    _schedule(progress=lambda it, w, c: it / c),
    _schedule(progress=lambda it, w, c: (it - w) / c),
)
_rate(
    "the rate rises again after the end",
    ("What happens after the last step?", "It stays at min.", "if it > cosine_cycle_iters: …"),
    _schedule(endless=True),
)
_rate(
    "0 after the end, not the minimum",
    ("What is the rate after the end?", "It stays at min.", "return min_learning_rate"),
    _schedule(end=0.0),
)
_rate(
    "π is missing",
    ("What is the rate at the end of the cycle?", "cos goes from 1 to −1 over π.", _COSINE),
    _schedule(shape=lambda p: 0.5 * (1 + math.cos(p))),
)
_rate(
    "the factor ½ is missing",
    ("What is the rate where the cosine begins?", "1 + cos runs from 2 to 0.", _COSINE),
    _schedule(shape=lambda p: 1 + math.cos(math.pi * p)),
)
_rate(
    "the minimum is not added",
    ("Does the cosine end at min?", "It falls from max to min.", _COSINE),
    _schedule(mix=lambda s, high, low: s * (high - low)),
    _schedule(mix=lambda s, high, low: s * high),
    _schedule(mix=lambda s, high, low: low + s * high),
)
_rate(
    "linear, not a cosine",
    ("How does the rate fall in the middle?", "Along a cosine.", _COSINE),
    _schedule(shape=lambda p: 1 - p),
)
