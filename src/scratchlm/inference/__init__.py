"""Inference: load a model by name, generate with it, talk to it."""

from scratchlm.inference.beam import Beam, beam_search
from scratchlm.inference.chat import (
    FORMATS,
    ChatFormat,
    Conversing,
    Message,
    chat_format,
    what_fits,
)
from scratchlm.inference.decoding import decode_one_token, generate, prefill, stream
from scratchlm.inference.engine import Engine, Handle
from scratchlm.inference.loading import Loaded, load_model
from scratchlm.inference.next_tokens import Candidate, next_tokens
from scratchlm.inference.rows import Generation, Piece, TokenLogprob
from scratchlm.inference.sampling import GREEDY, Sampling, uniform
from scratchlm.inference.scoring import Likelihood, likelihoods

__all__ = [
    "load_model",
    "Loaded",
    "Engine",
    "Handle",
    "generate",
    "stream",
    "Generation",
    "Piece",
    "TokenLogprob",
    "likelihoods",
    "Likelihood",
    "Sampling",
    "GREEDY",
    "prefill",
    "decode_one_token",
    "uniform",
    "beam_search",
    "Beam",
    "next_tokens",
    "Candidate",
    "FORMATS",
    "ChatFormat",
    "Conversing",
    "Message",
    "chat_format",
    "what_fits",
]
