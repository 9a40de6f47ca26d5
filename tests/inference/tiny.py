"""Tiny models and tokenizers for the inference tests."""

import math
from functools import cache

import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.config import Learned, Rotary
from scratchlm.tokenizer import Tokenizer

END = "<|endoftext|>"


@cache
def byte_tokenizer(*special: str) -> Tokenizer:
    """One token per byte, and the special tokens."""
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], list(special or (END,)))


@cache
def tiny_model(
    vocab_size: int = 61, context_length: int = 48, seed: int = 0, learned: bool = False
) -> TransformerLM:
    """A random model with strong opinions: its logits are spread, not nearly flat."""
    config = ModelConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        positions=Learned() if learned else Rotary(layout="half"),
    )
    model = TransformerLM(config)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model.eval()


class Scripted(TransformerLM):
    """A model that says a fixed text, whatever it is asked: token n follows n tokens."""

    def __init__(self, script: list[int], vocab_size: int, context_length: int = 4096) -> None:
        super().__init__(
            ModelConfig(
                vocab_size=vocab_size,
                context_length=context_length,
                d_model=8,
                num_layers=1,
                num_heads=1,
            )
        )
        self.script, self.num_generated = script, 0

    def head(self, hidden):
        logits = torch.full((len(hidden), self.config.vocab_size), -math.inf)
        logits[:, self.script[min(self.num_generated, len(self.script) - 1)]] = 0.0
        self.num_generated += 1
        return logits
