"""scratchlm: a Transformer language model you can see through.

The public names are resolved on first use, so that `import scratchlm` and `scratchlm --help`
do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scratchlm.config import ModelConfig as ModelConfig
    from scratchlm.model import TransformerLM as TransformerLM

__version__ = "0.2.0"

_HOME = {"ModelConfig": "scratchlm.config", "TransformerLM": "scratchlm.model"}

__all__ = ["ModelConfig", "TransformerLM"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'scratchlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
