"""A mixture of experts: many feed-forward networks, a few of them per token.

p = softmax(R x)                      the router's probabilities
y = Σ over the k largest p_e of  p_e · SwiGLU_e(x)      (p renormalised over the k, if wished)
"""

from __future__ import annotations

from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm.config import default_d_ff
from scratchlm.model.layers import FactoryKwargs, Linear, empty_parameter, init_matrix
from scratchlm.ops import Routed, get_ops


class ExpertLinear(nn.Module):
    """One matrix per expert, stored (experts, out_features, in_features)."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.ops = get_ops(factory.get("ops", "fast"))
        self.weight = empty_parameter(num_experts, out_features, in_features, **factory)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw each matrix as `Linear` does."""
        init_matrix(self.weight, generator)

    def forward(
        self, x: Float[Tensor, "rows d_in"], ends: Int[Tensor, " experts"]
    ) -> Float[Tensor, "rows d_out"]:
        """Apply each expert's map to its rows; those of expert e end before row `ends[e]`."""
        return self.ops.grouped_linear(x, self.weight, ends)


class MoE(nn.Module):
    """Router and experts. `forward` gives the output, `route` also tells how it was routed."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None,
        num_experts: int,
        experts_per_token: int,
        renormalize: bool = True,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        if not 1 <= experts_per_token <= num_experts:
            got = f"experts_per_token={experts_per_token}, num_experts={num_experts}"
            raise ValueError(f"experts_per_token must lie between 1 and num_experts; got {got}")
        self.ops = get_ops(factory.get("ops", "fast"))
        self.experts_per_token, self.renormalize = experts_per_token, renormalize
        d_ff = default_d_ff(d_model) if d_ff is None else d_ff
        self.router = Linear(d_model, num_experts, **factory)
        self.w1 = ExpertLinear(num_experts, d_model, d_ff, **factory)
        self.w2 = ExpertLinear(num_experts, d_ff, d_model, **factory)
        self.w3 = ExpertLinear(num_experts, d_model, d_ff, **factory)

    def route(self, x: Float[Tensor, "*batch d_model"]) -> Routed:
        """Apply the layer, and tell which expert each token went to."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.ops.route(self.router(tokens), self.experts_per_token, self.renormalize)
        probabilities, weights, experts = routing  # weights and experts: (tokens, chosen)
        order, ends = sort_by_expert(experts, probabilities.shape[-1])
        token = order // self.experts_per_token
        rows = tokens[token]  # each expert's tokens, one expert after the other
        hidden = self.ops.silu(self.w1(rows, ends)) * self.w3(rows, ends)
        weight = weights.to(x.dtype).flatten()[order, None]
        output = torch.zeros_like(tokens).index_add(0, token, self.w2(hidden, ends) * weight)
        return Routed(output.view_as(x), probabilities, experts)

    def forward(
        self, x: Float[Tensor, "*batch d_model"], routes: list[Routed] | None = None
    ) -> Float[Tensor, "*batch d_model"]:
        """Apply the layer to every vector; note the routing in `routes`, if given."""
        routed = self.route(x)
        if routes is not None:
            routes.append(routed)
        return routed.output


def sort_by_expert(experts: Int[Tensor, "tokens k"], num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the choices in the order of their experts, and where each expert's end."""
    order = experts.flatten().argsort(stable=True)
    load = torch.zeros(num_experts, dtype=torch.int32, device=experts.device)
    load = load.index_add(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
    return order, load.cumsum(0, dtype=torch.int32)
