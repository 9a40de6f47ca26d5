"""Time of a phase on a machine, component by component: the roofline.

    seconds = max(FLOPs / F_peak, bytes moved / M_bw)

Each component reads its inputs and weights and writes its outputs once, in the matmuls' dtype;
whichever takes longer, arithmetic or memory, bounds it. Launch overhead, overlap between
components and imperfect kernels are ignored: a real run is slower, and the ratio of the two times
is its distance from the machine's limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from scratchlm.accounting.expr import Expr, Num, Number, ceil_div, largest, least
from scratchlm.accounting.flops import Execution, flops_tree
from scratchlm.accounting.items import Node
from scratchlm.accounting.machines import Machine
from scratchlm.accounting.memory import derived
from scratchlm.accounting.money import Mfu
from scratchlm.accounting.setup import Setup, bindings
from scratchlm.accounting.symbols import (
    B,
    E,
    F_peak,
    H,
    H_kv,
    L,
    M_bw,
    N_all,
    P,
    T,
    V,
    b_a,
    b_g,
    b_m,
    b_r,
    b_w,
    d,
    d_ff,
    d_h,
    k,
)
from scratchlm.accounting.work import Work, work
from scratchlm.config import MLP, ModelConfig, MoE, NoNorm, SwiGLU

_ATTENTION = {"Q, K, V projections", "attention", "output projection"}
_FFN = {"W1", "W1, W3", "W2", "router", "experts"}
_RECOMPUTED = {"attention": _ATTENTION, "ffn": _FFN, "block": _ATTENTION | _FFN}


@dataclass(frozen=True)
class Part:
    """A component as two formulas."""

    name: str
    flops: Expr
    bytes: Expr

    @property
    def seconds(self) -> Expr:
        """The roofline."""
        return largest(self.flops / F_peak, self.bytes / M_bw)


@dataclass(frozen=True)
class Step:
    """A step of a generation: a phase, `count` times, with its lengths."""

    name: str
    count: Expr
    phase: str
    lengths: tuple[tuple[str, Expr], ...] = ()


# All steps are timed at their mean length, P + (T − 1) / 2 rounded down.
_MEAN = P + ceil_div(T - 2, 2)
GENERATION_STEPS = {
    "generation": (
        Step("prefill", Num(1), "prefill"),
        Step("decode", T - 1, "decode", (("C", _MEAN),)),
    ),
    "generation-no-cache": (Step("recompute", T, "prefill", (("P", _MEAN),)),),
}
GENERATED_ROWS = B * (P + T - 1)


@dataclass(frozen=True)
class Bound:
    """A component's time on a machine, and what bounds it."""

    name: str
    flops: float
    bytes: float
    seconds: float
    bound: str  # "compute" or "memory"
    symbols: str
    numbers: str

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Roofline:
    """A phase's time at the machine's limits."""

    phase: str
    machine: str
    parts: tuple[Bound, ...]
    seconds: float
    tokens: float  # that pass through the layers
    mfu: Mfu  # what the whole phase reaches at these limits


def roofline_parts(config: ModelConfig, setup: Setup) -> tuple[list[Part], Work]:
    """Return every component's formulas in one phase."""
    phase, execution = setup.phase, setup.execution
    workload = work(config, phase, causal=True, packed=bool(setup.documents))
    parts = _parts(config, workload, execution, 3 if phase == "training" else 1)
    if phase in ("forward", "training"):
        parts.append(_loss(workload, execution, phase == "training"))
    if phase == "training":
        parts.append(_update(setup.optimizer))
        dropped = _RECOMPUTED.get(execution.checkpointing, set())
        recomputed = (
            part for part in _parts(config, workload, execution, 1) if part.name in dropped
        )
        parts += [replace(part, name=f"{part.name}, again") for part in recomputed]
    return parts, workload


def _parts(config: ModelConfig, workload: Work, execution: Execution, times: int) -> list[Part]:
    """Return the components of a forward pass (`times` 1) or of a training step (3)."""
    rows = workload.rows
    return [
        _matmul("Q, K, V projections", rows, d, (H + 2 * H_kv) * d_h, L, times),
        _attention(workload, execution, times),
        _matmul("output projection", rows, H * d_h, d, L, times),
        *_ffn(config, rows, times),
        _elementwise(config, rows, times),
        _matmul("LM head", workload.logit_rows, d, V, Num(1), times),
    ]


def _matmul(name: str, rows: Expr, d_in: Expr, d_out: Expr, layers: Expr, times: int) -> Part:
    moved = b_a * layers * (d_in * d_out + rows * (d_in + d_out))
    return Part(name, 2 * times * layers * rows * d_in * d_out, times * moved)


def _attention(workload: Work, execution: Execution, times: int) -> Part:
    """Fused attention touches Q, K, V and its output only; unfused also the table of scores."""
    decoding = workload.phase == "decode"
    rows, pairs = workload.rows, workload.pairs
    keys = pairs if decoding else rows  # decoding reads the cache
    moved = b_a * L * (2 * H * d_h * rows + 2 * H_kv * d_h * keys)
    matmuls = 2 * times
    if execution.attention == "unfused" and not decoding:
        # scores written, read and written by the softmax, read by the second matmul
        moved = moved + 16 * L * pairs * H
    elif times == 3:
        matmuls = 7  # the fused backward computes QKᵀ once more
    return Part("attention", 2 * matmuls * L * pairs * H * d_h, times * moved)


def _ffn(config: ModelConfig, rows: Expr, times: int) -> list[Part]:
    down = _matmul("W2", rows, d_ff, d, L, times)
    match config.ffn:
        case MoE():
            visits = k * rows
            touched = least(E, visits)  # experts whose weights are read: at most one per visit
            moved = b_a * L * (touched * 3 * d * d_ff + visits * (3 * d + 3 * d_ff))
            experts = Part("experts", 6 * times * L * visits * d * d_ff, times * moved)
            return [_matmul("router", rows, d, E, L, times), experts]
        case SwiGLU():
            return [_matmul("W1, W3", rows, d, 2 * d_ff, L, times), down]
        case MLP():
            return [_matmul("W1", rows, d, d_ff, L, times), down]
        case _:
            assert_never(config.ffn)


def _elementwise(config: ModelConfig, rows: Expr, times: int) -> Part:
    """Norms, residual sums, RoPE and the activation: memory traffic only."""
    norms = 0 if isinstance(config.norm, NoNorm) else 2
    width = k * d_ff if isinstance(config.ffn, MoE) else d_ff
    residual = (norms * (b_r + b_a) + 2 * (2 * b_r + b_a)) * d
    activations = b_a * (2 * (H + H_kv) * d_h + 3 * width)
    return Part(
        "norms, residuals, activations", Num(0), times * L * rows * (residual + activations)
    )


def _loss(workload: Work, execution: Execution, gradient: bool) -> Part:
    """A fused loss reads each slice of logits, and overwrites it with dlogits."""
    logits = workload.logit_rows * V
    if execution.loss == "fused":
        return Part("loss", Num(0), (2 if gradient else 1) * b_a * logits)
    return Part("loss", Num(0), 4 * (8 if gradient else 4) * logits)  # float32, read or written


def _update(optimizer: str) -> Part:
    states = {"adamw": 2, "sgd": 0, "sgd-momentum": 1, "muon": 1}[optimizer]
    # read gradient and weight, write weight, read and write each state
    return Part("optimizer", Num(0), (b_g + 2 * b_w + 2 * states * b_m) * N_all)


def roofline(config: ModelConfig, setup: Setup, machine: Machine) -> Roofline:
    """Time a phase at the machine's limits."""
    if setup.phase in ("generation", "generation-no-cache"):
        return _generation(config, setup, machine)
    parts, workload = roofline_parts(config, setup)
    env = roofline_env(config, setup, machine, workload)
    bounds = [_bound(part, env) for part in parts]
    return _summed(config, setup, machine, bounds, float(workload.rows.value(env)))


def roofline_env(
    config: ModelConfig, setup: Setup, machine: Machine, workload: Work
) -> dict[str, Number]:
    """Bind every symbol of the formulas of a phase."""
    env = bindings(config, setup)
    env |= {name: formula.value(env) for name, formula in derived(config).items()}
    env |= {"F_peak": machine.peak(setup.precision), "M_bw": machine.bandwidth}
    return dict(Node("work", where=workload.where).bind(env))


def _bound(part: Part, env: dict[str, Number]) -> Bound:
    flops, moved = float(part.flops.value(env)), float(part.bytes.value(env))
    return Bound(
        part.name,
        flops,
        moved,
        float(part.seconds.value(env)),
        "compute" if flops / env["F_peak"] >= moved / env["M_bw"] else "memory",
        part.seconds.symbols(),
        part.seconds.numbers(env),
    )


def _generation(config: ModelConfig, setup: Setup, machine: Machine) -> Roofline:
    """Time a generation as its steps: the weights are read in each of them.

    All steps are timed at their mean length, which is exact for costs proportional to it.
    """
    env = bindings(config, setup)
    fields = {"C": "cache", "P": "prompt"}
    steps = []
    for step in GENERATION_STEPS[setup.phase]:
        lengths = {fields[name]: int(length.value(env)) for name, length in step.lengths}
        step_setup = replace(setup, phase=step.phase, **lengths)  # type: ignore[arg-type]
        steps.append((step.name, int(step.count.value(env)), step_setup))
    bounds = [
        replace(
            part,
            name=f"{name}: {part.name}",
            flops=part.flops * count,
            bytes=part.bytes * count,
            seconds=part.seconds * count,
            symbols=f"steps·{part.symbols}",
            numbers=f"{count:,} × {part.numbers}",
        )
        for name, count, step in steps
        if count
        for part in roofline(config, step, machine).parts
    ]
    return _summed(config, setup, machine, bounds, float(GENERATED_ROWS.value(env)))


def _summed(
    config: ModelConfig, setup: Setup, machine: Machine, bounds: list[Bound], tokens: float
) -> Roofline:
    seconds = sum(bound.seconds for bound in bounds)
    env = bindings(config, setup)
    full = float(flops_tree(config, setup.phase, "full").value(env))
    peak = machine.peak_name(setup.precision)
    return Roofline(
        phase=setup.phase,
        machine=machine.name,
        parts=tuple(bounds),
        seconds=seconds,
        tokens=tokens,
        mfu=Mfu(full / seconds / machine.peak(setup.precision), "full", peak),
    )
