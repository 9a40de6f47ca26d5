"""Accelerated attention: queries, keys and values by one product, norms and RoPE with it.

In order of preference, where a GPU trains:

    qkv_rope_attention   on Hopper, plainly causal heads of 64: RoPE as the product's epilogue, and
                         attention's backward pass with RoPE's as its own epilogue
    qkv_norm_rope        one product, then one kernel that splits, norms and rotates
    qkv_joined           one product
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from scratchlm.accelerate import conditions, fp8, hopper
from scratchlm.accelerate.adapters import add_adapters
from scratchlm.accelerate.conditions import joined_bias, joined_weight
from scratchlm.accelerate.table import Fusion, accelerates
from scratchlm.model import ForwardContext, MultiHeadSelfAttention, RotaryEmbedding
from scratchlm.model.attention import over_heads


class RopeTables(NamedTuple):
    """Tables at the positions of one forward: made once for all layers (`shared_tables`)."""

    rope: RotaryEmbedding  # whose they are
    cos: Tensor  # (seq, half), or (batch, 1, seq, half)
    sin: Tensor
    packed: Tensor | None  # both in the register layout of the Hopper kernels, where those run


def rope_tables(rope: RotaryEmbedding, positions: Tensor | range) -> RopeTables:
    """Look the tables up, and pack them where a Hopper GPU trains."""
    cos, sin = rope.tables(over_heads(positions))
    packed = None
    if conditions.trains_by_kernel(cos) and hopper.supports_rope_tables(cos):
        from scratchlm.accelerate.kernels.hopper.qkv_rope import rope_tables as pack

        packed = pack(cos, sin, rope.layout == "interleaved")
    return RopeTables(rope, cos, sin, packed)


def shared_tables(module: AcceleratedAttention, context: ForwardContext) -> RopeTables:
    """Return the tables that the model made for all layers, or this layer's own."""
    tables: RopeTables | None = context.derived.get("rope_tables")
    assert module.rope is not None
    if tables is not None and tables.rope is module.rope:
        return tables
    return rope_tables(module.rope, context.positions)


# Conditions


def _why_no_rope_kernel(module: AcceleratedAttention, x: Tensor) -> str | None:
    reason = conditions.why_no_kernel(x)
    if reason is not None:
        return reason
    if x.ndim != 3 or module.rope is None:
        return "no RoPE, or x is not (batch, seq, d_model)"
    return None


def _why_no_qkv_rope_attention(
    module: AcceleratedAttention, x: Tensor, context: ForwardContext
) -> str | None:
    reason = _why_no_rope_kernel(module, x)
    if reason is not None:
        return reason
    biased = any(getattr(module, name).bias is not None for name in _PROJECTIONS)
    if module.fp8 or module.q_norm is not None or biased:
        return "biases, norms of queries and keys, or fp8"
    if module.d_head != hopper.HEAD:
        return f"heads of {module.d_head}, not of {hopper.HEAD}"
    mask = module.mask(context)
    if context.cache is not None or not mask.is_plain or mask.start:
        return "a cache, or a mask that is not plainly causal"
    reason = hopper.why_no_qkv_rope(x, conditions.compute_dtype(x))
    if reason is not None:
        return reason
    if shared_tables(module, context).packed is None:
        return "positions that do not fill tiles of 128"
    return hopper.why_no_attention(x, (module.num_heads, module.num_kv_heads))


def _why_no_qkv_norm_rope(
    module: AcceleratedAttention, x: Tensor, context: ForwardContext
) -> str | None:
    reason = _why_no_rope_kernel(module, x)
    if reason is None and module.q_norm is not None and module.k_norm is not None:
        return None if module.q_norm.eps == module.k_norm.eps else "norms with two different ε"
    return reason


def _why_no_qkv_joined(
    module: AcceleratedAttention, x: Tensor, context: ForwardContext
) -> str | None:
    trains = conditions.trains_by_kernel(x)
    return None if trains or module.shadow is not None else "nothing trains on a GPU here"


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
QKV_ROPE_ATTENTION = Fusion(
    "qkv_rope_attention",
    "QKV product with RoPE as epilogue, cuDNN attention, our backward pass with RoPE's",
    takes=MultiHeadSelfAttention,
    absorbs=(*_PROJECTIONS, "rope"),
    ops=("linear", "rope", "attention", "scaled_dot_product_attention", "softmax"),
    condition=_why_no_qkv_rope_attention,
    operators=("scratchlm::qkv_rope_product", "scratchlm::attention_backward"),
    saved=("scratchlm::qkv_rope_product",),
    keeps="x, Q, K, V, attention's output, a log-sum per query and head",
    kernels=(
        "_qkv_rope_kernel",
        "_attention_backward_kernel",
        "_attention_stats_kernel",
        "_dq_rope_kernel",
        "_dkv_group_sum_kernel",
    ),
    gain="GPT-2 124M 7.6 to 8.1 %, GPT-2 XL 4.3 %, Llama-3.2-1B 0.9 to 1.8 %",
    skips=("project", "qkv", "split_heads"),
)
QKV_NORM_ROPE = Fusion(
    "qkv_norm_rope",
    "Q, K, V in one product; one kernel splits them, norms and rotates Q and K",
    takes=MultiHeadSelfAttention,
    absorbs=(*_PROJECTIONS, "q_norm", "k_norm", "rope"),
    ops=("linear", "rope", "rms_norm"),
    condition=_why_no_qkv_norm_rope,
    operators=("scratchlm::qk_norm_rope", "scratchlm::qkv_norm_rope_backward"),
    keeps="x, Q, K, V, and Q and K as projected",
    kernels=("_qkv_norm_rope_kernel", "_qkv_norm_rope_backward_kernel"),
    gain="Qwen3-0.6B 3.7 %, Qwen3-1.7B 1.7 %",
    adds_adapters=True,
    skips=("qkv", "split_heads"),
)
QKV_JOINED = Fusion(
    "qkv_joined",
    "Q, K, V in one product",
    takes=MultiHeadSelfAttention,
    absorbs=_PROJECTIONS,
    ops=("linear",),
    condition=_why_no_qkv_joined,
    keeps="x, Q, K, V",
    adds_adapters=True,
)


@accelerates(MultiHeadSelfAttention, QKV_ROPE_ATTENTION, QKV_NORM_ROPE, QKV_JOINED)
class AcceleratedAttention(MultiHeadSelfAttention):
    """Causal self-attention over (…, seq, d_model)."""

    left_out: frozenset[str] = frozenset()
    shadow: Tensor | None = None  # of W_Q, W_K and W_V
    fp8 = False

    def attend(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return softmax(Q Kᵀ / √d_head) V of all heads, side by side."""
        if not (conditions.trains_by_kernel(x) and QKV_ROPE_ATTENTION.runs(self, x, context)):
            return super().attend(x, context)
        from scratchlm.accelerate.kernels.hopper.qkv_rope import qkv_rope_attention

        low, tables = conditions.compute_dtype(x), shared_tables(self, context)
        assert tables.packed is not None  # the fusion's condition
        weight = joined_weight(self.shadow, self._weights, low)
        return qkv_rope_attention(
            x.to(low), weight, tables.packed, self._num_heads, self._is_interleaved
        )

    def project(self, x: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; the first two normed and rotated as the model has it."""
        if conditions.trains_by_kernel(x) and QKV_NORM_ROPE.runs(self, x, context):
            from scratchlm.accelerate.kernels.triton.qkv_norm_rope import qkv_norm_rope

            tables, norm = shared_tables(self, context), None
            if self.q_norm is not None and self.k_norm is not None:
                norm = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            return qkv_norm_rope(
                self._joined(x), tables.cos, tables.sin, norm, self._num_heads, self._is_interleaved
            )
        return super().project(x, context)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return W_Q x, W_K x and W_V x."""
        able = self.shadow is not None or conditions.trains_by_kernel(x)
        if not (able and QKV_JOINED.runs(self, x)):
            return super().qkv(x)
        q, k, v = self._joined(x).split([len(weight) for weight in self._weights], dim=-1)
        return q, k, v

    def _joined(self, x: Tensor) -> Tensor:
        """Return [W_Q x; W_K x; W_V x] in one product."""
        product = fp8.linear if self.fp8 and fp8.is_on(x) else F.linear
        weight = joined_weight(self.shadow, self._weights, conditions.compute_dtype(x))
        linears = [self.q_proj, self.k_proj, self.v_proj]
        bias = joined_bias(self._weights, [linear.bias for linear in linears])
        return add_adapters(product(x, weight, bias), x, linears)

    @property
    def _weights(self) -> list[Tensor]:
        return [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]

    @property
    def _num_heads(self) -> tuple[int, int]:
        return self.num_heads, self.num_kv_heads

    @property
    def _is_interleaved(self) -> bool:
        return self.rope is not None and self.rope.layout == "interleaved"
