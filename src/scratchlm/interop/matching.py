"""Match a directory's tensors to a family's table: every tensor is accounted for, or refused.

Decided on headers and config alone, before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from scratchlm.config import ModelConfig, MoE
from scratchlm.config.heads import TaskHead
from scratchlm.errors import ScratchLMError
from scratchlm.interop.heads import shapes_of
from scratchlm.interop.keys import Family, Table
from scratchlm.interop.links import Link, one_per_expert
from scratchlm.interop.safetensors_file import WEIGHT_DTYPES, Stored
from scratchlm.interop.shapes import Shape
from scratchlm.untrusted import listed, shown

_LAYER = re.compile(r"(?<![^.])(layers|h)\.([0-9]+)\.")


@dataclass(frozen=True)
class TensorMap:
    """Our tensors, in order: the shape of each, and the links that fill it (none: it is ones)."""

    shapes: dict[str, Shape]
    links: dict[str, tuple[Link, ...]]

    def by_their_name(self) -> dict[str, list[Link]]:
        """Return the links that make up each of their tensors."""
        found: dict[str, list[Link]] = {}
        for links in self.links.values():
            for link in links:
                found.setdefault(link.theirs, []).append(link)
        return found


def map_tensors(config: ModelConfig, table: Table, head: TaskHead | None = None) -> TensorMap:
    """Link our tensors to a table's names."""
    rows = {key.ours: key for key in table}
    shapes: dict[str, Shape] = {}
    links: dict[str, tuple[Link, ...]] = {}
    for name, shape in shapes_of(config, head):
        pattern, layer = _pattern(name)
        if pattern not in rows:
            raise ScratchLMError(f"the family has no tensor for {shown(name)}")
        key = rows[pattern]
        shapes[name] = shape
        links[name] = tuple(key.how(name, key.theirs.replace("{i}", layer), shape))
    return TensorMap(shapes, links)


def _pattern(name: str) -> tuple[str, str]:
    """Turn layers.3.… into layers.{i}.… and 3."""
    match = _LAYER.search(name)
    if match is None:
        return name, ""
    return f"{name[: match.start(2)]}{{i}}{name[match.end(2) :]}", match[2]


def num_tensors(config: ModelConfig, table: Table) -> int:
    """Bound from above how many tensors a table lists for a config, without listing them."""
    experts = config.ffn.num_experts if isinstance(config.ffn, MoE) else 1
    per_layer = sum(
        experts if key.how is one_per_expert else 1 for key in table if "{i}" in key.ours
    )
    return len(table) + config.num_layers * per_layer


def match(
    config: ModelConfig,
    family: Family,
    stored: Mapping[str, Stored],
    where: object,
    head: TaskHead | None = None,
    dtypes: Collection[str] = tuple(WEIGHT_DTYPES),
) -> TensorMap:
    """Return the mapping that accounts for every stored tensor; else name what does not fit."""
    names = {name for name in stored if not _is_recomputed(name, family)}
    if config.tie_embeddings:
        names.discard(family.head)  # compared with the table it is tied to when it is read
    best: tuple[int, str] | None = None
    for table in family.tables:
        if config.num_layers > len(names) or _too_many(config, table, len(names)):
            continue
        mapping = map_tensors(config, table, head)
        wanted = {name: links[0].their_shape for name, links in mapping.by_their_name().items()}
        missing, unexpected = wanted.keys() - names, names - wanted.keys()
        if not missing and not unexpected:
            _check_stored(wanted, stored, where, dtypes)
            return mapping
        problem = _problem(_in_order(wanted, missing), _in_order(stored, unexpected))
        if best is None or len(missing) + len(unexpected) < best[0]:
            best = len(missing) + len(unexpected), problem
    if best is None:
        raise ScratchLMError(
            f"{where}: the config describes {config.num_layers} layers; "
            f"the files hold {len(names)} tensors in all, too few for them"
        )
    raise ScratchLMError(f"{where}: the tensors are not those of the config: {best[1]}")


def _too_many(config: ModelConfig, table: Table, present: int) -> bool:
    """Whether a table has far more tensors than there are: listing them would be wasted work."""
    return num_tensors(config, table) > 16 * (present + len(table))


def _in_order(order: Iterable[str], chosen: set[str]) -> list[str]:
    return [name for name in order if name in chosen]


def _problem(missing: list[str], unexpected: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"missing {listed(missing)}")
    if unexpected:
        parts.append(f"unexpected {listed(unexpected)}")
    return "; ".join(parts)


def _is_recomputed(name: str, family: Family) -> bool:
    return bool(family.recomputed) and _pattern(name)[0] in family.recomputed


class HasShape(Protocol):
    """What a file says of a tensor before it is read."""

    @property
    def dtype(self) -> str:
        """The word safetensors has for it."""

    @property
    def shape(self) -> Shape:
        """Its sizes."""


Alternatives = Callable[[str, Shape], Iterable[tuple[str, Shape]]]


def check_stored(
    config: ModelConfig,
    stored: Mapping[str, HasShape],
    where: object,
    alternatives: Alternatives | None = None,
    head: TaskHead | None = None,
) -> dict[str, str]:
    """Refuse weights of ours (`where`) whose tensors are not those of a config.

    `alternatives` yields names and shapes of bytes that may stand for a tensor. Return the name
    each tensor is stored under.
    """
    if config.num_layers > len(stored):
        raise ScratchLMError(
            f"{where}: the config describes {config.num_layers} layers; the files hold "
            f"{len(stored)} tensors in all, too few for them"
        )
    wanted: dict[str, Shape] = {}
    of_bytes: dict[str, Shape] = {}
    names: dict[str, str] = {}
    for name, shape in shapes_of(config, head):
        others = [] if alternatives is None or name in stored else alternatives(name, shape)
        other = next(((n, s) for n, s in others if n in stored), None)
        names[name] = name if other is None else other[0]
        wanted.update([other or (name, shape)])
        of_bytes.update([other] if other else [])
    missing, unexpected = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    if missing or unexpected:
        problem = _problem(_in_order(wanted, missing), _in_order(stored, unexpected))
        raise ScratchLMError(f"{where}: the tensors are not those of the config: {problem}")
    _check_stored({n: s for n, s in wanted.items() if n not in of_bytes}, stored, where)
    _check_stored(of_bytes, stored, where, ("U8",))
    return names


def _check_stored(
    wanted: Mapping[str, Shape],
    stored: Mapping[str, HasShape],
    where: object,
    dtypes: Collection[str] = tuple(WEIGHT_DTYPES),
) -> None:
    """Refuse tensors of another shape, or of a dtype that is not a weight's."""
    misshapen = [
        f"{name} must be {list(shape)}, got {list(stored[name].shape)}"
        for name, shape in wanted.items()
        if stored[name].shape != shape
    ]
    if misshapen:
        raise ScratchLMError(f"{where}: misshapen: {_first(misshapen)}")
    odd = [f"{name} is {stored[name].dtype}" for name in wanted if stored[name].dtype not in dtypes]
    if odd:
        hints = {tuple(WEIGHT_DTYPES): " (not quantized)", ("U8",): " (quantized)"}
        words = ", ".join(dtypes) + hints.get(tuple(dtypes), "")
        raise ScratchLMError(f"{where}: weights must be {words}: {_first(odd)}")


def _first(problems: list[str]) -> str:
    more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
    return "; ".join(problems[:4]) + more
