"""Hugging Face and GGUF ↔ ours: which family, which names, which bytes; both directions.

    read_hf(directory)       → `HFCheckpoint`: config and a stream of (our name, tensor)
    write_hf(directory, …)   ← config and tensors under our names
    read_gguf(file)          → `GGUFCheckpoint`: the same, with tokenizer and chat template
    write_gguf(file, …)      ← config, tensors, tokenizer and chat template
    from_hf_config, to_hf_config: config.json alone

The names are looked up when first used: reading a config.json needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scratchlm.interop.gguf_file import is_gguf
    from scratchlm.interop.gguf_reading import GGUFCheckpoint, read_gguf
    from scratchlm.interop.gguf_writing import write_gguf
    from scratchlm.interop.hf_config import from_hf_config
    from scratchlm.interop.hf_config_writing import to_hf_config
    from scratchlm.interop.matching import check_stored
    from scratchlm.interop.reading import HFCheckpoint, is_hf_directory, read_hf
    from scratchlm.interop.writing import write_hf

__all__ = [
    "GGUFCheckpoint",
    "HFCheckpoint",
    "check_stored",
    "from_hf_config",
    "is_gguf",
    "is_hf_directory",
    "read_gguf",
    "read_hf",
    "to_hf_config",
    "write_gguf",
    "write_hf",
]

_MODULE_OF = {
    "GGUFCheckpoint": "gguf_reading",
    "is_gguf": "gguf_file",
    "read_gguf": "gguf_reading",
    "write_gguf": "gguf_writing",
    "HFCheckpoint": "reading",
    "check_stored": "matching",
    "is_hf_directory": "reading",
    "read_hf": "reading",
    "write_hf": "writing",
    "from_hf_config": "hf_config",
    "to_hf_config": "hf_config_writing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
