"""Where each point lies in the modules, and how a look gets there.

Most points are the input or the output of a module: a hook. Queries, keys and values lie inside
attention, before the cache: the layer's class is swapped for a subclass whose `project` shows them.
Scores and weights lie inside the attention op: the layer gets an op set of its own, which computes
them beside what the layer computes (`attend`). Nothing else is touched, so acceleration steps aside
for these layers and no other, and all is undone when the look ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from scratchlm.model import MoE, Transformer
from scratchlm.model.moe import sort_by_expert

Visit = Callable[[str, Tensor], Tensor]  # a point's name and tensor -> what goes on
Shape = Callable[[Tensor], Tensor]
AttentionOp = Callable[..., Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


class Sites:
    """Hooks, classes and op sets in place; `close` takes them all away."""

    def __init__(self, visit: Visit) -> None:
        self.visit, self._undo = visit, ExitStack()

    def close(self) -> None:
        """Leave the model as it was."""
        self._undo.close()

    def on_input(
        self, module: nn.Module, name: str, into: Shape = _same, back: Shape = _same
    ) -> None:
        """Show a module's input, brought into the point's axes by `into`."""

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            seen = into(args[0])
            new = self.visit(name, seen)
            return None if new is seen else (back(new), *args[1:])

        self._undo.callback(module.register_forward_pre_hook(before).remove)

    def on_output(
        self, module: nn.Module, name: str, into: Shape = _same, back: Shape = _same
    ) -> None:
        """Show a module's output, brought into the point's axes by `into`."""

        def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            seen = into(output)
            new = self.visit(name, seen)
            return None if new is seen else back(new)

        self._undo.callback(module.register_forward_hook(after).remove)

    def listen(
        self, module: nn.Module, before: Callable[..., Any] | None, after: Callable[..., Any] | None
    ) -> None:
        """Register a hook that sees keywords, too."""
        if before is not None:
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            self._undo.callback(handle.remove)
        if after is not None:
            self._undo.callback(module.register_forward_hook(after).remove)

    def swap_class(self, module: nn.Module, made: type[nn.Module]) -> None:
        """Give a module another class until the end."""
        was = type(module)

        def undo() -> None:
            if type(module) is made:
                module.__class__ = was

        module.__class__ = made
        self._undo.callback(undo)

    def swap_attention_op(self, module: Any, op: AttentionOp) -> None:
        """Give a layer an attention op of its own until the end."""
        was, made = module.ops, module.ops.replace(attention=op)

        def undo() -> None:
            if module.ops is made:
                module.ops = was

        module.ops = made
        self._undo.callback(undo)


def place(
    sites: Sites, model: Transformer, wanted: set[str], attend: Callable[..., AttentionOp]
) -> None:
    """Show the wanted points, each in the order in which it is computed.

    `attend(layer, ops)` makes the attention op of a layer whose scores or weights are wanted.
    """
    if "embed" in wanted:
        sites.on_input(model.layers[0], "embed")
    for i, block in enumerate(model.layers):
        here = {name.split(".", 2)[2] for name in wanted if name.startswith(f"layers.{i}.")}
        if here:
            _place_layer(sites, block, f"layers.{i}.", here, attend)
    if "final" in wanted:
        sites.on_output(model.ln_final, "final")


def _place_layer(
    sites: Sites, block: Any, at: str, here: set[str], attend: Callable[..., AttentionOp]
) -> None:
    if "in" in here:
        sites.on_input(block, at + "in")
    attn: Any = getattr(block, "attn", None)
    if here & {"attn.q", "attn.k", "attn.v"}:
        sites.swap_class(attn, _showing_qkv(type(attn), sites.visit, at, here))
    if here & {"attn.scores", "attn.weights"}:
        sites.swap_attention_op(attn, attend(at + "attn.", attn.ops))
    if "attn.heads" in here:
        sites.on_input(attn.output_proj, at + "attn.heads", attn.split_heads, _join_heads)
    if "attn.out" in here:
        sites.on_output(attn, at + "attn.out")
    ffn: Any = getattr(block, "ffn", None)
    if isinstance(ffn, MoE) and here & {"ffn.router", "ffn.gate", "ffn.hidden", "ffn.experts"}:
        _place_mixture(sites, ffn, at, here)
    else:
        if "ffn.gate" in here:
            sites.on_output(ffn.w1, at + "ffn.gate")
        if "ffn.hidden" in here:
            sites.on_input(ffn.w2, at + "ffn.hidden")
    if "ffn.out" in here:
        sites.on_output(ffn, at + "ffn.out")
    if "mid" in here:  # after ffn.out, whose result it adds up
        _place_mid(sites, block, at + "mid")
    if "out" in here:
        sites.on_output(block, at + "out")


# Inside attention


def _join_heads(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def _showing_qkv(cls: Any, visit: Visit, at: str, here: set[str]) -> type[nn.Module]:
    """Make a subclass of an attention layer that shows its queries, keys and values."""

    def project(self: Any, x: Tensor, context: Any) -> tuple[Tensor, ...]:
        qkv = cls.project(self, x, context)
        names = [f"attn.{name}" for name in "qkv"]
        pairs = zip(names, qkv, strict=True)
        return tuple(visit(at + name, y) if name in here else y for name, y in pairs)

    made: type[nn.Module] = type(f"LookedInto{cls.__name__}", (cls,), {"project": project})
    return made


# Between attention and feed-forward


def _place_mid(sites: Sites, block: Any, name: str) -> None:
    """Show the stream between attention and feed-forward.

    After a post-norm's first norm it is a module's output. A pre-norm block hands it to its second
    norm and adds it to the feed-forward's result: where it is edited, that sum is done once more.
    """
    if block.post_norm:
        sites.on_output(block.ln1, name)
        return
    edited: list[Tensor] = []  # the stream, then the feed-forward's result

    def before_norm(_: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        edited.clear()
        new = sites.visit(name, args[0])
        if new is args[0]:
            return None
        edited.append(new)
        return (new, *args[1:]), kwargs

    def after_ffn(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if edited:
            edited.append(output)

    def after_block(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not edited:
            return None
        mid, ffn_out = edited
        edited.clear()
        return mid + ffn_out

    sites.listen(block.ln2, before_norm, None)
    sites.listen(block.ffn, None, after_ffn)
    sites.listen(block, None, after_block)


# Inside a mixture of experts


def _place_mixture(sites: Sites, ffn: MoE, at: str, here: set[str]) -> None:
    """Show a mixture's points, whose rows are sorted by expert, by token and choice."""
    shape: list[int] = []
    order: list[Tensor] = []  # of the choices, sorted by expert

    def before_ffn(_: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        shape[:] = args[0].shape[:-1]

    def after_router(_: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        experts = ffn.ops.route(logits, ffn.experts_per_token, ffn.renormalize)[2]
        order[:] = [sort_by_expert(experts, logits.shape[-1])[0]]

    def by_token(rows: Tensor) -> Tensor:
        return rows[order[0].argsort()].view(*shape, ffn.experts_per_token, -1)

    def by_expert(x: Tensor) -> Tensor:
        return _flat(x)[order[0]]

    sites.listen(ffn, before_ffn, None)
    if "ffn.router" in here:
        sites.on_output(ffn.router, at + "ffn.router", lambda y: y.view(*shape, -1), _flat)
    sites.listen(ffn.router, None, after_router)
    if "ffn.gate" in here:
        sites.on_output(ffn.w1, at + "ffn.gate", by_token, by_expert)
    if "ffn.hidden" in here:
        sites.on_input(ffn.w2, at + "ffn.hidden", by_token, by_expert)
    if "ffn.experts" in here:
        sites.on_output(ffn.w2, at + "ffn.experts", by_token, by_expert)


def in_backward() -> bool:
    """Whether autograd is running: a layer is computed again, for checkpointing."""
    return torch._C._current_graph_task_id() != -1
