"""MFU, with its convention and peak; time and cost of a training run.

MFU     = FLOPs per token · tokens/s / (GPUs · F_peak)
seconds = FLOPs per token · D / (MFU · F_peak · G)
"""

from __future__ import annotations

from dataclasses import dataclass

from scratchlm.accounting.expr import Expr, Number
from scratchlm.accounting.flops import training_flops_per_token
from scratchlm.accounting.items import Item, evaluate, leaf
from scratchlm.accounting.machines import Machine
from scratchlm.accounting.parameters import count_parameters
from scratchlm.accounting.symbols import D, F_peak, G, Sym, u
from scratchlm.config import ModelConfig

# arXiv:2203.15556, table 3: compute-optimal training sees about 20 tokens per parameter.
TOKENS_PER_PARAMETER = 20
DEFAULT_MFU = 0.4
RUN_SECONDS: Expr = Sym("F_token") * D / (u * F_peak * G)


@dataclass(frozen=True)
class Mfu:
    """Model FLOPs utilisation: the number, which FLOPs it counts, and of which peak."""

    value: float
    convention: str
    peak: str

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.convention} FLOPs of {self.peak})"


def mfu(
    tokens_per_second: float,
    config: ModelConfig,
    seq: int,
    peak: Machine | float,
    convention: str = "full",
    precision: str = "bf16-mixed",
    gpus: int = 1,
) -> Mfu:
    """Return the utilisation of a training run; `peak` is a machine or a measured FLOP/s."""
    if tokens_per_second < 0 or gpus < 1:
        raise ValueError(
            "tokens_per_second must not be negative and gpus at least 1; got "
            f"tokens_per_second={tokens_per_second}, gpus={gpus}"
        )
    if isinstance(peak, Machine):
        rate, name = peak.peak(precision), peak.peak_name(precision)
    else:
        rate, name = float(peak), f"a measured {peak / 1e12:,.4g} TFLOP/s"
    if not rate > 0:
        raise ValueError(f"peak must be greater than 0; got {rate}")
    flops = training_flops_per_token(config, seq, convention)
    return Mfu(flops * tokens_per_second / (rate * gpus), convention, name)


@dataclass(frozen=True)
class Training:
    """A training run's time and cost."""

    tokens: int
    suggested_tokens: int  # 20 per parameter
    flops_per_token: Number
    mfu: Mfu
    machine: str
    gpus: int
    seconds: Item
    price: float | None  # dollars per GPU-hour
    dollars: float | None

    @property
    def days(self) -> float:
        """The run's length."""
        return float(self.seconds.value) / 86_400

    @property
    def gpu_hours(self) -> float:
        """GPU-hours, over all GPUs."""
        return float(self.seconds.value) / 3_600 * self.gpus

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs."""
        return self.tokens / float(self.seconds.value)


def suggested_tokens(config: ModelConfig) -> int:
    """Return about how many tokens are compute-optimal for this size."""
    return TOKENS_PER_PARAMETER * count_parameters(config).active


def training_run(
    config: ModelConfig,
    machine: Machine,
    seq: int,
    tokens: int | None = None,
    utilisation: float = DEFAULT_MFU,
    gpus: int = 1,
    price: float | None = None,
    convention: str = "full",
    precision: str = "bf16-mixed",
) -> Training:
    """Return days and dollars for a token budget (default: the suggested one) at an MFU."""
    if not 0 < utilisation <= 1:
        raise ValueError(f"mfu must lie in (0, 1]; got {utilisation}")
    if price is not None and not price >= 0:
        raise ValueError(f"price must not be negative; got {price}")
    suggested = suggested_tokens(config)
    tokens = suggested if tokens is None else tokens
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1; got {tokens}")
    per_token = training_flops_per_token(config, seq, convention)
    peak = machine.peak(precision)
    env = {"F_token": per_token, "D": tokens, "u": utilisation, "F_peak": peak, "G": gpus}
    seconds = evaluate(leaf("training time", RUN_SECONDS, "s"), env)
    price = machine.price if price is None else price
    hours = float(seconds.value) / 3_600 * gpus
    return Training(
        tokens=tokens,
        suggested_tokens=suggested,
        flops_per_token=per_token,
        mfu=Mfu(utilisation, convention, machine.peak_name(precision)),
        machine=machine.name,
        gpus=gpus,
        seconds=seconds,
        price=price,
        dollars=None if price is None else hours * price,
    )
