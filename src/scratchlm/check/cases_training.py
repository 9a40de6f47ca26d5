"""The cases of loss, AdamW, schedule, clipping and BPE, smallest first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scratchlm.check.driving import Case, normal
from scratchlm.tokenizer.naive import train_bpe_naive

END = "<|endoftext|>"


def cross_entropy() -> list[Case]:
    """Mean of log Σ exp(logits) − logits[target]."""

    def of(name: str, logits: Tensor, targets: list[Any], **options: Any) -> Case:
        return Case(name, {"inputs": logits, "targets": torch.tensor(targets)}, **options)

    far = torch.tensor([[1000.0, 0.0]]).double()
    return [
        of("one row", normal(1, 2), [1]),
        of("three rows", normal(3, 4), [2, 0, 2]),
        of("a sure and right answer", far, [0], gradients=False),
        of("a sure and wrong answer", far * 0.8 - 800, [1], gradients=False),
        of("large numbers", normal(3, 4) + 1000, [2, 0, 3]),
        of("a batch of sequences", normal(2, 3, 5), [[0, 4, 1], [2, 2, 3]], course=False),
        of("targets of −100", normal(4, 5), [-100, 3, -100, 1], course=False),
    ]


def adamw() -> list[Case]:
    """Parameters after a few steps."""

    def of(name: str, steps: int, eps: float, *shapes: tuple[int, ...], **more: Any) -> Case:
        gradients = [
            [normal(*s, seed=10 * t + i) for i, s in enumerate(shapes)] for t in range(steps)
        ]
        options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": eps, "weight_decay": 0.2, **more}
        words = ", ".join(f"{key} {value}" for key, value in options.items())
        drawn = {"parameters": [normal(*s, seed=5) for s in shapes], "gradients": gradients}
        course = "decays" not in more  # groups with options of their own
        return Case(name, {**options, **drawn}, course=course, given=f"{words}, {steps} steps")

    with_gap = of("a parameter without a gradient", 3, 1e-8, (2,), (2, 2))
    with_gap.arguments["gradients"][1][0] = None
    return [
        of("one number, one step", 1, 1e-8, (1,)),
        of("one number, three steps", 3, 1e-8, (1,)),
        of("no decay", 3, 1e-8, (2,), weight_decay=0.0),
        of("a large ε", 3, 0.5, (3,)),
        of("two parameters", 4, 1e-8, (2, 3), (4,)),
        of("a rate that changes", 3, 1e-8, (2,), factors=[0.5, 1.0, 0.25]),
        of("groups with their own decay", 2, 1e-8, (2,), (3,), decays=[0.5, 0.0]),
        with_gap,
    ]


def schedule() -> list[Case]:
    """Learning rates at all steps."""

    def of(name: str, steps: list[int], *rest: float) -> Case:
        names = ("max_learning_rate", "min_learning_rate", "warmup_iters", "cosine_cycle_iters")
        return Case(name, {"it": steps, **dict(zip(names, rest, strict=True))})

    return [
        of("the warm-up", [0, 1, 2, 3], 1.0, 0.1, 4, 12),
        of("the cosine", [4, 5, 8, 11, 12], 1.0, 0.1, 4, 12),
        of("after the end", [13, 16, 20, 40], 1.0, 0.1, 4, 12),
        of("other numbers", list(range(26)), 0.3, 0.05, 7, 21),
    ]


def clipping() -> list[Case]:
    """Gradients after clipping."""

    def of(name: str, limit: float, gradients: list[Tensor | None], **more: Any) -> Case:
        sizes = [(2,) if g is None else tuple(g.shape) for g in gradients]
        parameters = [normal(*size, seed=3) for size in sizes]
        arguments = {"parameters": parameters, "gradients": gradients, "max_l2_norm": limit}
        course = not more
        return Case(name, {**arguments, **more}, course=course)

    one, two = torch.tensor([3.0, 4.0]).double(), normal(2, 3, scale=3)
    return [
        of("a norm of 5, at most 2", 2.0, [one]),
        of("a norm below the limit", 10.0, [one]),
        of("two gradients", 1.5, [one, two]),
        of("two gradients below the limit", 50.0, [one, two]),
        of("a parameter without a gradient", 1.5, [one, None, two]),
        of("gradients below 1", 0.05, [one / 50, two / 50]),
        of("parameters as a generator", 1.5, [one, two], as_generator=True),
    ]


TEXT = (
    "low low low low low lower lower newest newest newest newest newest newest widest widest "
    f"widest{END}the cat, the hat; aaaa aaaa banana bananas{END}naïve café 12 345 don't they're"
)


def bpe_training() -> list[Case]:
    """Merges learnt from small texts."""

    def of(name: str, text: str, merges: int, special_tokens: list[str]) -> Case:
        size = 256 + merges + len(special_tokens)
        arguments = {"text": text, "vocab_size": size, "special_tokens": special_tokens}
        return Case(name, arguments)

    return [
        of("one pair", "ab ab cd", 1, []),
        of("a tie", "xy ab", 2, []),
        of("a tie between longer tokens", "ab ab ab cab cab zc zc", 3, []),
        of("pairs that overlap", "aaaa aaab", 2, []),
        of("a pair across words", "a b a b a b ab", 2, []),
        of("a special token", f"x{END}y x{END}y x{END}y ab ab ab", 2, [END]),
        of("accents", "é é é è è ê", 3, []),
        of("more merges than pairs", "ab ab", 9, []),
        of("a small text", TEXT, 30, [END]),
    ]


def tokenizer() -> list[Case]:
    """Ids of small texts."""
    twice = END + END
    vocab, merges = train_bpe_naive(TEXT, 256 + 30 + 2, [END, twice])
    pairs = [(b"c", b"d"), (b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]
    order = {i: bytes([i]) for i in range(256)} | {256 + i: a + b for i, (a, b) in enumerate(pairs)}

    def of(name: str, **given: Any) -> Case:
        base = {"vocab": vocab, "merges": merges, "special_tokens": [END, twice]}
        return Case(name, {**base, **given}, given=f"vocab of {len(vocab)}, {len(merges)} merges")

    return [
        of("one word", vocab=order, merges=pairs, special_tokens=[], texts=["bcd", "abc"]),
        of("words", texts=["low lower newest", "the bananas, naïve", "can'the"]),
        of("nothing, and what was never seen", texts=["", "日本 🙂", "  x\n\ny  "]),
        of("special tokens", texts=[f"the{END}cat{END}", f"a{twice}b"]),
        of("pieces of a stream", streams=[["low", " lower", " newest"], [f"the{END}", "cat"]]),
        of("decode", ids=[[*"café".encode()], [256, 257, 286]]),
        of("decode half a character", ids=[[*b"a\xc3"], list(b"\xe6\x97")]),
    ]
