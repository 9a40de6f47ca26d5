"""The layers without attention: Linear, Embedding, norms, feed-forward, absolute positions.

A module owns weights, and calls its submodules and ops; the formulas are in `ops/reference.py`.
"""

from __future__ import annotations

import math
from typing import TypedDict, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm.config import default_d_ff
from scratchlm.ops import Ops, get_ops
from scratchlm.ops.ranges import check_range, keep_in_range, mark
from scratchlm.ops.reference import ACTIVATIONS

TABLE_ELEMENTS = 1 << 24  # of tables by position; what lies beyond is computed when asked for


def check_width(x: Tensor, expected: int, name: str) -> None:
    """Refuse an input whose last dimension is not the expected one."""
    if x.shape[-1] != expected:
        got = tuple(x.shape)
        raise ValueError(f"{name}: the last dimension must be {expected}; got shape {got}")


class FactoryKwargs(TypedDict, total=False):
    """Keywords of every module: where its weights live, and which ops it calls."""

    device: torch.device | str | None
    dtype: torch.dtype | None
    ops: str | Ops


def empty_parameter(
    *shape: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    ops: str | Ops = "fast",
) -> nn.Parameter:
    """Return a parameter to be filled by `reset_parameters`."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


class Linear(nn.Module):
    """y = W x (+ b), with W stored (out_features, in_features)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.ops = get_ops(factory.get("ops", "fast"))
        self.weight = empty_parameter(out_features, in_features, **factory)
        self.bias = empty_parameter(out_features, **factory) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw W from a normal of variance 2/(in + out), cut at ±3σ; b = 0."""
        init_matrix(self.weight, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Apply the map to the last dimension."""
        check_width(x, self.weight.shape[1], "Linear")
        return self.ops.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Say the sizes in `print(model)`."""
        d_out, d_in = self.weight.shape
        return f"in_features={d_in}, out_features={d_out}, bias={self.bias is not None}"


def init_matrix(weight: Tensor, generator: torch.Generator | None) -> None:
    """Draw (…, out, in) matrices from a normal of variance 2/(in + out), cut at ±3σ."""
    std = math.sqrt(2 / (weight.shape[-1] + weight.shape[-2]))
    nn.init.trunc_normal_(weight, 0.0, std, -3 * std, 3 * std, generator=generator)


class TiedHead(nn.Module):
    """y = E x with E the token embeddings: a head without weights of its own."""

    def __init__(self, embeddings: nn.Module, *, ops: str | Ops = "fast") -> None:
        super().__init__()
        self.ops = get_ops(ops)
        self.tied_to = (embeddings,)  # in a tuple: not a submodule of the head

    @property
    def weight(self) -> Tensor:
        """The table."""
        return self.tied_to[0].weight  # type: ignore[return-value]

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab"]:
        """Compare every vector with every row of the table."""
        return self.ops.linear(x, self.weight)


class Embedding(nn.Module):
    """A table of vectors, looked up by id."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_id: int | None = None,
        *,
        std: float = 1.0,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        if padding_id is not None and not 0 <= padding_id < num_embeddings:
            raise ValueError(
                f"padding_id must lie in [0, {num_embeddings}); got padding_id={padding_id}"
            )
        self.ops = get_ops(factory.get("ops", "fast"))
        self.padding_id = padding_id
        self.std = std
        self.weight = empty_parameter(num_embeddings, embedding_dim, **factory)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw from N(0, std²), cut at ±3 std."""
        std = self.std
        nn.init.trunc_normal_(self.weight, 0.0, std, -3 * std, 3 * std, generator=generator)

    def forward(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Look every id up."""
        check_range(token_ids, len(self.weight), "token id")
        safe, wrong = keep_in_range(token_ids, len(self.weight))
        return mark(self.ops.embedding(safe, self.weight, self.padding_id), wrong)

    def extra_repr(self) -> str:
        """Say the sizes in `print(model)`."""
        rows, width = self.weight.shape
        return f"num_embeddings={rows}, embedding_dim={width}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · g."""

    def __init__(self, d_model: int, eps: float = 1e-5, **factory: Unpack[FactoryKwargs]) -> None:
        super().__init__()
        self.ops = get_ops(factory.get("ops", "fast"))
        self.eps = eps
        self.weight = empty_parameter(d_model, **factory)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set g = 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise the last dimension."""
        check_width(x, len(self.weight), "RMSNorm")
        return self.ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x − mean) / sqrt(var + ε) · g + b."""

    def __init__(
        self, d_model: int, eps: float = 1e-5, bias: bool = True, **factory: Unpack[FactoryKwargs]
    ) -> None:
        super().__init__()
        self.ops = get_ops(factory.get("ops", "fast"))
        self.eps = eps
        self.weight = empty_parameter(d_model, **factory)
        self.bias = empty_parameter(d_model, **factory) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set g = 1, b = 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise the last dimension."""
        check_width(x, len(self.weight), "LayerNorm")
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class SwiGLU(nn.Module):
    """W2(SiLU(W1 x) ⊙ W3 x)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        bias: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.ops = get_ops(factory.get("ops", "fast"))
        d_ff = default_d_ff(d_model) if d_ff is None else d_ff
        self.w1 = Linear(d_model, d_ff, bias, **factory)
        self.w2 = Linear(d_ff, d_model, bias, **factory)
        self.w3 = Linear(d_model, d_ff, bias, **factory)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the layer to every vector."""
        return self.w2(self.ops.silu(self.w1(x)) * self.w3(x))


class MLP(nn.Module):
    """W2 act(W1 x)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str = "gelu_tanh",
        bias: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
            )
        self.ops = get_ops(factory.get("ops", "fast"))
        self.activation = activation
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.w1 = Linear(d_model, d_ff, bias, **factory)
        self.w2 = Linear(d_ff, d_model, bias, **factory)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the layer to every vector."""
        activate = getattr(self.ops, self.activation)
        return self.w2(activate(self.w1(x)))


class PositionTables(nn.Module):
    """Tables by position: where a model is moved, computed anew, never cast or left unfilled."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        tables, old = dict(self._buffers), next(self.buffers())
        super()._apply(fn, recurse)
        new = next(self.buffers())
        if type(old) is type(new) and old.device == new.device and not old.is_meta:
            self._buffers.update(tables)  # once is enough, though every layer that shares it asks
        else:
            self._build(new.device)  # type: ignore[operator]
        return self


class SinusoidalPositions(PositionTables):
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
        rows = torch.arange(min(self.max_seq_len, TABLE_ELEMENTS // self.d_model), device=device)
        self.register_buffer("table", self._at(rows), persistent=False)

    def _at(self, positions: Tensor) -> Tensor:
        even = torch.arange(0, self.d_model, 2, device=positions.device, dtype=torch.float32)
        angle = positions[..., None] / 10_000 ** (even / self.d_model)  # arXiv:1706.03762, 3.5
        return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)

    def forward(self, positions: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Look every position up."""
        check_range(positions, self.max_seq_len, "position")
        whole = len(self.table) == self.max_seq_len
        return self.table[positions] if whole else self._at(positions)
