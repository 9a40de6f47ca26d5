"""What a model is asked to do and how: everything an account depends on besides the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scratchlm.accounting.expr import Expr, Number, ceil_div, largest, least
from scratchlm.accounting.flops import Execution
from scratchlm.accounting.machines import NODE
from scratchlm.accounting.parameters import active_parameters
from scratchlm.accounting.symbols import G_t, P, S, model_symbols
from scratchlm.accounting.work import PHASES, document_pairs
from scratchlm.config import ModelConfig
from scratchlm.quantization.rule import TARGETS

# name -> bytes per number of each kind, as SYMBOLS says
PRECISIONS: dict[str, dict[str, int]] = {
    "fp32": {"b_w": 4, "b_g": 4, "b_m": 4, "b_a": 4, "b_r": 4, "b_c": 0, "b_s": 4, "b_kv": 4},
    # torch.autocast over float32 weights: matmuls and what is between them in bfloat16
    "bf16-mixed": {"b_w": 4, "b_g": 4, "b_m": 4, "b_a": 2, "b_r": 4, "b_c": 2, "b_s": 2, "b_kv": 2},
    # unfused attention widens to float32 itself
    "bf16": {"b_w": 2, "b_g": 2, "b_m": 2, "b_a": 2, "b_r": 2, "b_c": 0, "b_s": 4, "b_kv": 2},
}
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "muon")
# How several GPUs share the work: `ranks.py` says what each of them then holds.
PARALLEL = ("none", "zero1", "fsdp", "hsdp", "tp", "ddp")
# Tokens of a sequence whose norms and residuals one of G_t ranks has: a part where that divides.
SEQUENCE_SHARE: Expr = S / (1 + (G_t - 1) * (1 - least(1, G_t * ceil_div(S, G_t) - S)))
MAX_SIZE = 2**40  # of a length, a batch or a number of GPUs
# Lengths that are not given: a prompt of half the context, rounded down, and the rest to generate.
DEFAULT_LENGTHS: dict[str, Expr] = {
    "C": S - 1,
    "P": largest(1, ceil_div(S - 1, 2)),
    "T": largest(1, S - P),
}


@dataclass(frozen=True)
class Setup:
    """The work and its means. `None` for a length means the model's context length."""

    phase: str = "forward"
    batch: int = 1  # sequences on each GPU
    context: int | None = None  # S: tokens in a sequence
    documents: tuple[int, ...] = ()  # lengths of documents packed into a sequence; () is one
    prompt: int | None = None  # P; default: half the context
    cache: int | None = None  # C: tokens already cached at a decode step; default: context − 1
    new_tokens: int | None = None  # T; default: the rest of the context
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    execution: Execution = field(default_factory=Execution)
    accumulate: bool = False  # gradients live through the forward pass too
    micro_batches: int = 1  # in an update
    parallel: str = "none"
    gpus: int = 1
    tp: int | None = None  # GPUs a layer is cut across; None: all with parallel="tp", else 1
    quantize: str | None = None  # what the weights are stored as while serving

    def __post_init__(self) -> None:
        _choice("phase", self.phase, PHASES)
        _choice("precision", self.precision, tuple(PRECISIONS))
        _choice("optimizer", self.optimizer, OPTIMIZERS)
        _choice("parallel", self.parallel, PARALLEL)
        if self.quantize is not None:
            _choice("quantize", self.quantize, TARGETS)
            if self.parallel in ("fsdp", "hsdp", "tp"):
                raise ValueError(f"quantised weights are whole on each GPU, not {self.parallel}")
        for name in ("batch", "gpus", "micro_batches"):
            _count(name, getattr(self, name))
        self._check_tensor_ranks()
        for name in ("context", "prompt", "new_tokens"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name))
        if self.cache is not None:
            _count("cache", self.cache, least=0)
        for length in self.documents:
            _count("documents", length)

    def _check_tensor_ranks(self) -> None:
        if self.tp is None:
            return
        _count("tp", self.tp)
        if self.gpus % self.tp:
            raise ValueError(f"gpus must be divisible by tp; got gpus={self.gpus}, tp={self.tp}")
        if self.parallel == "tp" and self.tp != self.gpus:
            raise ValueError(
                "parallel=tp cuts layers across all GPUs: with fewer, say zero1 or fsdp; "
                f"got gpus={self.gpus}, tp={self.tp}"
            )
        if self.quantize is not None and self.tp > 1:
            raise ValueError("quantised weights are whole on each GPU, not cut by tp")

    @property
    def tensor_ranks(self) -> int:
        """GPUs that every layer is cut across, and that share one batch."""
        if self.tp is not None:
            return self.tp
        return self.gpus if self.parallel == "tp" else 1

    @property
    def data_ranks(self) -> int:
        """Groups of GPUs with batches of their own."""
        return self.gpus // self.tensor_ranks

    @property
    def exchange(self) -> str:
        """How data-parallel ranks share the state: zero1, fsdp, hsdp, ddp, or none."""
        if self.parallel == "hsdp" and self.shards == self.data_ranks:
            return "fsdp"  # there is one node
        alone = self.parallel == "zero1" and self.data_ranks == 1
        return "none" if alone or self.parallel == "tp" else self.parallel

    @property
    def shards(self) -> int:
        """Ranks that the state is split over: with hsdp those of one node, in nodes alike."""
        if self.parallel == "hsdp":
            inside = max(1, NODE // self.tensor_ranks)
            fit_one = self.data_ranks <= inside
            return self.data_ranks if fit_one else math.gcd(self.data_ranks, inside)
        return self.data_ranks if self.exchange in ("zero1", "fsdp") else 1

    @property
    def accumulates(self) -> bool:
        """Whether gradients live through the forward pass too."""
        return self.accumulate or self.micro_batches > 1


def bindings(config: ModelConfig, setup: Setup) -> dict[str, Number]:
    """Bind every symbol of the model and the work."""
    s = setup.context or config.context_length
    if setup.documents and sum(setup.documents) != s:
        raise ValueError(
            f"documents must fill the sequence; got {sum(setup.documents)} tokens for context={s}"
        )
    env: dict[str, Number] = {
        **model_symbols(config),
        **PRECISIONS[setup.precision],
        "B": setup.batch,
        "S": s,
        "A": document_pairs(setup.documents or (s,), config.attention.sliding_window),
        "R": setup.shards,
        "G_c": setup.data_ranks // setup.shards,
        "G": setup.gpus,
        "G_d": setup.data_ranks,
        "G_t": setup.tensor_ranks,
        "m": setup.micro_batches,
    }
    env["S_r"] = SEQUENCE_SHARE.value(env)
    given = {"C": setup.cache, "P": setup.prompt, "T": setup.new_tokens}
    for name, default in DEFAULT_LENGTHS.items():
        length = given[name]
        env[name] = default.value(env) if length is None else length
    env["N"] = active_parameters(config).value(env)
    return env


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _count(name: str, value: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number; got {name}={value!r}")
    if not least <= value <= MAX_SIZE:
        raise ValueError(f"{name} must lie between {least} and {MAX_SIZE}; got {name}={value}")
