"""AdamW by a multi-tensor kernel: the formula of `optimizers.py`, all tensors in one launch.

The state is that of our `AdamW` and of torch's (`step`, `exp_avg`, `exp_avg_sq`), so a run may
switch between them. One launch updates the tensors of a group that have taken equally many steps:
usually the whole group. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scratchlm.accelerate.kernels.triton.adamw import (
    TYPES,
    Factors,
    Row,
    Table,
    Tiling,
    Variant,
    update,
)
from scratchlm.accelerate.shadow_weights import ShadowWeights
from scratchlm.training.optimizers import AdamW, run_closure


@dataclass
class _Batch:
    """Tensors that one launch can update."""

    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


class _Launch(NamedTuple):
    """One kernel launch of a step."""

    group: dict[str, Any]
    t: int  # the number of the step for these tensors
    variant: Variant
    batch: _Batch
    table: Table


class KernelAdamW(AdamW):
    """AdamW for contiguous float32 parameters on one GPU (in Triton's interpreter: on a CPU)."""

    tiling = Tiling()
    shadow_weights: ShadowWeights | None = None

    def write_shadow_weights(self, shadow_weights: ShadowWeights) -> None:
        """From now on, also write the bf16 shadow of each updated parameter."""
        self.shadow_weights = shadow_weights

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, if the kernel supports them."""
        super().add_param_group(param_group)
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            _check(p, p, params[0].device)
        self._tables: list[Table] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state, possibly torch's, which may count steps on the device."""
        super().__setstate__(state)
        for values in self.state.values():
            if "step" in values:
                step = torch.as_tensor(values["step"])
                values["step"] = step.detach().to("cpu", torch.float32, copy=True)
        self._tables = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a `step` tensor per parameter; internally some share one."""
        table = super().state_dict()
        table["state"] = {
            number: {**values, "step": values["step"].clone()}
            for number, values in table["state"].items()
        }
        return table

    def prepare(self) -> list[_Launch]:
        """Do the host's part of a step: group the tensors and send their addresses.

        The gradients need not be computed yet, only allocated.
        """
        launches: list[_Launch] = []
        for group in self.param_groups:
            for (t, variant), batch in self._batches(group).items():
                table = self._table(len(launches), batch)
                launches.append(_Launch(group, t, variant, batch, table))
        return launches

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: Tensor | None = None,
        prepared: list[_Launch] | None = None,
    ) -> Any:
        """Update every parameter that has a gradient; `scale` multiplies the gradients."""
        loss = run_closure(closure)
        for group, t, variant, batch, table in self.prepare() if prepared is None else prepared:
            update(table, _factors(group, t), scale, variant)
            # Replaced, never written in place: the tensors of a batch share it.
            count = torch.tensor(float(t))
            for state in batch.states:
                state["step"] = count
            torch.autograd.graph.increment_version(batch.params)
            if self.shadow_weights is not None:
                self.shadow_weights.mark_equal(batch.params)
        return loss

    def _batches(self, group: dict[str, Any]) -> dict[tuple[int, Variant], _Batch]:
        """Group the parameters that have a gradient by step and by kernel variant."""
        found: dict[tuple[int, Variant], _Batch] = {}
        counts: dict[int, int] = {}  # by the id of a `step` tensor: few are read, many share one
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self._state_of(p, group["moment"])
            count, g, m, v = state["step"], _readable(p.grad), state["exp_avg"], state["exp_avg_sq"]
            if id(count) not in counts:
                counts[id(count)] = int(count) + 1
            shadow = None if self.shadow_weights is None else self.shadow_weights.parts.get(p)
            shadow_address = 0 if shadow is None else shadow.data_ptr()
            row = p.data_ptr(), m.data_ptr(), v.data_ptr(), shadow_address, p.numel()
            aligned = (g.data_ptr() | row[0] | row[1] | row[2] | shadow_address) % 16 == 0
            key = counts[id(count)], Variant(g.dtype, m.dtype, aligned, shadow is not None)
            batch = found.setdefault(key, _Batch())
            batch.params.append(p)
            batch.states.append(state)
            batch.grads.append(g)
            batch.rows.append(row)
        return found

    def _table(self, number: int, batch: _Batch) -> Table:
        """Return the table of a step's launch: the last step's, if no address has changed."""
        is_known = number < len(self._tables) and self._tables[number].rows == batch.rows
        if not is_known:
            device = batch.params[0].device
            for p, state in zip(batch.params, batch.states, strict=True):
                _check(p, p, device)
                _check(state["exp_avg"], p, device, tuple(TYPES))
                _check(state["exp_avg_sq"], p, device)
            self._tables[number:] = [Table(batch.rows, device, self.tiling)]
        table = self._tables[number]
        table.set_grads([g.data_ptr() for g in batch.grads])
        return table


def _check(
    tensor: Tensor,
    p: Tensor,
    device: torch.device,
    types: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """Reject a tensor that the kernel, which sees only addresses, would misread."""
    if (
        tensor.dtype not in types
        or tensor.device != device
        or tensor.shape != p.shape
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"KernelAdamW updates contiguous float32 tensors on one device ({device}); got "
            f"{tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}, "
            f"stride {tensor.stride()}, for a parameter of shape {tuple(p.shape)}"
        )


def _readable(grad: Tensor | None) -> Tensor:
    """Return a gradient as the kernel reads it: usually unchanged."""
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError("KernelAdamW does not support sparse gradients")
    if grad.dtype not in TYPES:
        grad = grad.float()
    return grad.contiguous()


def _factors(group: dict[str, Any], t: float) -> Factors:
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    return Factors(
        decay=1 - lr * group["weight_decay"],
        step_size=lr / (1 - beta1**t),
        inv_sqrt_correction=1 / math.sqrt(1 - beta2**t),
        eps=float(group["eps"]),
        beta1=beta1,
        beta2=beta2,
    )
