"""Arguments of `scratchlm account`: a model by name or file, sizes with units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from scratchlm.config import ModelConfig, from_dict, load_config, preset
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import MAX_CONFIG_BYTES, read_json, read_toml

MAX_BYTES = 1 << 60
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

# The forms in which what is asked for can be given.
_FORMS = {
    "verify": (),
    "compare": ("json", "csv", "plot"),
    "sweep": ("json", "csv", "plot"),
    "fits": ("json", "csv"),
    "plans": ("json", "csv"),
    "lora": ("json",),
}
_LEARNS = ("forward", "training")
_GENERATION = ("generation", "generation-no-cache")
_PHASES = {
    "prompt": ("prefill", *_GENERATION),
    "new-tokens": _GENERATION,
    "documents": _LEARNS,
}

# Options without effect on what is shown.
_MONEY = ("tokens", "mfu", "price")
_UNUSED = {
    "verify": ("convention", "gpu", *_MONEY),
    "compare": _MONEY,
    "sweep": _MONEY,
    "fits": ("convention", "gpu", *_MONEY),
    "plans": ("convention", "tokens", "price"),
    "lora": ("convention", "optimizer", "gpu", "micro-batches", *_MONEY),
}
_LEARNING = ("optimizer", "checkpointing", "loss", "accumulate", "micro-batches", *_MONEY)


def unused_options(
    view: str | None, phase: str, given: Mapping[str, bool]
) -> Iterator[tuple[str, str]]:
    """Yield the given options that have no effect, each with the option that makes it so."""
    unused, beside = _UNUSED.get(view or "", ()), f"--{view}"
    if view is None and phase not in _LEARNS:
        unused, beside = _LEARNING, f"--phase {phase}"
    yield from ((name, beside) for name in unused if given[name])


def check_views(views: Mapping[str, object], forms: Mapping[str, object]) -> None:
    """Refuse two things to show at once, and one in a form that it does not have."""
    asked = [name for name, value in views.items() if value]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]} exclude each other")
    for view in asked:
        for form, value in forms.items():
            if value and form not in _FORMS[view]:
                raise ValueError(f"--{form} has no effect beside --{view}")


def check_lengths(phase: str, lengths: Mapping[str, object]) -> None:
    """Refuse lengths that have no effect on a phase."""
    for name, value in lengths.items():
        if value is not None and phase not in _PHASES[name]:
            raise ValueError(f"--{name} is for --phase {' or '.join(_PHASES[name])}; got {phase}")


def find_model(name: str) -> ModelConfig:
    """Read a preset, a TOML or JSON config, a Hugging Face config or directory, GGUF, or a run."""
    path = Path(name)
    if path.is_dir() and (path / "config.toml").is_file():  # a run
        return _read_run(path / "config.toml")
    if path.is_dir():
        return _read_json(_config_in(path))
    if path.suffix == ".toml":
        return _read_run(path)
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".gguf":
        from scratchlm.interop import read_gguf  # needs torch

        return read_gguf(path).config
    if "/" in name:
        raise ScratchLMError(f"{name}: no such run, checkpoint, config or model directory")
    return preset(name)


def stored_format(name: str) -> str | None:
    """Return what a checkpoint or a GGUF file has been quantised to; None: it is wide, or mixed."""
    path = Path(name)
    if path.suffix == ".gguf":
        from scratchlm.interop import read_gguf  # needs torch
        from scratchlm.quantization.rule import TARGETS, choose

        source = read_gguf(path)
        found = {ours: source.stored_name(ours) for ours in source.shapes}
        for to in TARGETS:
            if {choice.name: choice.stored_name for choice in choose(source.config, to)} == found:
                return to
    elif (path / "manifest.json").is_file():
        from scratchlm.checkpoint import read_manifest  # needs torch

        return read_manifest(path)["metadata"].get("quantization")
    return None


def _read_run(path: Path) -> ModelConfig:
    """Read a model from a TOML file: a model alone, or the [model] table of a run."""
    table = read_toml(path).get("model")
    try:
        if isinstance(table, dict):
            return from_dict(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return load_config(path)


def _config_in(folder: Path) -> Path:
    """Return a folder's config.json; of a run, that of its newest checkpoint."""
    if (folder / "config.json").exists() or not (folder / "checkpoints").is_dir():
        return folder / "config.json"
    from scratchlm import checkpoint  # needs torch

    return (checkpoint.newest_valid(folder) or folder) / checkpoint.CONFIG


def _read_json(path: Path) -> ModelConfig:
    """Read our config, or, where it names a model_type, a Hugging Face one."""
    table = read_json(path, MAX_CONFIG_BYTES)
    try:
        if "model_type" in table or "architectures" in table:
            from scratchlm.interop import from_hf_config

            return from_hf_config(table)
        return from_dict(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def parse_bytes(text: str) -> int:
    """Read a memory: `24GiB`, `80GB`, `512MiB`, or plain bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"a memory is a number with GiB, GB, MiB or MB; got {text!r}")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if size > MAX_BYTES:
        raise ValueError(f"a memory must not exceed {MAX_BYTES:,} bytes; got {text!r}")
    return int(size)


def parse_count(text: str) -> int:
    """Read a number of tokens: `300B`, `1.5T`, `20_000_000`, `1e9`."""
    found = re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?(?:e\d{1,2})?)\s*([kKmMbBtT]?)\s*", text)
    if found is None:
        raise ValueError(f"a number of tokens is like 300B, 1.5T or 20_000_000; got {text!r}")
    return int(float(found[1]) * _COUNTS[found[2].lower()])


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read the lengths of packed documents: `512,256,256`."""
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        raise ValueError(f"documents are lengths with commas between them; got {text!r}")
    return tuple(int(length) for length in text.split(","))
