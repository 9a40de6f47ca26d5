"""The points of a model: every number that can be seen and changed while it runs, by name.

A point is named like the state dict: `embed`, `layers.3.attn.q`, `layers.3.out`, `final`, `logits`.
`KINDS` is the table: the axes of each point, and what it holds. `*` in a name stands for one part
of it: `layers.*.attn.out`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn

from scratchlm.model import MLP, MoE, MultiHeadSelfAttention, SwiGLU, Transformer, TransformerBlock

# kind -> axes, what. Those of a layer are named `layers.{i}.` and the kind.
KINDS: dict[str, tuple[str, str]] = {
    "embed": ("batch position d_model", "token embeddings, positions added"),
    "in": ("batch position d_model", "the residual stream as the layer takes it"),
    "attn.q": ("batch heads position d_head", "queries, normed and rotated"),
    "attn.k": ("batch kv_heads position d_head", "keys, normed and rotated, before the cache"),
    "attn.v": ("batch kv_heads position d_head", "values, before the cache"),
    "attn.scores": ("batch heads position key", "Q Kᵀ / √d_head; −∞ where a key is hidden"),
    "attn.weights": ("batch heads position key", "softmax of the scores"),
    "attn.heads": ("batch heads position d_head", "each head's weighted values, before W_O"),
    "attn.out": ("batch position d_model", "what attention adds to the stream"),
    "mid": ("batch position d_model", "the residual stream between attention and feed-forward"),
    "ffn.gate": ("batch position d_ff", "W1 x of a SwiGLU, before SiLU"),
    "ffn.hidden": ("batch position d_ff", "the hidden activations, as W2 takes them"),
    "ffn.router": ("batch position experts", "the router's logits (mixtures)"),
    "ffn.experts": (
        "batch position chosen d_model",
        "each chosen expert's answer, before its weight",
    ),
    "ffn.out": ("batch position d_model", "what the feed-forward layer adds to the stream"),
    "out": ("batch position d_model", "the residual stream as the layer leaves it"),
    "final": ("batch position d_model", "after the final norm, as the head takes it"),
    "logits": ("batch position vocab", "the logits"),
}
_FFN_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "ffn.gate": (SwiGLU, MoE),
    "ffn.hidden": (SwiGLU, MLP, MoE),
    "ffn.router": (MoE,),
    "ffn.experts": (MoE,),
}


Named = tuple[str, str, int | None]  # a point's name, its kind, its layer


@dataclass(frozen=True)
class Point:
    """A point of a model: its name, its axes, and their sizes (None: known as it runs)."""

    name: str
    kind: str
    layer: int | None
    axes: tuple[str, ...]
    sizes: tuple[int | None, ...]

    @property
    def position_axis(self) -> int:
        """Which axis the positions are."""
        return self.axes.index("position")

    @property
    def has_heads(self) -> bool:
        """Whether the second axis is one of heads."""
        return "heads" in self.axes[1]


def points(model: Transformer) -> dict[str, Point]:
    """Return the points of this model, in the order in which they are computed."""
    return {point.name: point for point in _found(model, _named(model))}


def resolve(model: Transformer, names: str | Iterable[str]) -> list[Point]:
    """Return the points of these names, in order; a name that fits none is an error."""
    chosen, named = set(), _named(model)
    for name in [names] if isinstance(names, str) else names:
        pattern = re.compile(re.escape(name).replace(r"\*", r"[^.]+"))
        fits = _found(model, [known for known in named if pattern.fullmatch(known[0])])
        if not fits:
            raise ValueError(_unknown(model, name, list(points(model))))
        chosen |= {point.name for point in fits}
    if not chosen:
        raise ValueError("name at least one point; got none")
    return _found(model, [known for known in named if known[0] in chosen])


def _found(model: Transformer, named: Iterable[Named]) -> list[Point]:
    """Return those points that the model has."""
    found = []
    for name, kind, layer in named:
        if why_missing(model, kind, layer) is None:
            axes = _axes(model, kind, layer)
            found.append(Point(name, kind, layer, axes, _sizes(model, axes, layer)))
    return found


def _unknown(model: Transformer, name: str, there: list[str]) -> str:
    near = ", ".join(get_close_matches(str(name), there, 3, 0.0))
    for other, kind, layer in _named(model):
        if other == name:
            return f"this model has no {name}: {why_missing(model, kind, layer)}; near it: {near}"
    return f"no point is called {name!r}; near it: {near}"


def _named(model: Transformer) -> list[Named]:
    """Return name, kind and layer of every point that such a model could have."""
    inner = [kind for kind in KINDS if kind not in ("embed", "final", "logits")]
    named: list[Named] = [("embed", "embed", None)]
    for i in range(len(model.layers)):
        named += [(f"layers.{i}.{kind}", kind, i) for kind in inner]
    return [*named, ("final", "final", None), ("logits", "logits", None)]


# Which a model has


def why_missing(model: Transformer, kind: str, layer: int | None) -> str | None:
    """Return why a model does not have a point, or None when it does."""
    if layer is None:
        headless = kind == "logits" and not hasattr(model, "lm_head")
        return f"a {type(model).__name__} has no LM head" if headless else None
    block: Any = model.layers[layer]
    if kind in ("in", "out"):
        return None
    if kind == "mid":
        return _why_not_ours(block, TransformerBlock, "forward")
    part: Any = getattr(block, kind.partition(".")[0], None)  # attn or ffn
    if not isinstance(part, nn.Module):
        return f"layer {layer} is a {type(block).__name__} without it"
    if kind.endswith(".out"):
        return None
    if kind in _FFN_KINDS:
        return _why_not_ours(part, _FFN_KINDS[kind], "forward")
    reason = _why_not_ours(part, MultiHeadSelfAttention, "forward", "attend", "project")
    if reason is None and kind in ("attn.scores", "attn.weights"):
        return _why_unknown_weights(part)
    return reason


def _why_not_ours(
    module: Any, kinds: type[nn.Module] | tuple[type[nn.Module], ...], *methods: str
) -> str | None:
    """Return why a module does not compute by our formula, or None when it does."""
    name = type(module).__name__
    if not isinstance(module, kinds):
        return f"a {name} has none"
    for method in methods:
        if method in vars(module) or not _is_ours(type(module), method):
            return f"this {name} has a {method} of its own"
    return None


def _why_unknown_weights(attn: Any) -> str | None:
    for op in ("attention", "scaled_dot_product_attention"):
        if not _is_ours(type(attn.ops), op):
            return f"its op {op} is user-provided, and need not have weights"
    return None


def _is_ours(cls: type, method: str) -> bool:
    return getattr(cls, method).__module__.partition(".")[0] == __name__.partition(".")[0]


# Their sizes


def _axes(model: Transformer, kind: str, layer: int | None) -> tuple[str, ...]:
    axes = KINDS[kind][0]
    if kind in ("ffn.gate", "ffn.hidden") and isinstance(_ffn(model, layer), MoE):
        axes = "batch position chosen d_ff"
    return tuple(axes.split())


def _sizes(model: Transformer, axes: tuple[str, ...], layer: int | None) -> tuple[int | None, ...]:
    config = model.config
    known: dict[str, int] = {"d_model": config.d_model, "vocab": config.vocab_size}
    if layer is not None:
        attn: Any = getattr(model.layers[layer], "attn", None)
        ffn = _ffn(model, layer)
        if isinstance(attn, MultiHeadSelfAttention):
            known |= {"heads": attn.num_heads, "kv_heads": attn.num_kv_heads}
            known["d_head"] = attn.d_head
        if isinstance(ffn, MoE):
            known |= {"experts": ffn.router.weight.shape[0], "chosen": ffn.experts_per_token}
        if isinstance(ffn, (SwiGLU, MLP, MoE)):
            known["d_ff"] = ffn.w2.weight.shape[-1]
    return tuple(known.get(axis) for axis in axes)


def _ffn(model: Transformer, layer: int | None) -> Any:
    return None if layer is None else getattr(model.layers[layer], "ffn", None)
