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
from scratchlm.model import TransformerLM

Ids = Sequence[int]


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
        """Return a token's text; bytes that are no whole character as U+FFFD."""
        return token_text(self.tokenizer, token)

    @torch.no_grad()
    def logits(self, ids: Ids) -> Float[Tensor, "seq vocab"]:
        """Return the logits at every position, in the model's own dtype."""
        return self.model(self.row(ids))[0]

    def last_logits(self, ids: Ids) -> Float[Tensor, " vocab"]:
        """Return the logits after the last token."""
        return self.logits(ids)[-1]
