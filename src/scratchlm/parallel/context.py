"""Context parallelism: ranks share each sequence, for those too long for one device.

A sequence is cut into 2·N chunks, and rank r of N has chunks r and 2·N − 1 − r: an early one, whose
queries see little, and a late one, whose queries see much, so that all have as much to do. Layers
work on the tokens they are given; attention alone needs the others':

    forward    all-gather K and V of the layer; each chunk of queries sees the keys up to its end
    backward   reduce-scatter dK and dV

(as arXiv:2407.21783, section 3.3.2, does it: with grouped heads, K and V are small beside what is
computed from them.) Attention is a replaced op of its module, so the model stays as it is, and
kernels that absorb attention's formula stand aside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from scratchlm.config import MoE
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.ops import CausalMask
from scratchlm.parallel import collectives as c
from scratchlm.parallel.ranks import Ranks


class ContextParallel:
    """A model whose sequences are cut over `ranks.context_size` ranks."""

    def __init__(self, model: TransformerLM, ranks: Ranks) -> None:
        if isinstance(model.config.ffn, MoE):
            raise ScratchLMError(
                "train.cp does not go with experts, whose load is balanced over whole sequences"
            )
        self.rank, self.size = ranks.context_rank, ranks.context_size
        grid = (ranks.size // self.size, self.size)
        mesh = init_device_mesh(ranks.device.type, grid, mesh_dim_names=("rows", "context"))
        self.group = mesh.get_group("context")
        self.last_position = model.config.context_length - 1
        # of this forward, for all layers: documents of whole sequences, who sees whom
        self.documents: Tensor | None = None
        self.masks: dict[tuple[int, int | None], CausalMask] = {}
        self._replace_attention(model)
        self._replace_hidden(model)

    # Tokens

    def own(self, whole: Tensor, padding: int) -> Tensor:
        """Return this rank's tokens of (…, seq); a sequence that does not divide is padded."""
        chunks = 2 * self.size
        missing = -whole.shape[-1] % chunks
        if missing:
            whole = torch.cat([whole, whole.new_full((*whole.shape[:-1], missing), padding)], -1)
        parts = whole.chunk(chunks, -1)
        return torch.cat([parts[self.rank], parts[chunks - 1 - self.rank]], -1)

    def _in_order(self, gathered: Tensor, dim: int) -> Tensor:
        """Put what ranks had, one after the other, in the order of the sequence."""
        parts = gathered.chunk(2 * self.size, dim)
        late = [parts[2 * rank + 1] for rank in reversed(range(self.size))]
        return torch.cat([*parts[::2], *late], dim)

    def _replace_hidden(self, model: TransformerLM) -> None:
        """Let the trunk know where its tokens stand."""
        inner = model.hidden

        def hidden(
            token_ids: Tensor, *, document_ids: Tensor | None = None, **inputs: Any
        ) -> Tensor:
            for name in ("positions", "cache", "attention_mask"):
                if inputs.get(name) is not None:
                    raise ScratchLMError(f"train.cp: {name} is not cut over ranks")
            whole, self.documents, self.masks = token_ids.shape[-1] * self.size, None, {}
            positions = torch.arange(whole, device=token_ids.device)
            if document_ids is not None:
                every = c.join_rows(document_ids[..., None], self.group)[..., 0]
                self.documents = self._in_order(every, -1)
                placed = CausalMask(documents=self.documents).positions(whole)
                assert isinstance(placed, Tensor)
                positions = placed
            positions = self.own(positions, 0).clamp(max=self.last_position)  # padding's
            return inner(token_ids, positions=positions, **inputs)

        model.hidden = hidden  # type: ignore[method-assign]

    # Attention

    def _replace_attention(self, model: TransformerLM) -> None:
        for layer in model.layers:
            attn: Any = layer.attn
            ops = attn.ops

            def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, ops: Any = ops) -> Any:
                return self._attend(ops, q, k, v, mask)

            attn.ops = ops.replace(attention=attention)

    def _attend(self, ops: Any, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask) -> Tensor:
        """Let each of the two chunks of queries see the keys up to its end."""
        every = self._in_order(c.gather_rows(torch.stack((k, v)), self.group), c.SEQ)
        length = q.shape[c.SEQ] // 2
        parts = []
        numbers = self.rank, 2 * self.size - 1 - self.rank
        for number, queries in zip(numbers, q.chunk(2, c.SEQ), strict=True):
            start, stop = number * length, (number + 1) * length
            keys, values = every[..., :stop, :]
            parts.append(ops.attention(queries, keys, values, self._mask(start, mask.window)))
        return torch.cat(parts, c.SEQ)

    def _mask(self, start: int, window: int | None) -> CausalMask:
        """Return who sees whom, for queries from `start` on; one for all layers."""
        made = CausalMask(start=start, window=window, documents=self.documents)
        return self.masks.setdefault((start, window), made)
