"""A mixture of experts: many feed-forward networks, a few of them per token.

p = softmax(R x)                      the router's probabilities
y = Σ over the k largest p_e of  p_e · SwiGLU_e(x)      (p renormalised over the k, if wished)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scratchlm.config import default_d_ff
from scratchlm.model.layers import Linear, _check_width, _init_matrix, _parameter
from scratchlm.ops import Ops, Routed, get_ops


class ExpertLinear(nn.Module):
    """One matrix per expert, stored (experts, out_features, in_features)."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = _parameter(num_experts, out_features, in_features, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw each matrix as `Linear` does."""
        _init_matrix(self.weight, generator)


class MoE(nn.Module):
    """Router and experts. `forward` gives the output, `route` also tells how it was routed."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None,
        num_experts: int,
        experts_per_token: int,
        renormalize: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(
                "experts_per_token must lie between 1 and num_experts; got "
                f"experts_per_token={experts_per_token}, num_experts={num_experts}"
            )
        self.ops = get_ops(ops)
        self.experts_per_token, self.renormalize = experts_per_token, renormalize
        d_ff = default_d_ff(d_model) if d_ff is None else d_ff
        self.router = Linear(d_model, num_experts, device=device, dtype=dtype, ops=ops)
        self.w1 = ExpertLinear(num_experts, d_model, d_ff, device=device, dtype=dtype)
        self.w2 = ExpertLinear(num_experts, d_ff, d_model, device=device, dtype=dtype)
        self.w3 = ExpertLinear(num_experts, d_model, d_ff, device=device, dtype=dtype)

    def route(self, x: Float[Tensor, "*batch d_model"]) -> Routed:
        """Apply the layer, and tell which expert each token went to."""
        _check_width(x, self.router.weight.shape[1], "MoE")
        return self.ops.moe(
            x,
            self.router.weight,
            self.w1.weight,
            self.w2.weight,
            self.w3.weight,
            self.experts_per_token,
            self.renormalize,
        )

    def forward(
        self, x: Float[Tensor, "*batch d_model"], routes: list[Routed] | None = None
    ) -> Float[Tensor, "*batch d_model"]:
        """Apply the layer to every vector; note the routing in `routes`, if given."""
        routed = self.route(x)
        if routes is not None:
            routes.append(routed)
        return routed.output
