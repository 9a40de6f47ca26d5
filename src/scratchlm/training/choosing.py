"""Good defaults: a model and settings that suit the data and the machine.

Rules of thumb, each documented where it is used; explicit settings always win. They aim at a run
of minutes on a small machine and of half an hour on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scratchlm.accounting import Setup, count_parameters, memory, training_flops_per_token
from scratchlm.config import ModelConfig
from scratchlm.training.settings import TrainConfig

WIDTHS = (
    *range(16, 128, 16),
    *range(128, 512, 32),
    *range(512, 2_048, 64),
    *range(2_048, 8_193, 256),
)


@dataclass(frozen=True)
class Machine:
    """The properties the defaults depend on: speed, memory, and whether it is a GPU."""

    matmul_rate: float  # FLOP/s
    is_gpu: bool = False
    memory_bytes: int | None = None

    @property
    def budget_seconds(self) -> float:
        """The default time limit of a run."""
        return 1_800.0 if self.is_gpu else 480.0

    @property
    def utilisation(self) -> float:
        """The fraction of the matmul rate small models usually achieve (MFU)."""
        return 0.3 if self.is_gpu else 0.4


def choose_vocab_size(num_bytes: int, machine: Machine) -> int:
    """Choose 2·√bytes, to the nearest power of two: 2,048 for 1 MB, 8,192 for 16 MB.

    At most 4,096 on a CPU, where a larger head would cost more than all layers.
    """
    size = 2 ** round(math.log2(max(1.0, 2 * math.sqrt(num_bytes))))
    return min(max(size, 512), 32_768 if machine.is_gpu else 4_096)


def choose_context_length(tokens: int, machine: Machine) -> int:
    """Choose 256 on a CPU and 1,024 on a GPU, less if the text is shorter than 64 contexts."""
    longest = 1_024 if machine.is_gpu else 256
    return max(8, min(longest, 2 ** int(math.log2(max(8, tokens / 64)))))


def choose_model(
    tokens: int, vocab_size: int, machine: Machine, params: int | None = None
) -> ModelConfig:
    """Choose a model of `params` parameters, or the largest that data and machine allow.

    The data allows three parameters in the layers per token; the machine as many as it can train
    on six tokens each within its time budget.
    """
    context = choose_context_length(tokens, machine)
    if params is not None:
        return model_of_size(params, vocab_size, context)
    flops = machine.budget_seconds * machine.matmul_rate * machine.utilisation
    chosen = _default_model(vocab_size, context, 64, 2)
    for d_model in (width for width in WIDTHS if width > 64 and width % 32 == 0):
        config = _default_model(vocab_size, context, d_model, max(2, round(d_model / 48)))
        layer_params = count_parameters(config).non_embedding - vocab_size * d_model
        cost = float(training_flops_per_token(config, context)) * 6 * layer_params
        if layer_params > 3 * tokens or cost > flops:
            break
        chosen = config
    return chosen


def model_of_size(params: int, vocab_size: int, context_length: int) -> ModelConfig:
    """Return the default architecture whose parameter count is closest to `params`.

    Depth and width grow together: about 64 channels of width to a layer.
    """
    best: tuple[float, ModelConfig] | None = None
    for d_model in WIDTHS:
        for num_layers in _depths(d_model):
            config = _default_model(vocab_size, context_length, d_model, num_layers)
            ratio = count_parameters(config).unique / params
            if best is None or abs(math.log(ratio)) < best[0]:
                best = abs(math.log(ratio)), config
        if ratio > 4:
            break  # everything wider is larger still
    assert best is not None
    if best[0] > 0.5:
        nearest = count_parameters(best[1]).unique
        raise ValueError(
            f"no model of about {params:,} parameters with vocab_size={vocab_size}: "
            f"the nearest has {nearest:,}"
        )
    return best[1]


def _default_model(
    vocab_size: int, context_length: int, d_model: int, num_layers: int
) -> ModelConfig:
    d_head = 64 if d_model >= 512 else math.gcd(d_model, 32)
    return ModelConfig(vocab_size, context_length, d_model, num_layers, d_model // d_head)


def _depths(d_model: int) -> range:
    typical = d_model // 64
    return range(max(2, typical * 3 // 4), max(4, typical * 5 // 4) + 1)


def choose_settings(model: ModelConfig, tokens: int, machine: Machine) -> TrainConfig:
    """Choose batch, steps and learning rate for a model and its data.

    Steps: twenty tokens for each parameter, but no more than sixteen epochs and no longer than
    the machine's budget. Learning rate: falls with the fourth root of the size.
    """
    params = count_parameters(model).unique
    batch_tokens = min(65_536 if machine.is_gpu else 4_096, tokens // 64)  # 64 updates per epoch
    batch_size = max(1, batch_tokens // model.context_length)
    per_token = float(training_flops_per_token(model, model.context_length))
    budget_flops = machine.budget_seconds * machine.matmul_rate * machine.utilisation
    train_tokens = min(20 * params, 16 * tokens, budget_flops / per_token)
    steps = max(100, round(train_tokens / (batch_size * model.context_length)))
    digits = 10 ** max(0, int(math.log10(steps)) - 1)
    lr = min(4e-3, max(2e-4, 3e-3 * (params / 1e6) ** -0.25))
    settings = TrainConfig(
        steps=round(steps / digits) * digits,
        batch_size=batch_size,
        eval_batches=max(8, steps // 80),  # about a tenth of the time, at 20 evaluations per run
        lr=float(f"{lr:.2g}"),
    )
    return fit_in_memory(model, settings, machine)


def fit_in_memory(model: ModelConfig, settings: TrainConfig, machine: Machine) -> TrainConfig:
    """Halve the micro-batch until a step's predicted memory is within 85 % of a GPU's."""
    if machine.memory_bytes is None or settings.micro_batch_size is not None:
        return settings
    rows, row = settings.batch_size, settings.row_tokens(model)
    while rows > 1 and _peak_memory(model, rows, row) > 0.85 * machine.memory_bytes:
        rows = -(-rows // 2)
    changes = {} if rows == settings.batch_size else {"micro_batch_size": rows}
    return TrainConfig.from_dict({**settings.to_dict(), **changes})


def _peak_memory(model: ModelConfig, rows: int, row_length: int) -> float:
    setup = Setup(phase="training", batch=rows, context=row_length, accumulate=True)
    return float(memory(model, setup).training.value)
