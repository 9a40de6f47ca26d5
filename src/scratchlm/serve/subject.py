"""The model that is looked into: the weights of the one that serves, in modules of their own.

Hooks and edits of a view belong to one request. The engine serves others meanwhile from the same
weights, so the modules are copied and the tensors are shared: no edit reaches an answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inference.next_tokens import token_text
from scratchlm.inference.prompts import AnyTokenizer, prompt_rows
from scratchlm.inference.rows import UNKNOWN
from scratchlm.model import TransformerLM

Ids = Sequence[int]


def check_index(name: str, value: int, size: int) -> None:
    """Refuse a place that is not there."""
    if not 0 <= value < size:
        raise ValueError(f"{name} must lie in [0, {size}); got {value}")


@dataclass
class Subject:
    """A model with its tokenizer; one view at a time runs it."""

    model: TransformerLM
    tokenizer: AnyTokenizer | None
    name: str = "model"
    head_scores: dict[str, list[list[float]]] | None = None  # once they were asked for

    @classmethod
    def of(cls, model: TransformerLM, tokenizer: AnyTokenizer | None, name: str) -> Subject:
        """Copy the modules of a model and share its tensors."""
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        return cls(copy.deepcopy(model, shared), tokenizer, name)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.token_embeddings.weight.device

    def row(self, ids: Ids) -> Int[Tensor, "1 seq"]:
        """Check token ids and lay them out as a batch of one."""
        (checked,) = prompt_rows([list(ids)], None, self.model.config.vocab_size)
        self.model.check_length(len(checked))
        return torch.tensor([checked], device=self.device)

    def text(self, token: int) -> str:
        """Return a token's text; one that is no whole characters as its bytes, `<0xE3>`."""
        text = token_text(self.tokenizer, token)
        if UNKNOWN not in text or self.tokenizer is None:
            return text
        try:
            data = self.tokenizer.token_bytes(token)
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)
        except ValueError:  # a vocabulary padded beyond its tokenizer's
            return text

    @torch.no_grad()
    def logits(self, ids: Ids) -> Float[Tensor, "seq vocab"]:
        """Return the logits at every position, in the model's own dtype."""
        return self.model(self.row(ids))[0]

    def last_logits(self, ids: Ids) -> Float[Tensor, " vocab"]:
        """Return the logits after the last token."""
        return self.logits(ids)[-1]
