"""Accelerated layers: Linear, Embedding, RMSNorm, SwiGLU and the block.

Each is the layer of `model/` under the same names; its forward is the model's own unless a fusion
of the table runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from scratchlm.accelerate import conditions, fp8, hopper
from scratchlm.accelerate.adapters import add_adapters
from scratchlm.accelerate.conditions import joined_bias, joined_weight
from scratchlm.accelerate.table import Fusion, accelerates
from scratchlm.model import (
    Embedding,
    ForwardContext,
    Linear,
    MoE,
    RMSNorm,
    SwiGLU,
    TransformerBlock,
)

# Linear


def _why_no_shadow(module: AcceleratedLinear, x: Tensor, context: object) -> str | None:
    if module.shadow is None:
        return "no bf16 shadow weights (training keeps them)"
    return "in 8 bits" if module.fp8 and fp8.is_on(x) else None


def _why_no_fp8(module: AcceleratedLinear, x: Tensor, context: object) -> str | None:
    if not module.fp8:
        return "precision is not fp8"
    return None if fp8.is_on(x) else "fp8 is for training under autocast"


FP8_LINEAR = Fusion(
    "fp8_linear",
    "y = W x in 8 bits, forward and backward",
    takes=Linear,
    absorbs=(),
    ops=("linear",),
    condition=_why_no_fp8,
    keeps="x and W in 8 bits",
    kernels=("_fp8_quantize_kernel", "_amax_kernel"),
)
SHADOW_LINEAR = Fusion(
    "bf16_shadow_linear",
    "y = W x reading the bf16 copy of W that the optimizer writes",
    takes=Linear,
    absorbs=(),
    ops=("linear",),
    condition=_why_no_shadow,
    keeps="x",
    gain="all shadow weights: Llama-3.2-1B 2.2 %, GPT-2 XL 2.1 %, 124M 0.0 %",
)


@accelerates(Linear, FP8_LINEAR, SHADOW_LINEAR)
class AcceleratedLinear(Linear):
    """y = W x (+ b), with W rounded once per update instead of once per use."""

    left_out: frozenset[str] = frozenset()
    shadow: Tensor | None = None
    fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to the last dimension."""
        if self.shadow is None and not self.fp8:
            return super().forward(x)
        if FP8_LINEAR.runs(self, x):
            weight = joined_weight(self.shadow, [self.weight], torch.bfloat16)
            return fp8.linear(x, weight, self.bias)
        if self.shadow is not None and SHADOW_LINEAR.runs(self, x):
            return F.linear(x, self.shadow, self.bias)
        return super().forward(x)


# Embedding


@accelerates(Embedding)
class AcceleratedEmbedding(Embedding):
    """A table of vectors, looked up by id."""

    left_out: frozenset[str] = frozenset()
    low_precision = False  # whether rows are rounded as autocast rounds a product's input

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look every id up."""
        rows = super().forward(token_ids)
        return rows.to(conditions.compute_dtype(self.weight)) if self.low_precision else rows


# RMSNorm


def _why_no_norm_kernel(module: RMSNorm, x: Tensor, context: object) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiler fuses it with its neighbours"
    reason = conditions.why_no_kernel(x)
    if reason is None and not (x.is_contiguous() and conditions.is_readable_gain(module.weight, x)):
        return "a layout the kernel cannot read"
    return reason


RMS_NORM = Fusion(
    "rms_norm",
    "RMSNorm as one kernel, forward and backward",
    takes=RMSNorm,
    absorbs=(),
    ops=("rms_norm",),
    condition=_why_no_norm_kernel,
    keeps="x",
    kernels=("_rms_norm_kernel", "_rms_norm_backward_kernel", "_rms_norm_dweight_kernel"),
    gain="GPT-2 124M 3.1 % where nothing is compiled; in a compiled step none",
)


@accelerates(RMSNorm, RMS_NORM)
class AcceleratedRMSNorm(RMSNorm):
    """x / sqrt(mean(x²) + ε) · g."""

    left_out: frozenset[str] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if not (conditions.trains_by_kernel(x) and RMS_NORM.runs(self, x)):
            return super().forward(x)
        from scratchlm.accelerate.kernels.triton.rms_norm import rms_norm

        return rms_norm(x, self.weight, self.eps)


# SwiGLU


def _why_no_fp8_swiglu(module: AcceleratedSwiGLU, x: Tensor, context: object) -> str | None:
    if not (module.fp8 and fp8.is_on(x)):
        return "precision is not fp8, or nothing trains under autocast"
    if module.biases != (None, None, None):
        return "biases"
    w1, w2 = module.w1.weight, module.w2.weight
    return None if fp8.fits(x, w1) and fp8.fits(x, w2) else "sides that are no multiples of 16"


def _why_no_swiglu_gemm(module: AcceleratedSwiGLU, x: Tensor, context: object) -> str | None:
    reason = conditions.why_no_kernel(x)
    if reason is not None:
        return reason
    if module.fp8 or module.biases != (None, None, None):
        return "biases, or fp8"
    return hopper.why_no_swiglu(x, module.w2.weight, conditions.compute_dtype(x))


def _why_no_swiglu_gate(module: AcceleratedSwiGLU, x: Tensor, context: object) -> str | None:
    return conditions.why_no_kernel(x)


def _why_no_joined_swiglu(module: AcceleratedSwiGLU, x: Tensor, context: object) -> str | None:
    return None if module.shadow is not None else "no bf16 shadow weights"


_SWIGLU_OPS = ("linear", "silu")
FP8_SWIGLU = Fusion(
    "fp8_swiglu",
    "SwiGLU with products in 8 bits; the gate finds the largest magnitude as it writes",
    takes=SwiGLU,
    absorbs=("w1", "w2", "w3"),
    ops=_SWIGLU_OPS,
    condition=_why_no_fp8_swiglu,
    operators=("scratchlm::swiglu_gate_amax", "scratchlm::swiglu_gate_backward_amax"),
    keeps="x, W and the hidden activations in 8 bits, W1 x and W3 x",
    kernels=("_swiglu_gate_kernel", "_swiglu_gate_backward_kernel"),
)
SWIGLU_GEMM = Fusion(
    "swiglu_gemm",
    "SwiGLU whose gate is the fused epilogue of the products beside it, on Hopper",
    takes=SwiGLU,
    absorbs=("w1", "w2", "w3"),
    ops=_SWIGLU_OPS,
    condition=_why_no_swiglu_gemm,
    operators=("scratchlm::swiglu", "scratchlm::swiglu_backward"),
    saved=("scratchlm::swiglu",),
    keeps="x, h, and the two factors of h's gradient",
    kernels=("_swiglu_gemm_kernel", "_swiglu_gemm_backward_kernel"),
    gain="GPT-2 124M 2.3 to 4.6 %, Llama-3.2-1B 1.4 to 2.0 %, GPT-2 XL −0.2 %",
)
SWIGLU_GATE = Fusion(
    "swiglu_gate",
    "W1 x and W3 x in one product, SiLU(W1 x) ⊙ W3 x as one kernel",
    takes=SwiGLU,
    absorbs=("w1", "w3"),
    ops=_SWIGLU_OPS,
    condition=_why_no_swiglu_gate,
    operators=("scratchlm::swiglu_gate", "scratchlm::swiglu_gate_backward"),
    keeps="x, W1 x, W3 x, h",
    kernels=("_swiglu_gate_kernel", "_swiglu_gate_backward_kernel"),
    gain="GPT-2 124M 3.2 %, Qwen3-0.6B 1.6 %, where swiglu_gemm does not run",
    adds_adapters=True,
)
SWIGLU_JOINED = Fusion(
    "swiglu_joined",
    "W1 x and W3 x in one product with the bf16 shadow weights",
    takes=SwiGLU,
    absorbs=("w1", "w3"),
    ops=("linear",),
    condition=_why_no_joined_swiglu,
    keeps="x, W1 x, W3 x, h",
    adds_adapters=True,
)


@accelerates(SwiGLU, FP8_SWIGLU, SWIGLU_GEMM, SWIGLU_GATE, SWIGLU_JOINED)
class AcceleratedSwiGLU(SwiGLU):
    """W2(SiLU(W1 x) ⊙ W3 x)."""

    left_out: frozenset[str] = frozenset()
    shadow: Tensor | None = None  # of W1 and W3
    fp8 = False

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of W1, W2 and W3."""
        return self.w1.bias, self.w2.bias, self.w3.bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to every vector."""
        if self.shadow is None and not self.fp8 and not conditions.trains_by_kernel(x):
            return super().forward(x)
        if FP8_SWIGLU.runs(self, x):
            return fp8.swiglu(x, *self._low_weights(torch.bfloat16))
        if SWIGLU_GEMM.runs(self, x):
            from scratchlm.accelerate.kernels.hopper.swiglu import swiglu

            low = conditions.compute_dtype(x)
            return swiglu(x.to(low), *self._low_weights(low))
        if SWIGLU_GATE.runs(self, x):
            from scratchlm.accelerate.kernels.triton.swiglu_gate import swiglu_gate

            return self.w2(swiglu_gate(self._gate_up(x)))
        if SWIGLU_JOINED.runs(self, x):
            gate, up = self._gate_up(x).chunk(2, dim=-1)
            return self.w2(self.ops.silu(gate) * up)
        return super().forward(x)

    def _low_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return [W1; W3] and W2 in `dtype`."""
        w13 = joined_weight(self.shadow, [self.w1.weight, self.w3.weight], dtype)
        return w13, joined_weight(getattr(self.w2, "shadow", None), [self.w2.weight], dtype)

    def _gate_up(self, x: Tensor) -> Tensor:
        """Return [W1 x; W3 x] in one product."""
        weights, biases = [self.w1.weight, self.w3.weight], [self.w1.bias, self.w3.bias]
        product = fp8.linear if self.fp8 and fp8.is_on(x) else F.linear
        weight = joined_weight(self.shadow, weights, conditions.compute_dtype(x))
        return add_adapters(product(x, weight, joined_bias(weights, biases)), x, [self.w1, self.w3])


# Block


def _why_no_add_norm(module: TransformerBlock, x: Tensor, context: object) -> str | None:
    if module.post_norm or isinstance(module.ffn, MoE) or not isinstance(module.ln2, RMSNorm):
        return "post-norm, a mixture of experts, or a norm that is not RMSNorm"
    reason = conditions.why_no_kernel(x)
    if reason is None and not conditions.is_readable_gain(module.ln2.weight, x):
        return "a gain the kernel cannot read"
    return reason


ADD_RMS_NORM = Fusion(
    "add_rms_norm",
    "x + Attn(…) and its RMSNorm as one kernel, written in the dtype products want",
    takes=TransformerBlock,
    absorbs=("ln2",),
    ops=("rms_norm",),
    condition=_why_no_add_norm,
    operators=("scratchlm::add_rms_norm", "scratchlm::add_rms_norm_backward"),
    keeps="the sum",
    kernels=("_rms_norm_kernel", "_rms_norm_backward_kernel", "_rms_norm_dweight_kernel"),
    gain="GPT-2 124M 1.7 to 2.3 %, Qwen3-0.6B 1.8 %",
)


@accelerates(TransformerBlock, ADD_RMS_NORM)
class AcceleratedTransformerBlock(TransformerBlock):
    """One Transformer block."""

    left_out: frozenset[str] = frozenset()

    def forward(
        self,
        x: Tensor,
        token_positions: Tensor | None = None,
        *,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Apply attention and the feed-forward layer, each beside the residual stream."""
        if not (conditions.trains_by_kernel(x) and ADD_RMS_NORM.runs(self, x)):
            return super().forward(x, token_positions, context=context)
        from scratchlm.accelerate.kernels.triton.rms_norm import add_rms_norm

        attn_out = self.attn(self.ln1(x), token_positions, context=context)
        weight, eps = self.ln2.weight, self.ln2.eps
        x, normed = add_rms_norm(x, attn_out, weight, eps, conditions.compute_dtype(x))
        return x + self.feed_forward(normed, context)
