"""scratchlm: a Transformer language model you can see through.

The public names are resolved on first use, so that `import scratchlm` and `scratchlm --help`
do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scratchlm.accounting import account as account
    from scratchlm.config import PRESETS as PRESETS
    from scratchlm.config import ModelConfig as ModelConfig
    from scratchlm.config import preset as preset
    from scratchlm.errors import ScratchLMError as ScratchLMError
    from scratchlm.inference import Sampling as Sampling
    from scratchlm.inference import generate as generate
    from scratchlm.inference import load_model as load_model
    from scratchlm.inference import stream as stream
    from scratchlm.model import TransformerLM as TransformerLM
    from scratchlm.ops import OPS as OPS
    from scratchlm.tokenizer import Tokenizer as Tokenizer
    from scratchlm.tokenizer import load_tokenizer as load_tokenizer
    from scratchlm.tokenizer import train_bpe as train_bpe
    from scratchlm.training import Learner as Learner
    from scratchlm.training import TrainConfig as TrainConfig
    from scratchlm.training import run_plan as run_plan
    from scratchlm.training import train as train

__version__ = "0.2.0"

_HOME = {
    "ModelConfig": "config",
    "PRESETS": "config",
    "preset": "config",
    "TransformerLM": "model",
    "OPS": "ops",
    "load_model": "inference",
    "generate": "inference",
    "stream": "inference",
    "Sampling": "inference",
    "TrainConfig": "training",
    "Learner": "training",
    "train": "training",
    "run_plan": "training",
    "account": "accounting",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
    "train_bpe": "tokenizer",
    "ScratchLMError": "errors",
}

__all__ = [
    "ModelConfig",
    "PRESETS",
    "preset",
    "TransformerLM",
    "OPS",
    "load_model",
    "generate",
    "stream",
    "Sampling",
    "TrainConfig",
    "Learner",
    "train",
    "run_plan",
    "account",
    "Tokenizer",
    "load_tokenizer",
    "train_bpe",
    "ScratchLMError",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"scratchlm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'scratchlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
