"""Inference: load a model by name, generate with it, talk to it, look into it."""

from scratchlm.inference.decoding import decode_one_token, generate, prefill, stream
from scratchlm.inference.rows import Generation, Piece, TokenLogprob
from scratchlm.inference.sampling import GREEDY, Sampling, Seen, filtered, sample, uniform

__all__ = [
    "generate",
    "stream",
    "Generation",
    "Piece",
    "TokenLogprob",
    "Sampling",
    "GREEDY",
    "prefill",
    "decode_one_token",
    "sample",
    "filtered",
    "uniform",
    "Seen",
]
