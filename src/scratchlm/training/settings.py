"""How a model is trained: every choice that a run's outcome depends on besides model and data.

`TrainConfig` is what a person writes, with None for "as suits"; `resolved` fills the gaps. The
resolved one is written beside the run.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from scratchlm import acceleration
from scratchlm.accounting import CHECKPOINTING
from scratchlm.config import ModelConfig
from scratchlm.errors import check_keys

SCHEDULES = ("cosine", "wsd", "constant")
OPTIMIZERS = ("adamw", "muon")
MOMENTS = ("fp32", "bf16")
PRECISIONS = ("fp32", "bf16-mixed", "bf16-residual", "fp8")
COMPILE = ("off", "block", "model")
ROWS = ("windows", "documents")
PARALLEL = ("none", "zero1", "fsdp", "hsdp")
BACKENDS = ("nccl", "gloo")
# What may change between two sessions of a run.
CHANGEABLE = {
    *("steps", "eval_every", "eval_batches", "save_every", "keep_last", "patience", "tasks"),
    *("parallel", "tp", "cp", "backend", "rank_timeout", "compile", "cuda_graph"),
}


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    steps: int = 1_000
    batch_size: int = 32  # sequences in one update
    micro_batch_size: int | None = None  # sequences at a time; None: the whole batch
    seed: int = 0
    # optimizer
    optimizer: str = "adamw"
    lr: float = 1e-3
    min_lr: float | None = None  # where the schedule ends; None: lr / 10
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95  # Muon's
    weight_decay: float = 0.1
    clip: float = 1.0  # the most the gradients' global norm may be; 0: any
    moment: str = "fp32"  # what AdamW keeps its first moment in; bf16 saves 2 bytes a parameter
    fast_optimizer: bool = True  # kernels, ours or torch's; false: written out
    # schedule
    schedule: str = "cosine"
    warmup_steps: int | None = None  # None: a twentieth of the steps, 200 at most
    decay_steps: int | None = None  # of wsd; None: a fifth of the steps
    # sequences
    rows: str = "windows"  # cut anywhere; or "documents": each begins one, which must fit
    row_length: int | None = None  # tokens of a sequence; None: the model's context_length
    # loss
    z_loss: float = 0.0
    document_mask: bool = False  # documents packed in one sequence do not see each other
    ema: float = 0.0  # decay of the weights' moving average; 0: none
    # means
    # bf16-mixed: matmuls and attention; bf16-residual: the stream between layers too; fp8: the
    # layers' matmuls lower still. None: bf16-mixed on a GPU, fp32 elsewhere
    precision: str | None = None
    accelerate: bool | None = None  # fused layers and kernels; None: where available
    compile: str | None = None  # off, block or model; None: block on a GPU, off elsewhere
    checkpointing: str = "none"
    checkpointed_layers: int | None = None  # that many, the first; None: all
    shares: int = 1  # of a batch, computed side by side, a thread each; a CPU's matter
    cuda_graph: bool | None = None  # record forward and backward, replay them; None: on a GPU
    deterministic: bool = False  # only kernels whose sums have one order; a CPU has no others
    # ranks: processes that train together, one a GPU
    parallel: str | None = None  # zero1: each updates its part; fsdp, hsdp: each has a part; none
    tp: int = 1  # ranks that share each layer (tensor parallelism)
    cp: int = 1  # ranks that share each sequence (context parallelism)
    backend: str | None = None  # nccl, or gloo: ranks may share a GPU; None: as the device
    rank_timeout: int = 600  # seconds to wait for another rank before the job ends
    # when
    eval_every: int | None = None  # None: 20 times in the run; 0: never
    eval_batches: int = 0  # of the held-out data; 0: all of it
    tasks: str = ""  # files of tasks, commas between them, run at every evaluation
    save_every: int = 0  # steps; 0: as often as a twentieth of the time allows
    keep_last: int = 2
    patience: int = 0  # stop after this many evaluations without a better one; 0: never

    def __post_init__(self) -> None:
        if not isinstance(self.betas, (list, tuple)) or len(self.betas) != 2:
            raise TypeError(f"betas must be two numbers; got betas={self.betas!r}")
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, least in _WHOLE.items():
            _whole(name, getattr(self, name), least)
        for name, (low, high) in _RANGES.items():
            _number(name, getattr(self, name), low, high)
        if not isinstance(self.tasks, str):
            raise TypeError(f"tasks must be text, commas between files; got tasks={self.tasks!r}")
        for beta in self.betas:
            _number("betas", beta, 0, 1)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (value is None and name in _OPTIONAL):
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        for name in (
            "fast_optimizer",
            "document_mask",
            "deterministic",
            "cuda_graph",
            "accelerate",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPTIONAL):
                raise TypeError(f"{name} must be true or false; got {value!r}")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                "micro_batch_size must not exceed batch_size; got "
                f"micro_batch_size={self.micro_batch_size}, batch_size={self.batch_size}"
            )
        if self.min_lr is not None and self.min_lr > self.lr:
            raise ValueError(f"min_lr must not exceed lr; got min_lr={self.min_lr}, lr={self.lr}")
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(
                "warmup_steps must not exceed steps; got "
                f"warmup_steps={self.warmup_steps}, steps={self.steps}"
            )

    def resolved(self, device_type: str) -> TrainConfig:
        """Fill in what was left to us."""
        every = max(1, self.steps // 20) if self.eval_every is None else self.eval_every
        alone = self.can_record(device_type)
        fill: dict[str, Any] = {
            "micro_batch_size": self.batch_size,
            "min_lr": self.lr / 10,
            "warmup_steps": min(200, self.steps // 20),
            "decay_steps": self.steps // 5,
            "precision": "bf16-mixed" if device_type == "cuda" else "fp32",
            "accelerate": acceleration.is_available(),
            "compile": "block" if alone else "off",
            "cuda_graph": alone,
            "eval_every": every,
        }
        gaps = {name: value for name, value in fill.items() if getattr(self, name) is None}
        return replace(self, **gaps)

    def to_dict(self) -> dict[str, Any]:
        """Write as plain values; what is None is left out."""
        table = {name: value for name, value in asdict(self).items() if value is not None}
        return {**table, "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: Any) -> TrainConfig:
        """Read plain values; unknown keys are refused by name."""
        if not isinstance(values, dict):
            raise TypeError(f"train must be a table; got {type(values).__name__}")
        check_keys(values, [field.name for field in fields(cls)], "train.")
        return cls(**values)

    @classmethod
    def check(cls, values: Any) -> None:
        """Refuse what no run can have, as `from_dict` does; what is not given is taken to fit."""
        roomy = {"steps": 1 << 40, "batch_size": 1 << 24, "lr": 1e300}
        cls.from_dict({**roomy, **values} if isinstance(values, dict) else values)

    @property
    def has_collectives(self) -> bool:
        """Whether ranks talk to each other inside forward and backward."""
        return self.parallel in ("fsdp", "hsdp") or self.tp > 1 or self.cp > 1

    def can_record(self, device_type: str) -> bool:
        """Whether steps can be recorded; beside collectives nor is compiling measured."""
        return device_type == "cuda" and not self.has_collectives

    @property
    def task_files(self) -> list[str]:
        """The files of `tasks`."""
        return [name for name in (part.strip() for part in self.tasks.split(",")) if name]

    def tokens_per_step(self, model: ModelConfig) -> int:
        """Return the tokens of one update."""
        return self.batch_size * self.row_tokens(model)

    def held_out_rows(self) -> int:
        """Return how many rows `eval_batches` are: the same for every number of ranks."""
        return self.eval_batches * min(self.batch_size, self.micro_batch_size or self.batch_size)

    def row_tokens(self, model: ModelConfig) -> int:
        """Return the tokens of one sequence."""
        length = self.row_length or model.context_length
        if length > model.context_length:
            raise ValueError(
                f"row_length must not exceed context_length={model.context_length}; got {length}"
            )
        return length


_WHOLE = {
    "steps": 1,
    "batch_size": 1,
    "micro_batch_size": 1,
    "seed": 0,
    "warmup_steps": 0,
    "decay_steps": 0,
    "eval_every": 0,
    "eval_batches": 0,
    "save_every": 0,
    "keep_last": 1,
    "checkpointed_layers": 0,
    "shares": 1,
    "patience": 0,
    "row_length": 1,
    "tp": 1,
    "cp": 1,
    "rank_timeout": 1,
}
_MOST = {
    "batch_size": 1 << 24,
    "micro_batch_size": 1 << 24,
    "shares": 1 << 10,
    "seed": (1 << 63) - 1,
}
_RANGES: dict[str, tuple[float, float]] = {
    "lr": (0, math.inf),
    "min_lr": (0, math.inf),
    "eps": (0, math.inf),
    "momentum": (0, 1),
    "weight_decay": (0, math.inf),
    "clip": (0, math.inf),
    "z_loss": (0, math.inf),
    "ema": (0, 1),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "optimizer": OPTIMIZERS,
    "moment": MOMENTS,
    "precision": PRECISIONS,
    "compile": COMPILE,
    "rows": ROWS,
    "parallel": PARALLEL,
    "backend": BACKENDS,
    "checkpointing": (*CHECKPOINTING, "selective"),  # which the account does not model yet
}


def _whole(name: str, value: object, least: int) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number; got {name}={value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}; got {name}={value}")
    if value > _MOST.get(name, value):
        raise ValueError(f"{name} must not exceed {_MOST[name]:,}; got {name}={value}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {name}={value!r}")
    if not (math.isfinite(value) and low <= value < high):
        rule = f"in [{low:g}, {high:g})" if math.isfinite(high) else f"finite and >= {low:g}"
        raise ValueError(f"{name} must be {rule}; got {name}={value}")


_OPTIONAL = {field.name for field in fields(TrainConfig) if field.default is None}

# Dotted overrides


def parse_overrides(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Read `model.d_model=256` and `train.lr=1e-3` into nested tables of values.

    A value is read as TOML (numbers, true, "text", [lists]); what is not TOML is plain text.
    """
    tables: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            raise ValueError(f"an override is written section.key=value; got {text!r}")
        if parts[0] not in ("model", "train", "data"):
            raise ValueError(f"an override begins with model., train. or data.; got {text!r}")
        parsed: Any
        try:
            parsed = tomllib.loads(f"value = {value.strip()}")["value"]
        except RecursionError:
            raise ValueError(f"{key.strip()}: the value is nested too deeply") from None
        except tomllib.TOMLDecodeError:
            parsed = value.strip()
        table: dict[str, Any] = tables
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ValueError(f"{text!r} goes into {part!r}, which another override has set")
        table[parts[-1]] = parsed
    return tables


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay one nested table over another; a table with another `type` replaces instead."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            other_kind = "type" in value and value["type"] != old.get("type")
            out[key] = value if other_kind else merge(old, value)
        else:
            out[key] = value
    return out


def parse_count(text: str) -> int:
    """Read a count as people write it: 10M, 1.5B, 300k, 5_000."""
    units: dict[str, float] = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
    word = text.strip().lower().replace("_", "").replace(",", "")
    factor = units.get(word[-1:], 1.0)
    try:
        value = float(word[:-1] if word[-1:] in units else word) * factor
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"expected a count such as 10M, 1.5B or 300k; got {text!r}")
    return round(value)
