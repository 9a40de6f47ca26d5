"""Adapters on a loaded model: put into its weights, so that it runs as any other model does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scratchlm import checkpoint
from scratchlm.config import ModelConfig
from scratchlm.config.lora import LoRA
from scratchlm.errors import ScratchLMError
from scratchlm.interop.peft import Adapter, is_peft_directory, read_peft
from scratchlm.model import TransformerLM
from scratchlm.ops.lora import merged_weight
from scratchlm.quantization.convert import round_weights
from scratchlm.quantization.rule import BASES, choose_base
from scratchlm.untrusted import inner_file, open_regular, read_bytes, shown

_PARTS = ("lora_A", "lora_B", "lora_magnitude")
_NAME = "default"  # of the adapter in a run


def base_fingerprint(source: Path) -> str:
    """Identify a base model: ours by the hash of its weights, others by config, names and sizes."""
    if checkpoint.is_checkpoint(source):
        return checkpoint.weights_fingerprint(source)
    digest = hashlib.sha256(read_bytes(inner_file(source, "config.json"), 1 << 20))
    for name in sorted(path.name for path in source.glob("*.safetensors")):
        with open_regular(inner_file(source, name)) as file:
            digest.update(f"{name}:{os.fstat(file.fileno()).st_size}".encode())
    return digest.hexdigest()


def adapter_of(metadata: Mapping[str, Any], where: Path) -> Mapping[str, Any] | None:
    """Return what a checkpoint says of the adapter it holds; None: it holds a whole model."""
    record = metadata.get("adapter")
    if record is None:
        return None
    words = ("base", "base_fingerprint")
    if not isinstance(record, dict) or not all(isinstance(record.get(w), str) for w in words):
        raise ScratchLMError(f"{where}: the adapter must name its base; got {shown(record)}")
    return record


def read_adapter(path: Path) -> Adapter:
    """Read the adapter of one of our checkpoints."""
    record = adapter_of(checkpoint.read_manifest(path)["metadata"], path)
    if record is None:
        raise ScratchLMError(f"{path} holds a whole model, not an adapter")
    try:
        config = LoRA.from_dict(record.get("lora"))
    except (TypeError, ValueError) as error:
        raise ScratchLMError(f"{path}: {error}") from None
    tensors = {}
    for name, tensor in checkpoint.iter_tensors(path):
        plain = name.removesuffix(f".{_NAME}")
        if plain == name or plain.rpartition(".")[2] not in _PARTS:
            raise ScratchLMError(f"{path}: {shown(name)} is no tensor of an adapter")
        tensors[plain] = tensor
    quantize = record.get("quantize")
    if quantize not in (None, *BASES):
        known = " or ".join(BASES)
        raise ScratchLMError(f"{path}: quantize must be {known}; got {shown(quantize)}")
    return Adapter(config, tensors, quantize=quantize)


def find_adapter(path: str | os.PathLike[str], config: ModelConfig) -> Adapter:
    """Read an adapter for a model: a run of ours, a checkpoint, or a directory of PEFT's."""
    path = Path(path)
    if is_peft_directory(path):
        return read_peft(path, config)
    if checkpoint.is_checkpoint(path):
        checkpoint.verify_checkpoint(path)
        return read_adapter(path)
    found = checkpoint.read_chosen(path, read_adapter) if path.is_dir() else None
    if found is None:
        raise ScratchLMError(f"{path}: must be a run that learnt an adapter, or a PEFT directory")
    return found


def check_base(record: Mapping[str, Any], where: Path) -> Path:
    """Return an adapter's base; one that is gone or has changed is refused."""
    base = Path(record["base"])
    if not base.is_dir():
        raise ScratchLMError(f"{where} holds an adapter; its base model is gone: {base}")
    if base_fingerprint(base) != record["base_fingerprint"]:
        raise ScratchLMError(f"{where} holds an adapter; its base model has changed: {base}")
    return base


@torch.no_grad()
def merge_into(model: TransformerLM, adapter: Adapter, where: object) -> None:
    """Put an adapter into a model's weights, in place: into the values it learnt beside."""
    state = model.state_dict()
    if adapter.quantize is not None:
        round_weights(state, choose_base(model.config, adapter.quantize))
    for layer in adapter.layers():
        weight = state.get(f"{layer}.weight")
        a, b, magnitude = (adapter.tensors.get(f"{layer}.{part}") for part in _PARTS)
        if weight is None or a is None or b is None:
            raise ScratchLMError(f"{where}: the adapter joins {shown(layer)}, which does not fit")
        if (len(b), a.shape[1]) != tuple(weight.shape) or b.shape[1] != len(a):
            raise ScratchLMError(f"{where}: the adapter of {shown(layer)} has another shape")
        found = None if magnitude is None else tuple(magnitude.shape)
        if found != ((len(b),) if adapter.config.dora else None):
            raise ScratchLMError(f"{where}: the magnitudes of {shown(layer)} do not fit its config")
        base = adapter.bases.get(layer)
        if base is not None and not _is_same(base, weight):
            raise ScratchLMError(f"{where}: the adapter's base has another {layer}")
        a, b = a.to(weight.device), b.to(weight.device)
        magnitude = None if magnitude is None else magnitude.to(weight.device)
        weight.copy_(merged_weight(weight, a, b, adapter.scale(layer), magnitude))


def _is_same(base: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether two weights are one, rounded to the coarser of their dtypes."""
    base = base.to(weight.device)
    return torch.equal(base.to(weight.dtype), weight) or torch.equal(base, weight.to(base.dtype))
