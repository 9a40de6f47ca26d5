"""`scratchlm train --from MODEL`: begin with the weights and the tokenizer of another model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratchlm.config import Learned, ModelConfig
from scratchlm.errors import ScratchLMError
from scratchlm.training.choosing import Machine, choose_settings

if TYPE_CHECKING:
    from scratchlm.data.token_file import TokenFileInfo
    from scratchlm.training import DataFiles, Plan, Start, TrainConfig

EPOCHS, LR_FACTOR = 3, 0.1  # of what is chosen for random weights
ROW = 1024  # tokens of a sequence, if the model's context allows it


@dataclass(frozen=True)
class StartModel:
    """What a run takes over: a config, a tokenizer, and where they lie."""

    config: ModelConfig
    source: Path
    fingerprint: str

    def tokenizer_file(self, files: DataFiles) -> Path:
        """Return the tokenizer to keep in the run's checkpoints."""
        beside = files.train.parent / "tokenizer.json"
        return beside if beside.is_file() else self.source / "tokenizer.json"

    def check_tokens(self, info: TokenFileInfo) -> None:
        """Refuse token files of another tokenizer: their ids mean something else to the model."""
        if info.tokenizer != self.fingerprint:
            raise ScratchLMError(
                f"the data was encoded with another tokenizer than that of {self.source}: "
                f"expected fingerprint {self.fingerprint[:16]}, got {info.tokenizer[:16]}"
            )


def start_model(path: Path, model_table: dict[str, Any]) -> StartModel:
    """Look at the model to start from, without its weights."""
    from scratchlm.tokenizer import load_tokenizer

    source, config = _find(path)
    _check_weights_learn(source)
    if not any((source / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ScratchLMError(f"{source}: no tokenizer there; training on text needs the model's")
    context = model_table.get("context_length", config.context_length)
    if context != config.context_length:
        if isinstance(config.positions, Learned):
            raise ValueError(
                f"model.context_length cannot change: {path} has learned "
                f"{config.context_length} positions"
            )
        config = config.replace(context_length=context)
    return StartModel(config, source, load_tokenizer(source).fingerprint())


def _check_weights_learn(source: Path) -> None:
    """Refuse a checkpoint that says it is no language model with wide weights."""
    from scratchlm import checkpoint

    if not checkpoint.is_checkpoint(source):
        return
    metadata = checkpoint.read_manifest(source)["metadata"]
    if metadata.get("quantization"):
        raise ScratchLMError(f"{source}: quantised weights cannot be trained; give the wide model")
    if metadata.get("head"):
        raise ScratchLMError(f"{source}: a model with a task head cannot be fine-tuned further")


def _find(path: Path) -> tuple[Path, ModelConfig]:
    """Return the folder of the weights, of a run its best checkpoint, and the model's config."""
    from scratchlm import checkpoint
    from scratchlm.interop import is_hf_directory, read_hf

    if not path.exists():
        raise ScratchLMError(f"{path}: no such run, checkpoint or Hugging Face directory")
    if checkpoint.is_checkpoint(path):
        return path, checkpoint.read_config(path)
    if is_hf_directory(path):
        return path, read_hf(path).config
    found = checkpoint.choose_checkpoint(path)
    if found is None:
        raise ScratchLMError(
            f"{path}: must be a run with a checkpoint, a checkpoint, or a Hugging Face directory"
        )
    return found, checkpoint.read_config(found)


def start_folder(path: Path) -> Path:
    """Return the folder of the weights a run starts from: of a run, its best checkpoint.

    One that is gone is named as it was: the run has its weights already.
    """
    return _find(path)[0] if path.is_dir() else path


def fine_tuning_settings(
    model: ModelConfig, tokens: int, machine: Machine, row_length: int | None = None
) -> TrainConfig:
    """Choose settings as for random weights, with a tenth of the rate and three epochs at most.

    A model's context may be far longer than what a step can hold: rows are of 1,024 tokens, if
    nothing else is asked for.
    """
    row = min(model.context_length, row_length or ROW)
    chosen = choose_settings(model.replace(context_length=row), tokens, machine)
    steps = max(1, EPOCHS * tokens // (chosen.batch_size * row))
    return replace(
        chosen,
        lr=chosen.lr * LR_FACTOR,
        steps=min(chosen.steps, steps),
        row_length=row if row < model.context_length else None,
    )


def template_of(plan: Plan) -> bytes | None:
    """Return the chat template a run's checkpoints carry: the run's own, or that of its start."""
    from scratchlm.tokenizer.chat_template import ChatTemplate

    places = [None if plan.data.tokenizer is None else plan.data.tokenizer.parent]
    if plan.start is not None:
        places.append(_find(plan.start)[0] if plan.start.is_dir() else None)
    for place in places:
        found = None if place is None else ChatTemplate.from_directory(place)
        if found is not None:
            return found.to_bytes()
    return None


def load_start(plan: Plan) -> Start:
    """Load the weights a run begins with, in float32."""
    import torch

    from scratchlm.inference import load_model
    from scratchlm.inference.adapters import base_fingerprint
    from scratchlm.training import Start

    assert plan.start is not None
    loaded = load_model(plan.start, dtype=torch.float32, accelerate=False)
    if loaded.is_quantized:
        raise ScratchLMError(f"{plan.start}: quantised weights cannot be trained")
    fingerprint = base_fingerprint(loaded.source)
    return Start(loaded.model.state_dict(), loaded.eos_ids, loaded.source, fingerprint)
