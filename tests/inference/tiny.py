"""Tiny models and tokenizers for the inference tests."""

import math
from functools import cache
from pathlib import Path

import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.checkpoint import checkpoint_path, write_checkpoint
from scratchlm.config import Learned, Rotary
from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.files import AnyTokenizer

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


def save_run(path: Path, model: TransformerLM, tokenizer: AnyTokenizer, step: int = 1) -> Path:
    """Write a run with one checkpoint, its tokenizer in it; return the run."""
    write_checkpoint(
        checkpoint_path(path, step),
        model=model.state_dict(),
        config=model.config,
        tokenizer_file=tokenizer.save(path / "tokenizer"),
    )
    return path


class ScriptedHead(torch.nn.Module):
    """A head whose n-th call gives the n-th token of a script, whatever it is asked."""

    def __init__(self, script: list[int], vocab_size: int) -> None:
        super().__init__()
        self.script, self.vocab_size, self.num_generated = script, vocab_size, 0

    def forward(self, hidden):
        logits = torch.full((len(hidden), self.vocab_size), -math.inf)
        logits[:, self.script[min(self.num_generated, len(self.script) - 1)]] = 0.0
        self.num_generated += 1
        return logits


def scripted_model(script: list[int], vocab_size: int, context_length: int = 4096) -> TransformerLM:
    """A model that says a fixed text."""
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 1}
    model = TransformerLM(ModelConfig(vocab_size, context_length, **sizes))
    model.lm_head = ScriptedHead(script, vocab_size)
    return model
