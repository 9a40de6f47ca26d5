"""Direct attribution: which part of the model wrote how much of a logit.

In a pre-norm model the last residual stream is a sum,

    x = embed + Σ over layers of ( Σ over heads of W_O[h] head_h + b_O + FFN + b_2 ),

and a logit is W[token] · Norm(x). With the final norm's scale s held fixed the norm is linear, so
each part has a share of the logit, W[token] · (g ⊙ s · part) (LayerNorm centres the part first),
and the shares, with the norm's own bias, add up to it. What a part does through later layers is
not in its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scratchlm.model import LayerNorm, Linear, RMSNorm
from scratchlm.ops.quantized import rounded
from scratchlm.quantization.layers import QuantizedLinear

if TYPE_CHECKING:
    from scratchlm.inspect.cache import Cache

# What has to be kept: `look.keep(PARTS)`.
PARTS = ("embed", "layers.*.attn.heads", "layers.*.ffn.out", "layers.*.out", "final")
# Edits of these move the stream past its parts: their sum gets a share of its own.
_STREAM = ("in", "mid", "out", "attn.out")


@dataclass(frozen=True)
class Attribution:
    """Each part's share of a logit, or of a difference of two."""

    parts: tuple[str, ...]
    shares: Float[Tensor, "batch parts"]  # in float64
    logit: Float[Tensor, " batch"]  # what the head makes of the final vector
    position: int

    @property
    def error(self) -> float:
        """How far the shares are from adding up: the rounding of the model's own dtype."""
        return float((self.shares.sum(dim=-1) - self.logit).abs().max())

    def share(self, part: str) -> Float[Tensor, " batch"]:
        """Return the share of one part."""
        if part not in self.parts:
            raise ValueError(f"no part is called {part!r}; there are {', '.join(self.parts)}")
        return self.shares[:, self.parts.index(part)]

    def top(self, count: int | None = None, row: int = 0) -> list[tuple[str, float]]:
        """Return the parts of one row with their shares, the largest in size first."""
        shares = self.shares[row].tolist()
        pairs = sorted(zip(self.parts, shares, strict=True), key=lambda pair: -abs(pair[1]))
        return pairs[:count]


@torch.no_grad()
def attribute(
    cache: Cache, token: int, against: int | None = None, position: int | None = None
) -> Attribution:
    """Compute every part's share at one position."""
    model: Any = cache.model
    vectors, direction, position = _vectors(cache, token, against, position)
    names, shares = list(vectors), torch.stack([*vectors.values()], 1) @ direction
    logit = _at(cache, "final", position) @ direction
    bias = getattr(model.lm_head, "bias", None)
    if bias is not None:
        share = bias[token].double() - (0.0 if against is None else bias[against].double())
        names.append("lm_head.bias")
        shares = torch.cat((shares, share.expand(len(shares), 1)), dim=1)
        logit = logit + share
    return Attribution(tuple(names), shares, logit, position)


@torch.no_grad()
def share_terms(
    cache: Cache, part: str, token: int, against: int | None = None
) -> Float[Tensor, "batch d_model"]:
    """Return one part's share channel by channel: W[token, c] · g[c] · s · part[c]."""
    vectors, direction, _ = _vectors(cache, token, against, None)
    if part not in vectors:
        raise ValueError(
            f"no part with channels is called {part!r}; there are {', '.join(vectors)}"
        )
    return vectors[part] * direction


def _vectors(
    cache: Cache, token: int, against: int | None, position: int | None
) -> tuple[dict[str, Float[Tensor, "batch d_model"]], Float[Tensor, " d_model"], int]:
    """Return every part as the final norm leaves it, what the head multiplies it by, and where."""
    model: Any = cache.model
    _check(cache)
    last = f"layers.{len(model.layers) - 1}.out"
    position = int(cache.positions(last).max()) if position is None else position
    parts = _parts(cache, position)
    stream = _at(cache, last, position)
    if any(name.rpartition("layers.")[2].partition(".")[2] in _STREAM for name in cache.edited):
        parts["edits"] = stream - torch.stack(list(parts.values())).sum(dim=0)
    direction = _row(model.lm_head, token)
    if against is not None:
        direction = direction - _row(model.lm_head, against)
    normed = _normed(model.ln_final, stream, torch.stack([*parts.values()], 1))
    vectors = dict(zip(parts, normed.unbind(1), strict=True))
    bias = getattr(model.ln_final, "bias", None)
    if bias is not None:
        vectors["ln_final.bias"] = bias.double().expand_as(stream)
    return vectors, direction, position


def _check(cache: Cache) -> None:
    model: Any = cache.model
    if any(getattr(block, "post_norm", False) for block in model.layers):
        raise ValueError(
            "attribution needs a pre-norm model: after a post-norm block the stream is not a sum"
        )
    if not isinstance(model.ln_final, (RMSNorm, LayerNorm, nn.Identity)):
        raise ValueError(f"attribution knows no final norm {type(model.ln_final).__name__}")
    touched = cache.edited & {"final", "logits"}
    if touched:
        raise ValueError(f"{min(touched)} was edited: the logit is no sum of the model's parts")


def _parts(cache: Cache, position: int) -> dict[str, Float[Tensor, "batch d_model"]]:
    """Return every part of the last residual stream at a position, in float64."""
    model: Any = cache.model
    parts = {"embed": _at(cache, "embed", position)}
    for i, block in enumerate(model.layers):
        output_proj = block.attn.output_proj
        if not isinstance(output_proj, (Linear, QuantizedLinear)):
            raise ValueError(f"layers.{i}.attn.output_proj is no Linear, but {type(output_proj)}")
        heads = _at(cache, f"layers.{i}.attn.heads", position)  # (batch, heads, d_head)
        if isinstance(output_proj, QuantizedLinear) and output_proj.format.int8_activations:
            heads = rounded(heads.flatten(1)).view_as(heads)  # as the product has them
        weight = output_proj.weight.double().unflatten(1, heads.shape[1:])
        written = torch.einsum("bhd,mhd->bhm", heads, weight)
        for h in range(heads.shape[1]):
            parts[f"layers.{i}.attn.heads.{h}"] = written[:, h]
        _add_bias(parts, f"layers.{i}.attn.output_proj.bias", output_proj.bias)
        ffn_out = _at(cache, f"layers.{i}.ffn.out", position)
        bias = getattr(getattr(block.ffn, "w2", None), "bias", None)
        parts[f"layers.{i}.ffn"] = ffn_out if bias is None else ffn_out - bias.double()
        _add_bias(parts, f"layers.{i}.ffn.w2.bias", bias)
    return parts


def _add_bias(parts: dict[str, Tensor], name: str, bias: Tensor | None) -> None:
    if bias is not None:
        parts[name] = bias.double().expand_as(parts["embed"])


def _at(cache: Cache, name: str, position: int) -> Tensor:
    """Return a kept point at one position, in float64, without the axis of positions."""
    selection = cache.selection(name)
    if selection.heads is not None or selection.units is not None:
        raise ValueError(f"attribution needs all of {name}; it was kept in part")
    placed, x = cache.positions(name), cache[name].double()
    here = placed == position
    if not bool(here.any(dim=-1).all()):
        raise ValueError(f"{name} was not kept at position {position} of every row")
    column = here.to(torch.uint8).argmax(dim=-1).expand(len(x))
    return x.movedim(selection.point.position_axis, 1)[torch.arange(len(x)), column]


def _normed(norm: nn.Module, stream: Tensor, parts: Tensor) -> Tensor:
    """Apply the final norm to parts (batch, parts, d_model), with the scale of the whole stream."""
    if isinstance(norm, LayerNorm):
        centred = stream - stream.mean(dim=-1, keepdim=True)
        deviation = (centred.pow(2).mean(dim=-1) + norm.eps).sqrt()
        parts = parts - parts.mean(dim=-1, keepdim=True)
        return parts / deviation[:, None, None] * norm.weight.double()
    if isinstance(norm, RMSNorm):
        rms = (stream.pow(2).mean(dim=-1) + norm.eps).sqrt()
        return parts / rms[:, None, None] * norm.weight.double()
    return parts


def _row(head: Any, token: int) -> Tensor:
    vocab = len(head.weight)
    if not 0 <= token < vocab:
        raise ValueError(f"token must lie in [0, {vocab}); got {token}")
    row: Tensor = head.weight[token].double()
    return row
