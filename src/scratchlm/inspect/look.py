"""`inspect(model)`: one context in which any point of a model can be kept and changed.

    with inspect(model) as look:
        look.keep("layers.*.attn.weights")
        look.zero("layers.1.attn.heads", heads=[3])
        model(tokens)                       # or a loss and its backward pass, or `generate`
    look.cache["layers.0.attn.weights"]     # (batch, heads, position, key)

Edits of a point happen in the order in which they were asked for; what is kept is what goes on
after them. Looking changes no bit of what the model computes. What cannot be applied is an error:
at once where the model shows it, else when a forward lacks it or the context ends without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypedDict, Unpack

from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm.inspect.cache import Cache
from scratchlm.inspect.edits import Edit, Kind, make_edit
from scratchlm.inspect.points import Point, points, resolve
from scratchlm.inspect.selection import Indices, Run, Selection
from scratchlm.inspect.sites import Sites, in_backward, place
from scratchlm.inspect.sweeping import Metric, sweep
from scratchlm.inspect.weights import attention_op
from scratchlm.model import Transformer

Names = str | Iterable[str]


class Part(TypedDict, total=False):
    """Which part of a point is meant; all of it where nothing is said."""

    positions: Indices  # absolute: 0 is the first token
    heads: Indices
    units: Indices  # of the last axis: channels, neurons, experts, tokens


def inspect(model: Transformer) -> Look:
    """Open a model: `with inspect(model) as look:`."""
    return Look(model)


class Look:
    """A model that is open: what is kept, what is edited, and the cache of the latest run."""

    def __init__(self, model: Transformer) -> None:
        if not isinstance(model, Transformer):
            raise TypeError(f"inspect takes a TransformerLM; got {type(model).__name__}")
        self.model = model
        self.run = Run(0, 0, None)
        self._cache: Cache | None = None
        self._keeps: dict[str, tuple[Selection, bool]] = {}  # and whether with its gradient
        self._edits: dict[str, list[Edit]] = {}
        self._sites: Sites | None = None
        self._is_open = self._is_muted = False
        self._final: tuple[Any, ...] = ()  # which memory the final vectors lie in

    def __enter__(self) -> Look:
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._is_open = False
        self._close_sites()
        if kind is None:
            for selection in self._selections():
                selection.check_met()

    @property
    def points(self) -> dict[str, Point]:
        """The points of this model, by name."""
        return points(self.model)

    @property
    def cache(self) -> Cache:
        """What was kept of the latest run."""
        if self._cache is None:
            raise ValueError("nothing has run inside the context yet, so nothing is kept")
        return self._cache

    # Keeping and editing

    def keep(self, points: Names, *, grad: bool = False, **part: Unpack[Part]) -> None:
        """Keep points of every forward that follows, whole or in part.

        With `grad`, the tensor stays in autograd's graph: after `backward()` its `.grad` is there.
        """
        found = self._resolve(points)
        for point in found:
            if point.name in self._keeps:
                raise ValueError(f"{point.name} is kept already")
            if grad and any(chosen is not None for chosen in part.values()):
                raise ValueError(f"keep({point.name!r}): grad keeps a whole point, not a part")
        for point in found:
            self._keeps[point.name] = (self.select(point, "keep", **part), grad)
        self._place_sites()

    def set(self, points: Names, value: Tensor | float, **part: Unpack[Part]) -> None:
        """Put a value in a point's place; a value by position says by itself which it is for."""
        self._edit("set", "set", points, value, **part)

    def add(self, points: Names, value: Tensor | float, **part: Unpack[Part]) -> None:
        """Add a value to a point."""
        self._edit("add", "add", points, value, **part)

    def scale(self, points: Names, factor: Tensor | float, **part: Unpack[Part]) -> None:
        """Multiply a point by a factor."""
        self._edit("scale", "scale", points, factor, **part)

    def zero(self, points: Names, **part: Unpack[Part]) -> None:
        """Put 0 in a point's place."""
        self._edit("set", "zero", points, 0.0, **part)

    def mean(self, points: Names, from_: Cache, **part: Unpack[Part]) -> None:
        """Put a point's mean over the rows and positions of another run in its place."""
        for point in self._resolve(points):
            value = from_.mean_value(self.select(point, "mean", **part))
            self._edit("set", "mean", point.name, value, **part)

    def patch(self, points: Names | None = None, *, from_: Cache, **part: Unpack[Part]) -> None:
        """Put in a point's place what another run had there; None: all that was kept of it."""
        names: Names = list(from_) if points is None else points
        for point in self._resolve(names):
            value, placed = from_.patch_value(self.select(point, "patch", **part))
            self._edit("set", "patch", point.name, value, **{**part, "positions": placed})

    def clear(self) -> None:
        """Take all edits and keeps back."""
        self._keeps.clear()
        self._edits.clear()
        self._close_sites()

    def lens(self) -> Float[Tensor, "layers batch position vocab"]:
        """Return the logits after the embedding and after every layer (`Cache.lens`)."""
        return self.cache.lens()

    def sweep(
        self,
        points: Names,
        metric: Metric,
        *,
        tokens: Int[Tensor, "1 seq"],
        from_: Cache | None = None,
        each: str = "point",
        batch: int = 32,
    ) -> Tensor:
        """Return the metric of the logits under one patch at a time, many in one batch.

        A patch puts what `from_` had there in a point's place, or 0 where `from_` is None. `each`
        says what one patch is: a "point", a "position" or a "head" of it, or "position head"; the
        result has the points as its first axis, then these. `metric` takes logits (batch, seq,
        vocab), and gives one number a row.
        """
        return sweep(self, self._resolve(points), metric, tokens, from_, each, batch)

    # How it is done

    def _resolve(self, names: Names) -> list[Point]:
        if not self._is_open:
            raise ValueError("the context is closed: keep and edit inside `with inspect(model)`")
        return resolve(self.model, names)

    def select(self, point: Point, what: str, **part: Any) -> Selection:
        """Check which part of a point is meant."""
        return Selection.of(point, what, self.model.config.context_length, **part)

    def _edit(
        self, kind: Kind, what: str, points: Names, value: Tensor | float, **part: Any
    ) -> list[Edit]:
        length = self.model.config.context_length
        made = [make_edit(kind, what, p, value, length, **part) for p in self._resolve(points)]
        self.add_edits(made)
        return made

    def add_edits(self, edits: list[Edit]) -> None:
        """Make these edits from now on."""
        for edit in edits:
            self._edits.setdefault(edit.selection.point.name, []).append(edit)
        self._place_sites()

    @contextmanager
    def trying(self, edits: list[Edit]) -> Iterator[None]:
        """Make these edits for a while, and keep nothing."""
        before = {name: list(made) for name, made in self._edits.items()}
        self._is_muted = True
        try:
            self.add_edits(edits)
            yield
        finally:
            self._edits, self._is_muted = before, False
            self._place_sites()

    def _selections(self) -> Iterator[Selection]:
        yield from (selection for selection, _ in self._keeps.values())
        yield from (edit.selection for made in self._edits.values() for edit in made)

    def _place_sites(self) -> None:
        """Go to all points that are kept or edited, in the order of the model."""
        self._close_sites()
        self._sites = sites = Sites(self.visit)
        sites.listen(self.model.layers[0], self._begin, None)
        wanted = {*self._keeps, *self._edits}
        place(sites, self.model, wanted, lambda at, ops: attention_op(self, at, ops))
        if "logits" in wanted:
            sites.listen(self.model.ln_final, None, self._note_final)
            sites.listen(self.model.lm_head, None, self._visit_logits)  # type: ignore[arg-type]

    def _close_sites(self) -> None:
        if self._sites is not None:
            self._sites.close()
            self._sites = None

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note where the tokens of a forward stand; one that does not go on opens a cache."""
        if in_backward():
            return
        self.run = Run.of(args[0], kwargs.get("context"))
        if self._is_muted:
            return
        if self._cache is None or not self.run.cached or self.run.begins:
            self._cache = Cache(self.model)
        self._cache.edited |= self._edits.keys()

    def visit(self, name: str, x: Tensor) -> Tensor:
        """Edit a point, keep it, and return what goes on: the same tensor where nothing is edited.

        This is what the sites call.
        """
        for edit in self._edits.get(name, ()):
            x = edit.apply(x, self.run)
        selection, grad = self._keeps.get(name, (None, False))
        if selection is None or self._is_muted or in_backward():
            return x
        if grad:
            if not x.requires_grad:
                raise ValueError(f"keep({name!r}, grad=True): no gradient flows here")
            x = x.view_as(x)  # on the path, whatever the point's axes
            x.retain_grad()
            self._add(selection, x)
            return x
        self.record(selection, selection.take(x, self.run))
        return x

    def record(self, selection: Selection, part: Tensor) -> None:
        """Keep the part of a point that is meant, and no byte besides."""
        if self._is_muted or in_backward():
            return
        whole = part.untyped_storage().nbytes() == part.nbytes
        part = part.detach()
        self._add(selection, part if whole and not part.is_inference() else part.clone())

    def _add(self, selection: Selection, part: Tensor) -> None:
        selection.meet(self.run)
        if self._cache is not None and part.shape[selection.point.position_axis]:
            self._cache.add(selection, part, selection.placed(self.run, part.device))

    def wanted(self, name: str) -> Selection | None:
        """Return what is kept of a point."""
        return self._keeps.get(name, (None, False))[0]

    def is_changed(self, *names: str) -> bool:
        """Whether one of these points is edited, or its gradient kept."""
        return any(self._edits.get(name) or self._keeps.get(name, (0, 0))[1] for name in names)

    # The head, which may be called on chosen vectors

    def _note_final(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Remember where the final vectors lie, to know them again."""
        self._final = (output.shape, output.data_ptr(), output[:, -1].data_ptr())

    def _visit_logits(self, _: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor | None:
        """Show the logits: of all vectors, of the last column, or of vectors chosen otherwise."""
        x, whole, run = args[0], logits.ndim == 3, self.run
        shape, all_at, last_at = self._final
        if not (x.shape == shape and x.data_ptr() == all_at):
            is_last = x.shape == (shape[0], shape[2]) and x.data_ptr() == last_at
            self.run = run.last() if is_last else Run(len(x), logits[0, ..., 0].numel(), None)
        seen = logits if whole else logits[:, None]
        try:
            new = self.visit("logits", seen)
        finally:
            self.run = run
        if new is seen:
            return None
        return new if whole else new[:, 0]
