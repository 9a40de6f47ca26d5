"""AdamW with a kernel of its own: the formula of `optimizers.py`, all tensors in one launch.

The state is that of the class written out, and of torch's: `step`, `exp_avg`, `exp_avg_sq`; so a
run may change from one to another. A launch moves the tensors of one group that have taken equally
many steps: as a rule, the group. Nothing waits for the device.
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
    Kinds,
    Place,
    Table,
    Tiling,
    move,
)
from scratchlm.training.optimizers import AdamW, run_closure
from scratchlm.training.twins import Twins


@dataclass
class _Alike:
    """Tensors that one launch can move."""

    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


class _Launch(NamedTuple):
    """One launch of a step."""

    group: dict[str, Any]
    t: int  # the step's number, for these tensors
    kinds: Kinds
    alike: _Alike
    table: Table


class KernelAdamW(AdamW):
    """AdamW for contiguous float32 parameters on one GPU (in Triton's interpreter: on a CPU)."""

    tiling = Tiling()
    twins: Twins | None = None

    def write_twins(self, twins: Twins) -> None:
        """From now on, write the rounded copies too of what moves."""
        self.twins = twins

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take parameters up, if they are such as the kernel moves."""
        super().add_param_group(param_group)
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            _check(p, p, params[0].device)
        self._tables: list[Table] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up a state that may be torch's, which counts steps on the device."""
        super().__setstate__(state)
        for values in self.state.values():
            if "step" in values:
                step = torch.as_tensor(values["step"])
                values["step"] = step.detach().to("cpu", torch.float32, copy=True)
        self._tables = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a count for each parameter; here some share one."""
        table = super().state_dict()
        table["state"] = {
            number: {**values, "step": values["step"].clone()}
            for number, values in table["state"].items()
        }
        return table

    def prepare(self) -> list[_Launch]:
        """Do the host's part of a step: sort the tensors, tell the device where they lie.

        The gradients need not be computed yet, if only it is known where they will be.
        """
        launches: list[_Launch] = []
        for group in self.param_groups:
            for (t, kinds), alike in self._sorted(group).items():
                table = self._table(len(launches), alike)
                launches.append(_Launch(group, t, kinds, alike, table))
        return launches

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: Tensor | None = None,
        prepared: list[_Launch] | None = None,
    ) -> Any:
        """Move every parameter that has a gradient once; `scale` multiplies the gradients."""
        loss = run_closure(closure)
        for group, t, kinds, alike, table in self.prepare() if prepared is None else prepared:
            move(table, _factors(group, t), scale, kinds)
            # A count is replaced, never written to: what moves together shares it.
            count = torch.tensor(float(t))
            for state in alike.states:
                state["step"] = count
            torch.autograd.graph.increment_version(alike.params)
            if self.twins is not None:
                self.twins.are_equal(alike.params)
        return loss

    def _sorted(self, group: dict[str, Any]) -> dict[tuple[int, Kinds], _Alike]:
        """Sort what has a gradient by step, and by what the kernel must know of it."""
        found: dict[tuple[int, Kinds], _Alike] = {}
        counts: dict[int, int] = {}  # of a tensor by its id; few are read, many share one
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self._state_of(p, group["moment"])
            count, g, m, v = state["step"], _readable(p.grad), state["exp_avg"], state["exp_avg_sq"]
            if id(count) not in counts:
                counts[id(count)] = int(count) + 1
            twin = None if self.twins is None else self.twins.parts.get(p)
            low = 0 if twin is None else twin.data_ptr()
            place = p.data_ptr(), m.data_ptr(), v.data_ptr(), low, p.numel()
            aligned = (g.data_ptr() | place[0] | place[1] | place[2] | low) % 16 == 0
            kind = counts[id(count)], Kinds(g.dtype, m.dtype, aligned, twin is not None)
            if kind not in found:
                found[kind] = _Alike()
            alike = found[kind]
            alike.params.append(p)
            alike.states.append(state)
            alike.grads.append(g)
            alike.places.append(place)
        return found

    def _table(self, number: int, alike: _Alike) -> Table:
        """Return the table of a step's launch: the last step's, where everything lies as it did."""
        known = number < len(self._tables) and self._tables[number].places == alike.places
        if not known:
            device = alike.params[0].device
            for p, state in zip(alike.params, alike.states, strict=True):
                _check(p, p, device)
                _check(state["exp_avg"], p, device, tuple(TYPES))
                _check(state["exp_avg_sq"], p, device)
            self._tables[number:] = [Table(alike.places, device, self.tiling)]
        table = self._tables[number]
        table.set_gradients([g.data_ptr() for g in alike.grads])
        return table


def _check(
    tensor: Tensor,
    p: Tensor,
    device: torch.device,
    types: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """Refuse what the kernel, which sees addresses alone, would take for something else."""
    if (
        tensor.dtype not in types
        or tensor.device != device
        or tensor.shape != p.shape
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"KernelAdamW moves contiguous float32 tensors on one device ({device}); got "
            f"{tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}, "
            f"stride {tensor.stride()}, for a parameter of shape {tuple(p.shape)}"
        )


def _readable(gradient: Tensor | None) -> Tensor:
    """Return a gradient as the kernel reads it: the same, as a rule."""
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise RuntimeError("KernelAdamW does not support sparse gradients")
    if gradient.dtype not in TYPES:
        gradient = gradient.float()
    return gradient.contiguous()


def _factors(group: dict[str, Any], t: float) -> Factors:
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    return Factors(
        decay=1 - lr * group["weight_decay"],
        rate=lr / (1 - beta1**t),
        root=1 / math.sqrt(1 - beta2**t),
        eps=float(group["eps"]),
        beta1=beta1,
        beta2=beta2,
    )
