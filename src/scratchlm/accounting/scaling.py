"""Comparisons of several models, and sweeps over one size."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from scratchlm.accounting.expr import Number
from scratchlm.accounting.fits import longer, peak_bytes
from scratchlm.accounting.flops import flops_tree
from scratchlm.accounting.items import Item, evaluate
from scratchlm.accounting.machines import Machine
from scratchlm.accounting.memory import memory
from scratchlm.accounting.parameters import count_parameters
from scratchlm.accounting.roofline import roofline
from scratchlm.accounting.setup import Setup, bindings
from scratchlm.config import ModelConfig, MoE

SWEEPS = ("context_length", "batch", "d_model", "num_layers", "d_ff", "vocab_size", "num_experts")
_MAX_STEPS = 200
# components whose share of the FLOPs is shown, in the order of a forward pass
COMPONENTS = ("projections", "attention", "feed-forward", "LM head")


@dataclass(frozen=True)
class Summary:
    """One model, or one point of a sweep, in a row."""

    name: str
    parameters: int
    active: int
    flops: Number
    shares: dict[str, float]  # of the forward FLOPs, by component
    training_bytes: int
    serving_bytes: int
    kv_bytes_per_token: int
    seconds: float | None  # at the machine's limits


def summarize(
    name: str,
    config: ModelConfig,
    setup: Setup,
    convention: str = "full",
    machine: Machine | None = None,
) -> Summary:
    """Collect a model's main figures."""
    counts = count_parameters(config)
    tree = flops_tree(config, setup.phase, convention, setup.execution, bool(setup.documents))
    item = evaluate(tree, bindings(config, setup))
    held = memory(config, setup)
    return Summary(
        name=name,
        parameters=counts.unique,
        active=counts.active,
        flops=item.value,
        shares=component_shares(item),
        training_bytes=max(held.moments.values()),
        serving_bytes=peak_bytes(config, setup, serving=True),
        kv_bytes_per_token=held.kv_cache_per_token,
        seconds=roofline(config, setup, machine).seconds if machine else None,
    )


def component_shares(tree: Item) -> dict[str, float]:
    """Return every component's share of a tree of FLOPs (none under 6ND, which knows no parts)."""
    sums = dict.fromkeys(COMPONENTS, 0.0)
    belongs = {**{name: name for name in COMPONENTS}, "QKᵀ again": "attention"}

    def add(item: Item, times: Number) -> None:
        if item.name in belongs:
            sums[belongs[item.name]] += float(item.value * times)
        else:
            for child in item.children:
                add(child, times * item.times)

    add(tree, 1)
    whole = float(tree.value)
    return {name: value / whole for name, value in sums.items()} if any(sums.values()) else {}


def sweep(
    config: ModelConfig,
    setup: Setup,
    field: str,
    values: list[int],
    convention: str = "full",
    machine: Machine | None = None,
) -> list[Summary]:
    """Return a summary for every value of one size."""
    rows = []
    for value in values:
        changed, work = _changed(config, setup, field, value)
        rows.append(summarize(f"{value:,}", changed, work, convention, machine))
    return rows


def _changed(
    config: ModelConfig, setup: Setup, field: str, value: int
) -> tuple[ModelConfig, Setup]:
    if field == "batch":
        return config, dataclasses.replace(setup, batch=value)
    if field == "context_length":
        changed = dataclasses.replace(setup, context=value, cache=None, documents=())
        return longer(config, value), changed
    # growing the model leaves the work alone, though a context of None follows the model
    setup = dataclasses.replace(setup, context=setup.context or config.context_length)
    if field == "d_model":
        return _wider(config, value), setup
    if field == "num_experts":
        if not isinstance(config.ffn, MoE):
            raise ValueError("a sweep of num_experts needs a model with a mixture of experts")
        ffn = dataclasses.replace(config.ffn, num_experts=value)
        return dataclasses.replace(config, ffn=ffn), setup
    return dataclasses.replace(config, **{field: value}), setup  # type: ignore[arg-type]


def _wider(config: ModelConfig, d_model: int) -> ModelConfig:
    """Widen with the head's width kept: heads and d_ff grow in proportion."""
    group = config.num_heads // config.num_kv_heads
    kv_heads = config.num_kv_heads * d_model / config.d_model
    if kv_heads != int(kv_heads) or kv_heads < 1:
        step = config.d_model // config.num_kv_heads
        raise ValueError(
            f"d_model must be a multiple of {step} to keep heads of width {config.d_head}; "
            f"got d_model={d_model}"
        )
    return dataclasses.replace(
        config,
        d_model=d_model,
        num_kv_heads=int(kv_heads),
        num_heads=int(kv_heads) * group,
        d_ff=max(1, round(config.d_ff * d_model / config.d_model)),
    )


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Read `field=a..b` (doubling), `field=a..b+step` or `field=a,b,c`."""
    field, equals, values = text.partition("=")
    field = field.strip()
    if not equals or field not in SWEEPS:
        names = ", ".join(SWEEPS)
        raise ValueError(f"a sweep is FIELD=FROM..TO with FIELD one of {names}; got {text!r}")
    span = re.fullmatch(r"\s*([\d_]+)\.\.([\d_]+)(?:\+([\d_]+))?\s*", values)
    if span is None:
        if not re.fullmatch(r"\s*[\d_]+(\s*,\s*[\d_]+)*\s*", values):
            raise ValueError(
                f"a sweep's values are FROM..TO, FROM..TO+STEP or A,B,C; got {values!r}"
            )
        return field, [int(value) for value in values.split(",")]
    first, last = int(span[1]), int(span[2])
    step = int(span[3]) if span[3] else None
    if not 0 < first <= last or step == 0:
        raise ValueError(f"a sweep must go up from a value of at least 1; got {values!r}")
    points = [first]
    while (following := points[-1] + step if step else 2 * points[-1]) <= last:
        points.append(following)
        if len(points) > _MAX_STEPS:
            raise ValueError(f"a sweep must have at most {_MAX_STEPS} steps; got {values!r}")
    return field, points
