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

from scratchlm.check import cases_training as training
from scratchlm.check.driving import Case, normal, to_dtype


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
        return Case(name, {"d_model": d, "eps": eps, "weights": gain, "in_features": x}, **options)

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
        of("each row its own positions", normal(2, 3, 6), mixed, 100.0, course=False),
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
    "run_cross_entropy": training.cross_entropy,
    "get_adamw_cls": training.adamw,
    "run_get_lr_cosine_schedule": training.schedule,
    "run_gradient_clipping": training.clipping,
    "run_train_bpe": training.bpe_training,
    "get_tokenizer": training.tokenizer,
}
