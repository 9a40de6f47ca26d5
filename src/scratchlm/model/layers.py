"""The layers without attention: Linear, Embedding, norms, feed-forward, absolute positions.

A module owns weights and calls one op; the formula is in `ops/reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm.config import default_d_ff
from scratchlm.ops import Ops, get_ops
from scratchlm.ops.ranges import check_range


def _check_width(x: Tensor, expected: int, name: str) -> None:
    if x.shape[-1] != expected:
        raise ValueError(
            f"{name}: the last dimension must be {expected}; got shape {tuple(x.shape)}"
        )


def _parameter(
    *shape: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


class Linear(nn.Module):
    """y = W x (+ b), with W stored (out_features, in_features)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        self.ops = get_ops(ops)
        self.weight = _parameter(out_features, in_features, device=device, dtype=dtype)
        self.bias = _parameter(out_features, device=device, dtype=dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw W from a normal of variance 2/(in + out), cut at ±3σ; b = 0."""
        _init_matrix(self.weight, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Apply the map to the last dimension."""
        _check_width(x, self.weight.shape[1], "Linear")
        return self.ops.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Say the sizes in `print(model)`."""
        d_out, d_in = self.weight.shape
        return f"in_features={d_in}, out_features={d_out}, bias={self.bias is not None}"


def linear_together(x: Tensor, maps: Sequence[Linear], ops: Ops) -> Sequence[Tensor]:
    """Apply several maps to one input: in one op, unless one of them is not plain any more.

    A layer that somebody has put a hook on, or has replaced by their own, is called as it is.
    """
    if not all(map(is_plain, maps)):
        return [m(x) for m in maps]
    return ops.linears(x, [m.weight for m in maps], [m.bias for m in maps])


def is_plain(module: nn.Module) -> bool:
    """Whether a layer is our own and nobody listens to it: then its op may be joined to others."""
    ours = type(module) in (Linear, RMSNorm)
    return ours and not (module._forward_hooks or module._forward_pre_hooks)


def add_then_norm(x: Tensor, delta: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return x + δ and the norm of it: in one op, where the norm is a plain RMSNorm."""
    if isinstance(norm, RMSNorm) and is_plain(norm):
        return norm.ops.add_norm(x, delta, norm.weight, norm.eps)
    total = x + delta
    return total, norm(total)


def side_by_side(maps: Sequence[Linear]) -> None:
    """Move the weights into one block of memory, one after the other, values and names unchanged.

    What reads them together (`ops.linears`) then reads one matrix.
    """
    weights = [m.weight for m in maps]
    sizes = [len(weight) for weight in weights]
    block = weights[0].data.new_empty(sum(sizes), weights[0].shape[1])
    for weight, part in zip(weights, block.split(sizes), strict=True):
        part.copy_(weight.data)
        weight.data = part


def _init_matrix(weight: Tensor, generator: torch.Generator | None) -> None:
    """Draw (…, out, in) matrices from a normal of variance 2/(in + out), cut at ±3σ."""
    std = math.sqrt(2 / (weight.shape[-1] + weight.shape[-2]))
    nn.init.trunc_normal_(weight, 0.0, std, -3 * std, 3 * std, generator=generator)


class Embedding(nn.Module):
    """A table of vectors, looked up by id."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_id: int | None = None,
        *,
        std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        if padding_id is not None and not 0 <= padding_id < num_embeddings:
            raise ValueError(
                f"padding_id must lie in [0, {num_embeddings}); got padding_id={padding_id}"
            )
        self.ops = get_ops(ops)
        self.padding_id = padding_id
        self.std = std
        self.weight = _parameter(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw from N(0, std²), cut at ±3 std."""
        std = self.std
        nn.init.trunc_normal_(self.weight, 0.0, std, -3 * std, 3 * std, generator=generator)

    def forward(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Look every id up."""
        check_range(token_ids, len(self.weight), "token id")
        return self.ops.look_up(token_ids, self.weight, self.padding_id)

    def extra_repr(self) -> str:
        """Say the sizes in `print(model)`."""
        rows, width = self.weight.shape
        return f"num_embeddings={rows}, embedding_dim={width}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · g."""

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        self.ops = get_ops(ops)
        self.eps = eps
        self.weight = _parameter(d_model, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set g = 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise the last dimension."""
        _check_width(x, len(self.weight), "RMSNorm")
        return self.ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x − mean) / sqrt(var + ε) · g + b."""

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        self.ops = get_ops(ops)
        self.eps = eps
        self.weight = _parameter(d_model, device=device, dtype=dtype)
        self.bias = _parameter(d_model, device=device, dtype=dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set g = 1, b = 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise the last dimension."""
        _check_width(x, len(self.weight), "LayerNorm")
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class SwiGLU(nn.Module):
    """W2(SiLU(W1 x) ⊙ W3 x)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        self.ops = get_ops(ops)
        d_ff = default_d_ff(d_model) if d_ff is None else d_ff
        self.w1 = Linear(d_model, d_ff, bias, device=device, dtype=dtype, ops=ops)
        self.w2 = Linear(d_ff, d_model, bias, device=device, dtype=dtype, ops=ops)
        self.w3 = Linear(d_model, d_ff, bias, device=device, dtype=dtype, ops=ops)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the layer to every vector."""
        w1, w2, w3 = self.w1, self.w2, self.w3
        _check_width(x, w1.weight.shape[1], "SwiGLU")
        return self.ops.swiglu(x, w1.weight, w2.weight, w3.weight, w1.bias, w2.bias, w3.bias)


class MLP(nn.Module):
    """W2 act(W1 x)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str = "gelu_tanh",
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        self.ops = get_ops(ops)
        self.activation = activation
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.w1 = Linear(d_model, d_ff, bias, device=device, dtype=dtype, ops=ops)
        self.w2 = Linear(d_ff, d_model, bias, device=device, dtype=dtype, ops=ops)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the layer to every vector."""
        w1, w2 = self.w1, self.w2
        _check_width(x, w1.weight.shape[1], "MLP")
        return self.ops.mlp(x, w1.weight, w2.weight, w1.bias, w2.bias, self.activation)


class SinusoidalPositions(nn.Module):
    """sin(p / 10000^(2i/d)) and cos(p / 10000^(2i/d)), channel by channel in turn."""

    table: Tensor

    def __init__(
        self, max_seq_len: int, d_model: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even for sinusoidal positions; got {d_model}")
        self.max_seq_len, self.d_model = max_seq_len, d_model
        self._build(device)

    def _build(self, device: torch.device | str | None) -> None:
        even = torch.arange(0, self.d_model, 2, device=device, dtype=torch.float32)
        position = torch.arange(self.max_seq_len, device=device, dtype=torch.float32)
        angle = position[:, None] / 10_000 ** (even / self.d_model)  # arXiv:1706.03762, section 3.5
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
        self.register_buffer("table", table, persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        before = self.table
        super()._apply(fn, recurse)
        if self.table is not before:  # a table is computed anew, never cast or left unfilled
            self._build(self.table.device)
        return self

    def forward(self, positions: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Look every position up."""
        check_range(positions, self.max_seq_len, "position")
        return self.table[positions]
