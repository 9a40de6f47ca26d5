"""Numbers of the account: what a token cost, each with its formula and the sizes in it."""

from __future__ import annotations

from typing import Any

from scratchlm.accounting.account import account
from scratchlm.accounting.expr import Expr, number_text
from scratchlm.accounting.machines import machine as find_machine
from scratchlm.accounting.roofline import roofline_env, roofline_parts
from scratchlm.accounting.setup import Setup
from scratchlm.serve.explanation import Explanation, source
from scratchlm.serve.look_engine import work_of
from scratchlm.serve.subject import Ids, Subject

_QUANTITIES = {"line": "FLOP", "flops": "FLOP", "bytes": "B", "seconds": "s"}
# The lines that say what a component computes and moves; those not named are matmuls.
_COMPONENTS = {
    "attention": 'Part("attention"',
    "experts": 'Part("experts"',
    "norms, residuals, activations": '"norms, residuals, activations"',
}


def cost(
    subject: Subject,
    ids: Ids,
    what: str,
    part: str | None = None,
    num_prompt: int = 0,
    machine: str = "h200",
) -> Explanation:
    """Explain FLOPs, bytes or seconds of the step that chose the token after these ids.

    "line" is a line of the account's FLOPs; the others are a component's, or the sum of all.
    """
    if what not in _QUANTITIES:
        raise ValueError(f"what must be one of {', '.join(_QUANTITIES)}; got {what!r}")
    asked = {"kind": "cost", "num_prompt": num_prompt, "machine": machine}
    setup = work_of(subject.model, len(ids), num_prompt)
    step = f"token {len(ids)}, {setup['phase']}"
    if what == "line":
        return _line(subject, setup, part, asked, step)
    made = Setup(**setup)
    parts, workload = roofline_parts(subject.model.config, made)
    env = roofline_env(subject.model.config, made, find_machine(machine), workload)
    unit = _QUANTITIES[what]
    named: dict[str, Expr] = {one.name: getattr(one, what) for one in parts}
    if part is None:
        values = {name: float(one.value(env)) for name, one in named.items()}
        return {
            "name": f"{what} of {step}, in {unit}",
            "formula": " + ".join(values),
            "numbers": " + ".join(f"{value:.6g}" for value in values.values()),
            "value": sum(values.values()),
            "parts": [
                [name, value, {**asked, "what": what, "part": name}]
                for name, value in values.items()
            ],
            "source": source("accounting/roofline.py", "seconds = sum(bound.seconds"),
        }
    if part not in named:
        raise ValueError(f"part must be one of {', '.join(named)}; got {part!r}")
    one = named[part]
    line = "largest(self.flops" if what == "seconds" else _COMPONENTS.get(part, "Part(name, 2 * t")
    return {
        "name": f"{part}: {what} of {step}, in {unit}",
        "formula": one.symbols(),
        "numbers": one.numbers(env),
        "value": float(one.value(env)),
        "parts": [[name, env[name], None] for name in sorted(one.names())],
        "source": source("accounting/roofline.py", line),
    }


def _line(
    subject: Subject, setup: dict[str, Any], part: str | None, asked: dict[str, Any], step: str
) -> Explanation:
    root = account(subject.model.config, **setup).flops["causal"]
    try:
        item = root if part is None else root[part]
    except KeyError:
        names = ", ".join(line.name for depth, line in root.walk() if depth)
        raise ValueError(f"part must be one of {names}; got {part!r}") from None
    return {
        "name": f"{item.name}: FLOPs of {step}" + (f" ({item.note})" if item.note else ""),
        "formula": item.symbols,
        "numbers": item.numbers,
        "value": item.value,
        "parts": [
            [
                f"{one.name}, {number_text(item.times)} times" if item.times > 1 else one.name,
                one.value,
                {**asked, "what": "line", "part": one.name},
            ]
            for one in item.children
        ],
        "source": source("accounting/flops.py", _LINES.get(item.name.split()[0], "def _forward")),
    }


# The line of the account that makes a line, by its first word
_LINES = {
    "layers": 'group("layers", layer',
    "LM": 'leaf("LM head"',
    "projections": 'group("projections"',
    "Q": 'leaf("Q projection"',
    "K": 'leaf("K projection"',
    "V": 'leaf("V projection"',
    "output": 'leaf("output projection"',
    "attention": 'group("attention"',
    "QKᵀ": 'leaf("QKᵀ", 2',
    "AV": 'leaf("AV"',
    "router": 'leaf("router"',
    "experts": 'leaf(f"experts {w}"',
    "feed-forward": "def _ffn",
    "W1": "leaf(name, 2 * rows * d * d_ff)",
    "W2": "leaf(name, 2 * rows * d * d_ff)",
    "W3": "leaf(name, 2 * rows * d * d_ff)",
}
