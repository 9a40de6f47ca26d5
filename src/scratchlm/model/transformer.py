"""The Transformer: block, trunk, language model.

    x = E[token] (+ position)
    x = x + Attention(Norm(x));  x = x + FFN(Norm(x))        num_layers times
    logits = W_head Norm(x)

Token ids are checked where they enter; where a look would cost a wait, `ops/ranges.py` says how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack, assert_never

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from scratchlm import config as kinds
from scratchlm.config import ModelConfig
from scratchlm.model.attention import ForwardContext
from scratchlm.model.block import TransformerBlock, make_norm, make_rope
from scratchlm.model.cache import KVCache
from scratchlm.model.layers import Embedding, FactoryKwargs, Linear, SinusoidalPositions, TiedHead
from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.ops import CausalMask, Ops, Routed, get_ops, load_balancing_loss
from scratchlm.ops.ranges import keep_in_range, mark
from scratchlm.threads import share_cores


class Transformer(nn.Module):
    """The trunk: from token ids to hidden states. Language model and task heads stand on it."""

    def __init__(
        self,
        config: ModelConfig,
        ops: str | Ops = "fast",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ops = config, get_ops(ops)
        factory: FactoryKwargs = {"device": device, "dtype": dtype, "ops": ops}
        # A tied table is also the head: N(0, 1) rows would give logits of variance d_model.
        std = config.d_model**-0.5 if config.tie_embeddings else 1.0
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, std=std, **factory)
        self.position_embeddings = make_positions(config, std, **factory)
        rope = make_rope(config, **factory)  # one for all layers
        blocks = (TransformerBlock(config, i, rope, **factory) for i in range(config.num_layers))
        self.layers = nn.ModuleList(blocks)
        pre = config.norm_placement == "pre"  # post-norm blocks end in a norm already
        self.ln_final: nn.Module = make_norm(config, **factory) if pre else nn.Identity()
        share_cores(self.token_embeddings.weight.device)

    @property
    def rope(self) -> RotaryEmbedding | None:
        """The rotary embedding of the first layer, which all layers share."""
        return getattr(getattr(self.layers[0], "attn", None), "rope", None)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew, from `generator` if given."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset(generator)

    @property
    def config_of_cache(self) -> ModelConfig:
        """The config, with as many layers as there are."""
        return self.config.replace(num_layers=len(self.layers))

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """Make an empty cache that fits this model, its device and its dtype."""
        weight = self.token_embeddings.weight
        config = self.config_of_cache
        return KVCache(config, batch_size, capacity, device=weight.device, dtype=weight.dtype)

    def hidden(
        self,
        token_ids: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "*batch seq"] | None = None,
        cache: KVCache | None = None,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        document_ids: Int[Tensor, "batch seq"] | None = None,
        routes: list[Routed] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Run the trunk; arguments as in `Inputs`."""
        self._check_call(token_ids, positions, cache, attention_mask, document_ids)
        if cache is None:
            mask = CausalMask(key_valid=attention_mask, documents=document_ids)
        else:
            cache.reserve(token_ids.shape[1], attention_mask)
            self.check_length(cache.reserved_length)
            mask = cache.mask
        placed = mask.positions(token_ids.shape[1]) if positions is None else positions
        x, placed = self._embed(token_ids, placed)
        context = self.make_context(mask, placed, cache, routes)
        for number, layer in enumerate(self.layers):
            x = layer(x, context=context.of_layer(number))
        x = self.ln_final(x)
        if cache is not None:
            cache.advance()  # last: after an error the cache is as it was
        return x

    def make_context(self, *shared: Any) -> ForwardContext:
        """Gather what the layers of one forward share."""
        return ForwardContext(*shared)

    def _embed(
        self, token_ids: Tensor, positions: Tensor | range
    ) -> tuple[Float[Tensor, "batch seq d_model"], Tensor | range]:
        """Look tokens and positions up; return them, and positions that are safe to look up."""
        x = self.token_embeddings(token_ids)
        if isinstance(positions, Tensor):
            positions, wrong = keep_in_range(positions, self.config.context_length)
            x = mark(x, wrong)
        if self.position_embeddings is not None:
            index = positions
            if isinstance(index, range):
                index = torch.arange(index.start, index.stop, device=token_ids.device)
            x = x + self.position_embeddings(index).to(x.dtype)
        return x, positions

    def check_length(self, length: int) -> None:
        """Refuse a sequence longer than the context."""
        if length > (most := self.config.context_length):
            raise ValueError(
                f"the sequence must not exceed context_length={most}; got {length} tokens"
            )

    def _check_call(
        self,
        token_ids: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> None:
        if token_ids.ndim != 2:
            raise ValueError(f"token_ids must be (batch, seq); got shape {tuple(token_ids.shape)}")
        batch, seq = token_ids.shape
        if cache is None:
            self.check_length(seq)
        fits = ((seq,), (1, seq), (batch, seq))
        if positions is not None and not any(tuple(positions.shape) == fit for fit in fits):
            raise ValueError(
                f"positions must be (seq,) or (batch, seq) = ({batch}, {seq}); "
                f"got shape {tuple(positions.shape)}"
            )
        for name, given in (("attention_mask", attention_mask), ("document_ids", document_ids)):
            if given is not None and given.shape != token_ids.shape:
                raise ValueError(
                    f"{name} must have the shape of token_ids, ({batch}, {seq}); "
                    f"got {tuple(given.shape)}"
                )
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise TypeError(
                f"attention_mask must be boolean (True = a real token); got {attention_mask.dtype}"
            )
        if cache is not None and cache.batch_size != batch:
            raise ValueError(f"the cache holds {cache.batch_size} rows; got a batch of {batch}")
        if cache is not None and document_ids is not None:
            raise ValueError("document_ids and cache cannot be used together")


def make_positions(
    config: ModelConfig, std: float, **factory: Unpack[FactoryKwargs]
) -> Embedding | SinusoidalPositions | None:
    """Build the absolute positions a config names, if it names any."""
    size = config.context_length, config.d_model
    match config.positions:
        case kinds.Learned():
            return Embedding(*size, std=std, **factory)
        case kinds.Sinusoidal():
            return SinusoidalPositions(*size, device=factory.get("device"))
        case kinds.Rotary() | kinds.NoPositions():
            return None
        case _:
            assert_never(config.positions)


class Inputs(TypedDict, total=False):
    """What a forward takes besides token ids."""

    positions: Int[Tensor, "*batch seq"] | None  # where tokens are not consecutive
    cache: KVCache | None  # holds earlier tokens, and takes these in
    attention_mask: Bool[Tensor, "batch seq"] | None  # True at real tokens; padding left or right
    document_ids: Int[Tensor, "batch seq"] | None  # packed documents do not see each other


class TransformerLM(Transformer):
    """Embedding → blocks → final norm → head: logits for the next token at every position."""

    __call__: Callable[..., Tensor]  # for type checkers; nn.Module's own says Any

    def __init__(self, config: ModelConfig, ops: str | Ops = "fast", **where: Any) -> None:
        super().__init__(config, ops, **where)
        self.lm_head: nn.Module = TiedHead(self.token_embeddings, ops=ops)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, ops=ops, **where)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        head = getattr(self, "lm_head", None) if name == "token_embeddings" else None
        if isinstance(head, TiedHead):  # follows a table that is replaced
            head.tied_to = (value,)

    def forward(
        self, token_ids: Int[Tensor, "batch seq"], **inputs: Unpack[Inputs]
    ) -> Float[Tensor, "batch seq vocab"]:
        """Return the logits."""
        return self.lm_head(self.hidden(token_ids, **inputs))

    def next_token_probabilities(
        self,
        token_ids: Int[Tensor, "batch seq"],
        temperature: float = 1.0,
        **inputs: Unpack[Inputs],
    ) -> Float[Tensor, "batch vocab"]:
        """Return softmax(logits / temperature) after the last token of each row."""
        if not temperature > 0:
            raise ValueError(f"temperature must be greater than 0; got {temperature}")
        last = last_token(token_ids, inputs.get("attention_mask"))
        hidden = self.hidden(token_ids, **inputs)
        row = torch.arange(len(token_ids), device=token_ids.device)
        return self.ops.softmax(self.lm_head(hidden[row, last]).float() / temperature, dim=-1)

    def loss(
        self,
        token_ids: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        document_ids: Int[Tensor, "batch seq"] | None = None,
        ignore_index: int = -100,
        z_loss: float = 0.0,
    ) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of the targets, plus what keeps experts evenly loaded."""
        routes: list[Routed] | None = [] if isinstance(self.config.ffn, kinds.MoE) else None
        hidden = self.hidden(
            token_ids, attention_mask=attention_mask, document_ids=document_ids, routes=routes
        )
        loss = self.head_loss(hidden, targets, ignore_index=ignore_index, z_loss=z_loss)
        weight = getattr(self.config.ffn, "load_balance_weight", 0.0)
        if weight and routes:
            balance = [load_balancing_loss(r.probabilities, r.experts) for r in routes]
            loss = loss + weight * torch.stack(balance).mean()
        return loss

    def head_loss(
        self,
        hidden: Float[Tensor, "batch seq d_model"],
        targets: Int[Tensor, "batch seq"],
        **options: Any,
    ) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of the logits of these hidden states."""
        return self.ops.cross_entropy(self.lm_head(hidden), targets, **options)


def last_token(
    token_ids: Int[Tensor, "batch seq"], attention_mask: Bool[Tensor, "batch seq"] | None
) -> Int[Tensor, " batch"]:
    """Return the index of each row's last real token."""
    batch, seq = token_ids.shape
    if attention_mask is None:
        return torch.full((batch,), seq - 1, device=token_ids.device)
    index = torch.arange(seq, device=token_ids.device)
    return index.masked_fill(~attention_mask, 0).amax(dim=-1)
