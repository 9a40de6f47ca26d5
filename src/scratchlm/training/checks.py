"""What is refused before a run begins: settings that cannot apply to its device and its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scratchlm import acceleration
from scratchlm.errors import ScratchLMError
from scratchlm.training.settings import TrainConfig

if TYPE_CHECKING:
    from scratchlm.parallel.ranks import Ranks


def check_ranks(settings: TrainConfig, ranks: Ranks | None) -> None:
    """Refuse by name a setting that cannot apply to so many ranks."""
    if ranks is None:
        asked = settings.parallel not in (None, "none")
        cut = "tp" if settings.tp > 1 else "cp"
        name = f"parallel={settings.parallel}" if asked else f"{cut}={getattr(settings, cut)}"
        if asked or settings.tp > 1 or settings.cp > 1:
            raise ScratchLMError(
                f"train.{name} needs several ranks (torchrun, or --gpus N); on one, "
                f"train.parallel=none train.{cut}=1"
            )
        return
    if settings.parallel == "none":
        raise ScratchLMError(f"train.parallel=none is for one rank; there are {ranks.size}")
    for name in ("ema", "shares"):
        if getattr(settings, name) > (name == "shares"):
            raise ScratchLMError(f"train.{name} does not go with several ranks")
    if settings.cp > 1 and (settings.tp > 1 or settings.parallel not in (None, "zero1")):
        raise ScratchLMError("train.cp goes with train.parallel=zero1 alone, without train.tp")
    if settings.has_collectives:
        for name, wrong in (
            ("cuda_graph", settings.cuda_graph),
            ("precision=fp8", settings.precision == "fp8"),
        ):
            if wrong:
                raise ScratchLMError(
                    f"train.{name} does not go with train.parallel=fsdp, hsdp, train.tp or cp"
                )
    rows, ranks_of_data = settings.batch_size, ranks.row_size
    if rows < ranks_of_data:
        raise ScratchLMError(
            f"train.batch_size={rows} must give each of {ranks_of_data} ranks a row"
            + (" (or to as many sharing one: train.cp)" if settings.cp == 1 else "")
        )
    micro = settings.micro_batch_size or rows
    passes = {-(-n // micro) for n in (rows // ranks_of_data, -(-rows // ranks_of_data))}
    if settings.has_collectives and len(passes) > 1:
        raise ScratchLMError(
            f"train.batch_size={rows} gives {ranks_of_data} ranks different numbers of "
            f"micro-batches of {micro}; with fsdp or tp they must be equal"
        )


def check_applicable(settings: TrainConfig, device: str) -> None:
    """Refuse by name a setting that cannot apply to a model on such a device."""
    if settings.cuda_graph and device != "cuda":
        raise ScratchLMError(f"train.cuda_graph needs a CUDA device; the model is on {device}")
    if settings.shares > 1 and device != "cpu":
        raise ScratchLMError(f"train.shares is for a CPU; the model is on {device}")
    if settings.precision == "fp8" and device != "cuda":
        raise ScratchLMError(f"train.precision=fp8 needs a CUDA device; the model is on {device}")
    if settings.precision == "fp8" and not settings.accelerate:
        raise ScratchLMError("train.precision=fp8 needs train.accelerate")
    if settings.accelerate and not acceleration.is_available():
        raise ScratchLMError("train.accelerate needs scratchlm.accelerate, which is not there")
    if settings.checkpointed_layers is not None and settings.checkpointing == "none":
        raise ScratchLMError("train.checkpointed_layers needs train.checkpointing")


def check_loss(settings: TrainConfig, is_own: bool) -> None:
    """Refuse what acts in the model's own loss alone, where another one is learnt by."""
    for name, asked in (
        ("z_loss", settings.z_loss),
        ("compile=model", settings.compile == "model"),
    ):
        if asked and not is_own:
            raise ScratchLMError(f"train.{name} is for the loss of next tokens alone")


def check_overrides(values: dict[str, Any], device: str, ranks: Ranks | None = None) -> None:
    """Refuse settings that cannot apply before anything is made, as `check_applicable` does."""
    about = {"cuda_graph", "shares", "precision", "accelerate", "parallel", "tp", "cp", "ema"}
    about |= {"checkpointing", "checkpointed_layers"}
    given = {name: values[name] for name in about if name in values}
    settings = TrainConfig.from_dict({"batch_size": 1 << 24, **given}).resolved(device)
    check_applicable(settings, device)
    check_ranks(settings, ranks)
