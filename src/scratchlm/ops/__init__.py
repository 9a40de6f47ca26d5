"""The seam between readable and fast.

A model holds one `Ops`: a frozen table of functions, chosen when it is built. `OPS["reference"]`
is the definition, `OPS["fast"]` the same functions at speed, and anybody may bring their own:

    mine = dataclasses.replace(OPS["reference"], rms_norm=my_rms_norm)
    model = TransformerLM(config, ops=mine)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from scratchlm.ops import attention, experts, fast, fp8, qkv, reference
from scratchlm.ops.masks import CausalMask
from scratchlm.ops.ranges import keep_in_range, mark
from scratchlm.ops.routing import Routed, load_balancing_loss


@dataclass(frozen=True)
class Ops:
    """One implementation of every operation a model calls; `ops/reference.py` has the contract."""

    linear: Callable[..., Tensor]
    linears: Callable[..., Sequence[Tensor]]
    embedding: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    moe: Callable[..., Routed]
    softmax: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    linear_cross_entropy: Callable[..., Tensor]

    def look_up(self, ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
        """Rows of the table; NaN for an id outside of it, where nobody can look (`ranges.py`)."""
        ours = self.embedding in (fast.embedding, fast.low_embedding)
        if ours and fast.looks_up_by_kernel(ids, weight):  # the kernel marks them as it writes
            return self.embedding(ids, weight, padding_id)
        safe, wrong = keep_in_range(ids, len(weight))
        return mark(self.embedding(safe, weight, padding_id), wrong)

    def add_norm(self, x: Tensor, delta: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + δ and the RMSNorm of that sum; at once where the norm is the fast one."""
        if self.rms_norm is fast.rms_norm:
            return fast.add_norm(x, delta, gain, eps)
        total = x + delta
        return total, self.rms_norm(total, gain, eps)

    @property
    def _turns(self) -> bool:
        """Whether a kernel may turn queries and keys as it projects them."""
        return self.rope is fast.rope and self.linears is fast.linears

    def turn_lines(self, cos: Tensor, sin: Tensor, layout: str) -> Tensor | None:
        """The tables as `turned_heads` reads them, where it does: once for all layers."""
        return qkv.turn_lines(cos, sin, layout) if self._turns else None

    def turned_heads(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        heads: tuple[int, int],
        turn: qkv.Turn,
        norm: tuple[Tensor, Tensor, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Queries, keys and values (batch, heads, seq, d) of x, normed and turned, by one kernel.

        `turn` is (cos, sin, layout, what `turn_lines` made of them), `norm` the gains of queries
        and keys and ε. None where no kernel can, or where one of the ops it stands for is
        somebody's own.
        """
        if x.ndim != 3 or self.rope is not fast.rope or not fast.trains_by_kernel(x):
            return None
        if norm is not None and self.rms_norm is not fast.rms_norm:
            return None
        if self.linears is fast.linears:
            if norm is None and not any(bias is not None for bias in biases):
                at_once = qkv.projected(x, weights, heads, turn)
                if at_once is not None:
                    return at_once
            joined = fast.joined_product(x, weights, biases)
        elif self.linears is fp8.linears:
            joined = fp8.joined_product(x, weights, biases)
        else:
            return None
        return qkv.turned(joined, heads, turn, norm)

    def attended(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        heads: tuple[int, int],
        turn: qkv.Turn,
        mask: CausalMask,
    ) -> Tensor | None:
        """What attention mixes (batch, seq, heads · d) of x, projected and turned, at once.

        `turn` is what `turned_heads` takes. None where no kernel can, where not all and only the
        future is hidden, or where one of the ops it stands for is somebody's own.
        """
        if not (self._turns and self.attention is attention.attention and mask.is_plain):
            return None
        if x.ndim != 3 or mask.start or any(bias is not None for bias in biases):
            return None
        if not fast.trains_by_kernel(x):
            return None
        return qkv.attended(x, weights, heads, turn)


OPS: dict[str, Ops] = {
    "reference": Ops(
        linear=reference.linear,
        linears=reference.linears,
        embedding=reference.embedding,
        rms_norm=reference.rms_norm,
        layer_norm=reference.layer_norm,
        rope=reference.rope,
        attention=reference.attention,
        swiglu=reference.swiglu,
        mlp=reference.mlp,
        moe=reference.moe,
        softmax=reference.softmax,
        cross_entropy=reference.cross_entropy,
        linear_cross_entropy=reference.linear_cross_entropy,
    ),
    "fast": Ops(
        linear=fast.linear,
        linears=fast.linears,
        embedding=fast.embedding,
        rms_norm=fast.rms_norm,
        layer_norm=fast.layer_norm,
        rope=fast.rope,
        attention=attention.attention,
        swiglu=fast.swiglu,
        mlp=fast.mlp,
        moe=experts.moe,
        softmax=reference.softmax,
        cross_entropy=fast.cross_entropy,
        linear_cross_entropy=fast.linear_cross_entropy,
    ),
}
OPS["fp8"] = replace(
    OPS["fast"], linear=fp8.linear, linears=fp8.linears, swiglu=fp8.swiglu, mlp=fp8.mlp
)


def get_ops(ops: str | Ops) -> Ops:
    """Return the implementation of that name, or the one handed in."""
    if isinstance(ops, Ops):
        return ops
    if ops not in OPS:
        raise ValueError(f"ops must be an Ops or one of {', '.join(OPS)}; got {ops!r}")
    return OPS[ops]


__all__ = ["OPS", "CausalMask", "Ops", "Routed", "get_ops", "load_balancing_loss"]
