"""The cases each function is tried on, smallest first: shapes, extremes, dtypes, masks, batches.

Sizes differ from each other and numbers are of the order of 1, so that a known mistake leaves the
definition, and every other mistake, by far more than rounding. `course=False` marks what the CS336
course does not ask of its adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scratchlm.check.driving import Case, to_dtype
from scratchlm.tokenizer.naive import train_bpe_naive

END = "<|endoftext|>"


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Draw float64 numbers of the order of 1, the same every time."""
    state = torch.Generator().manual_seed(1000 * sum(shape) + seed)
    return torch.randn(*shape, generator=state, dtype=torch.float64) * scale


def low(dtype: torch.dtype, arguments: dict[str, Any]) -> Case:
    """Make a case in 16 bits: the result must come back in the input's dtype."""
    name = str(dtype).removeprefix("torch.")
    return Case(f"{name} input", to_dtype(arguments, dtype), gradients=False, course=False)


def linear() -> list[Case]:
    """W x."""

    def of(name: str, d_out: int, *shape: int, **options: Any) -> Case:
        x = normal(*shape)
        w = normal(d_out, shape[-1], seed=1)
        arguments = {"d_in": shape[-1], "d_out": d_out, "weights": w, "in_features": x}
        return Case(name, arguments, **options)

    cases = [of("two by two", 2, 1, 2), of("two to three", 3, 2, 2), of("a batch", 5, 2, 3, 4)]
    return [*cases, of("one vector", 3, 4, course=False), low(torch.bfloat16, cases[1].arguments)]


def embedding() -> list[Case]:
    """Rows of a table."""

    def of(name: str, ids: list[Any], **options: Any) -> Case:
        table = normal(5, 3)
        arguments = {"vocab_size": 5, "d_model": 3, "weights": table}
        return Case(name, {**arguments, "token_ids": torch.tensor(ids)}, **options)

    cases = [of("one id", [2]), of("a batch, with ids that repeat", [[0, 4, 1], [1, 1, 3]])]
    return [*cases, low(torch.bfloat16, cases[1].arguments)]


def softmax() -> list[Case]:
    """exp(x) / Σ exp(x)."""

    def of(name: str, x: Tensor, dim: int, **options: Any) -> Case:
        return Case(name, {"in_features": x, "dim": dim}, **options)

    extremes = torch.tensor([[1000.0, 1001.0, 1000.0], [-1000.0, -1001.0, -1000.0]]).double()
    spread = torch.tensor([[1000.0, 0.0, -1000.0], [3.0, 1.0, -math.inf]]).double()
    return [
        of("two numbers", torch.tensor([0.0, 1.0]).double(), -1),
        of("rows", normal(2, 3), -1),
        of("columns", normal(2, 3), 0),
        of("the middle of three axes", normal(2, 3, 4), 1),
        of("large numbers, close together", extremes, -1, gradients=False),
        of("large numbers, far apart, and −∞", spread, -1, gradients=False),
        low(torch.bfloat16, {"in_features": normal(2, 3), "dim": -1}),
    ]


def silu() -> list[Case]:
    """x · σ(x)."""
    points = torch.tensor([-2.0, -0.5, 0.0, 1.0, 3.0]).double()
    far = torch.tensor([-1000.0, 1000.0]).double()
    return [
        Case("five numbers", {"in_features": points}),
        Case("a batch", {"in_features": normal(2, 3, 2)}),
        Case("large numbers", {"in_features": far}, gradients=False),
        low(torch.bfloat16, {"in_features": points}),
    ]


def rmsnorm() -> list[Case]:
    """x / sqrt(mean(x²) + ε) · g."""

    def of(name: str, x: Tensor, eps: float, **options: Any) -> Case:
        d = x.shape[-1]
        gain = normal(d, seed=7) + 1
        return Case(
            name, {"d_model": d, "eps": eps, "weights": gain, "in_features": x}, **options
        )

    large = of("", normal(2, 6, scale=600), 1e-5).arguments
    return [
        of("three numbers", torch.tensor([[1.0, 2.0, 2.0]]).double(), 1e-5),
        of("rows", normal(2, 3), 1e-5),
        of("small numbers, a large ε", normal(3, 4, scale=0.3), 0.1),
        of("a batch", normal(2, 3, 4), 1e-5),
        of("a row of zeros", torch.zeros(1, 3).double(), 1e-5, gradients=False),
        low(torch.bfloat16, of("", normal(2, 6), 1e-5).arguments),
        low(torch.float16, large),
    ]


def rope() -> list[Case]:
    """Rotated pairs."""

    def of(name: str, x: Tensor, places: Tensor, theta: float, **options: Any) -> Case:
        arguments = {"d_k": x.shape[-1], "theta": theta, "max_seq_len": 40, "in_query_or_key": x}
        return Case(name, {**arguments, "token_positions": places}, **options)

    straight, mixed = torch.arange(3), torch.tensor([[5, 2, 9], [0, 7, 30]])
    low_arguments = of("", normal(3, 6), straight, 100.0).arguments
    return [
        of("one pair at position 1", normal(1, 2), torch.tensor([1]), 10000.0),
        of("three positions", normal(3, 6), straight, 10000.0),
        of("another θ", normal(3, 6), straight, 100.0),
        of("positions out of order", normal(3, 6), mixed[0], 100.0),
        of("each row its own positions", normal(2, 3, 6), mixed, 100.0),
        of("batch and heads", normal(2, 2, 3, 6), straight, 100.0),
        low(torch.bfloat16, low_arguments),
    ]


def attention() -> list[Case]:
    """softmax(Q Kᵀ / √d_k) V."""

    def of(
        name: str,
        sizes: tuple[int, int, int, int],
        mask: Tensor | None = None,
        batch: tuple[int, ...] = (),
        **options: Any,
    ) -> Case:
        queries, keys, d_k, d_v = sizes
        q, k = normal(*batch, queries, d_k), normal(*batch, keys, d_k, seed=1)
        v = normal(*batch, keys, d_v, seed=2)
        return Case(name, {"Q": q, "K": k, "V": v, "mask": mask}, **options)

    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    some = torch.tensor([[True, False, True, True], [False, True, True, False]])
    blind = torch.tensor([[True, True, False], [False, False, False]])
    low_arguments = of("", (2, 3, 4, 2), batch=(2,)).arguments
    return [
        of("one query, two keys", (1, 2, 2, 2)),
        of("two queries, three keys", (2, 3, 5, 3)),
        of("a mask", (1, 3, 2, 2), some[:1, :3]),
        of("a mask for each query", (2, 4, 5, 3), some),
        of("a causal mask, batch and heads", (4, 4, 3, 2), causal, (2, 2)),
        _far("large scores", 3000.0, some),
        _far("scores far below 0", -3000.0, some),
        of("a query that may see nothing", (2, 3, 4, 2), blind, gradients=False, course=False),
        low(torch.bfloat16, low_arguments),
    ]


def _far(name: str, scale: float, mask: Tensor) -> Case:
    """Make a case whose scores all lie on one side of 0, far from it."""
    q, k = normal(2, 5).abs() * scale, normal(4, 5, seed=1).abs() + 0.5
    arguments = {"Q": q, "K": k, "V": normal(4, 3, seed=2), "mask": mask}
    return Case(name, arguments, gradients=False)


def swiglu() -> list[Case]:
    """W2(SiLU(W1 x) ⊙ W3 x)."""

    def of(name: str, d_ff: int, *shape: int, scale: float = 1.0, **options: Any) -> Case:
        d = shape[-1]
        arguments = {
            "d_model": d,
            "d_ff": d_ff,
            "w1_weight": normal(d_ff, d, seed=1),
            "w2_weight": normal(d, d_ff, seed=2),
            "w3_weight": normal(d_ff, d, seed=3),
            "in_features": normal(*shape, scale=scale),
        }
        return Case(name, arguments, **options)

    cases = [of("one vector, d_ff 3", 3, 1, 2), of("d_ff = d_model", 3, 2, 3)]
    batch = of("a batch", 5, 2, 3, 4)
    far = of("large numbers", 3, 1, 2, scale=1000.0, gradients=False)
    return [*cases, batch, far, low(torch.bfloat16, cases[0].arguments)]


def _projections(d_model: int) -> dict[str, Tensor]:
    names = [f"{name}_proj_weight" for name in "qkvo"]
    return {n: normal(d_model, d_model, seed=i, scale=0.7) for i, n in enumerate(names)}


def multihead() -> list[Case]:
    """Causal attention of several heads."""

    def of(name: str, d_model: int, heads: int, *shape: int, **options: Any) -> Case:
        arguments = {"d_model": d_model, "num_heads": heads, **_projections(d_model)}
        return Case(name, {**arguments, "in_features": normal(*shape, d_model)}, **options)

    return [
        of("one token", 4, 2, 1, 1),
        of("three tokens", 4, 2, 1, 3),
        of("three heads, a batch", 12, 3, 2, 5),
        of("no batch dimension", 4, 2, 3, course=False),
        of("two batch dimensions", 4, 2, 2, 2, 3, course=False),
    ]


def multihead_with_rope() -> list[Case]:
    """The same with rotated queries and keys."""

    def of(name: str, sizes: tuple[int, int], places: Tensor | None, *shape: int) -> Case:
        d_model, heads = sizes
        arguments = {"d_model": d_model, "num_heads": heads, "max_seq_len": 40, "theta": 100.0}
        x = normal(*shape, d_model)
        weights = _projections(d_model)
        return Case(name, {**arguments, **weights, "in_features": x, "token_positions": places})

    spread = torch.tensor([[0, 3, 4, 8, 9]])
    return [
        of("one token", (4, 2), torch.arange(1)[None], 1, 1),
        of("three tokens", (4, 2), torch.arange(3)[None], 1, 3),
        of("three heads, a batch", (12, 3), torch.arange(5)[None], 2, 5),
        of("positions with gaps", (12, 3), spread, 1, 5),
    ]


def _block_weights(d_model: int, d_ff: int, seed: int) -> dict[str, Tensor]:
    def drawn(number: int, *shape: int) -> Tensor:
        return normal(*shape, seed=100 * seed + number, scale=0.5)

    names = ("q_proj", "k_proj", "v_proj", "output_proj")
    return {
        **{f"attn.{n}.weight": drawn(i, d_model, d_model) for i, n in enumerate(names)},
        "ln1.weight": drawn(4, d_model) + 1,
        "ffn.w1.weight": drawn(5, d_ff, d_model),
        "ffn.w2.weight": drawn(6, d_model, d_ff),
        "ffn.w3.weight": drawn(7, d_ff, d_model),
        "ln2.weight": drawn(8, d_model) + 1,
    }


def block() -> list[Case]:
    """One pre-norm block."""

    def of(name: str, d_model: int, d_ff: int, *shape: int) -> Case:
        sizes = {"d_model": d_model, "num_heads": 2, "d_ff": d_ff, "max_seq_len": 8}
        weights = _block_weights(d_model, d_ff, 1)
        x = normal(*shape, d_model, scale=1.5)
        arguments = {**sizes, "theta": 100.0, "weights": weights, "in_features": x}
        return Case(name, arguments, given=f"x (…, {shape[-1]}, {d_model}), two heads")

    return [of("one token", 4, 6, 1, 1), of("a batch", 8, 12, 2, 3)]


def language_model() -> list[Case]:
    """Token ids to logits."""

    def of(name: str, layers: int, ids: Tensor) -> Case:
        sizes = {"vocab_size": 7, "context_length": 8, "d_model": 4, "num_layers": layers}
        weights = {
            "token_embeddings.weight": normal(7, 4, seed=11),
            "ln_final.weight": normal(4, seed=12) + 1,
            "lm_head.weight": normal(7, 4, seed=13),
        }
        for layer in range(layers):
            of_layer = _block_weights(4, 6, layer + 2)
            weights |= {f"layers.{layer}.{key}": w for key, w in of_layer.items()}
        arguments = {**sizes, "num_heads": 2, "d_ff": 6, "rope_theta": 100.0, "weights": weights}
        words = f"{layers} layer{'s' * (layers > 1)}, ids {ids.tolist()}"
        return Case(name, {**arguments, "in_indices": ids}, given=words)

    return [
        of("one layer, one token", 1, torch.tensor([[3]])),
        of("two layers, a batch", 2, torch.tensor([[0, 5, 2, 2], [6, 1, 4, 3]])),
        of("three layers", 3, torch.tensor([[0, 5, 2]])),
    ]


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
        arguments = {"lr": 0.1, "betas": (0.8, 0.95), "eps": eps, "weight_decay": 0.2}
        arguments |= {"parameters": [normal(*s, seed=5) for s in shapes], "gradients": gradients}
        words = f"lr 0.1, betas (0.8, 0.95), eps {eps:g}, weight_decay 0.2, {steps} steps"
        return Case(name, {**arguments, **more}, given=words)

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


CASES: dict[str, Callable[[], list[Case]]] = {
    "run_linear": linear,
    "run_embedding": embedding,
    "run_softmax": softmax,
    "run_silu": silu,
    "run_rmsnorm": rmsnorm,
    "run_rope": rope,
    "run_scaled_dot_product_attention": attention,
    "run_swiglu": swiglu,
    "run_multihead_self_attention": multihead,
    "run_multihead_self_attention_with_rope": multihead_with_rope,
    "run_transformer_block": block,
    "run_transformer_lm": language_model,
    "run_cross_entropy": cross_entropy,
    "get_adamw_cls": adamw,
    "run_get_lr_cosine_schedule": schedule,
    "run_gradient_clipping": clipping,
    "run_train_bpe": bpe_training,
    "get_tokenizer": tokenizer,
}
