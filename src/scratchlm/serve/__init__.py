"""An OpenAI-compatible server on the engine: `scratchlm serve MODEL`."""

from scratchlm.serve.settings import ServeSettings

__all__ = ["ServeSettings"]
