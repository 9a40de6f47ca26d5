"""Good defaults: a model and settings that suit the data and the machine.

Rules of thumb, each said where it is used; whatever a person names stands. They aim at a run of
minutes on a small machine and of half an hour on a GPU.
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
    """What the choice depends on: speed, memory, and whether it is a GPU."""

    matmul_rate: float  # FLOP/s
    is_gpu: bool = False
    memory_bytes: int | None = None

    @property
    def budget_seconds(self) -> float:
        """How long a run may take when nobody says otherwise."""
        return 1_800.0 if self.is_gpu else 480.0

    @property
    def utilisation(self) -> float:
        """How much of the matmul rate small models usually reach."""
        return 0.3 if self.is_gpu else 0.4


def choose_vocab_size(num_bytes: int, machine: Machine) -> int:
    """Choose 2·√bytes, to the nearest power of two: 2,048 for 1 MB, 8,192 for 16 MB.

    At most 4,096 on a CPU, where a larger head would cost more than all layers.
    """
    size = 2 ** round(math.log2(max(1.0, 2 * math.sqrt(num_bytes))))
    return min(max(size, 512), 32_768 if machine.is_gpu else 4_096)


def choose_context_length(tokens: int, machine: Machine) -> int:
    """Choose 256 on a CPU and 1,024 on a GPU, less where the text is shorter than 64 such."""
    most = 1_024 if machine.is_gpu else 256
    return max(8, min(most, 2 ** int(math.log2(max(8, tokens / 64)))))


def choose_model(
    tokens: int, vocab_size: int, machine: Machine, params: int | None = None
) -> ModelConfig:
    """Choose a model of `params` parameters, or the largest that data and machine allow.

    The data allows three parameters in the layers for each of its tokens; the machine as many as
    let it see six tokens for each of them within its time.
    """
    context = choose_context_length(tokens, machine)
    if params is not None:
        return model_of_size(params, vocab_size, context)
    flops = machine.budget_seconds * machine.matmul_rate * machine.utilisation
    chosen = _plain(vocab_size, context, 64, 2)
    for d_model in (width for width in WIDTHS if width > 64 and width % 32 == 0):
        config = _plain(vocab_size, context, d_model, max(2, round(d_model / 48)))
        inside = count_parameters(config).non_embedding - vocab_size * d_model
        cost = float(training_flops_per_token(config, context)) * 6 * inside
        if inside > 3 * tokens or cost > flops:
            break
        chosen = config
    return chosen


def model_of_size(params: int, vocab_size: int, context_length: int) -> ModelConfig:
    """Return the plain model whose parameters come nearest to a count.

    Depth and width grow together: about 64 channels of width to a layer.
    """
    best: tuple[float, ModelConfig] | None = None
    for d_model in WIDTHS:
        for num_layers in _depths(d_model):
            config = _plain(vocab_size, context_length, d_model, num_layers)
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


def _plain(vocab_size: int, context_length: int, d_model: int, num_layers: int) -> ModelConfig:
    d_head = 64 if d_model >= 512 else math.gcd(d_model, 32)
    return ModelConfig(vocab_size, context_length, d_model, num_layers, d_model // d_head)


def _depths(d_model: int) -> range:
    natural = d_model // 64
    return range(max(2, natural * 3 // 4), max(4, natural * 5 // 4) + 1)


def choose_settings(model: ModelConfig, tokens: int, machine: Machine) -> TrainConfig:
    """Choose batch, steps and learning rate for a model and its data.

    Steps: twenty tokens for each parameter, but no more than sixteen passes over the data and no
    longer than the machine's budget. Rate: falls with the fourth root of the size.
    """
    params = count_parameters(model).unique
    batch_tokens = min(65_536 if machine.is_gpu else 4_096, tokens // 64)  # 64 updates a pass
    batch_size = max(1, batch_tokens // model.context_length)
    per_token = float(training_flops_per_token(model, model.context_length))
    affordable = machine.budget_seconds * machine.matmul_rate * machine.utilisation / per_token
    seen = min(20 * params, 16 * tokens, affordable)
    steps = max(100, round(seen / (batch_size * model.context_length)))
    digits = 10 ** max(0, int(math.log10(steps)) - 1)
    lr = min(4e-3, max(2e-4, 3e-3 * (params / 1e6) ** -0.25))
    settings = TrainConfig(
        steps=round(steps / digits) * digits,
        batch_size=batch_size,
        eval_batches=max(8, steps // 80),  # a tenth of the time or so, at 20 evaluations a run
        lr=float(f"{lr:.2g}"),
        compile="block" if machine.is_gpu else "off",
    )
    return fit_in_memory(model, settings, machine)


def fit_in_memory(model: ModelConfig, settings: TrainConfig, machine: Machine) -> TrainConfig:
    """Halve the micro-batch until a step's predicted memory is within 85 % of a GPU's."""
    if machine.memory_bytes is None or settings.micro_batch_size is not None:
        return settings
    rows = settings.batch_size
    while rows > 1 and _peak(model, rows) > 0.85 * machine.memory_bytes:
        rows = -(-rows // 2)
    changes = {} if rows == settings.batch_size else {"micro_batch_size": rows}
    return TrainConfig.from_dict({**settings.to_dict(), **changes})


def _peak(model: ModelConfig, rows: int) -> float:
    setup = Setup(phase="training", batch=rows, accumulate=True)
    return float(memory(model, setup).training.value)
