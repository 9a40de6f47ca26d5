"""One self-contained page that computes a model's account in the browser.

The page holds no formula of its own: `page_formulas.py` writes the formulas of this package as
data, a small interpreter in `page_formulas.js` evaluates them with whole numbers of any size, and
`page.js` draws. It loads nothing, and its Content-Security-Policy forbids it to.
"""

from __future__ import annotations

import base64
import hashlib
import html
import shlex
from pathlib import Path
from typing import Any

from scratchlm.accounting.flops import CONVENTIONS
from scratchlm.accounting.machines import MACHINES, PRICES_AS_OF, Machine
from scratchlm.accounting.machines import machine as find_machine
from scratchlm.accounting.money import DEFAULT_MFU
from scratchlm.accounting.page_controls import Money, groups
from scratchlm.accounting.page_formulas import Formulas, as_json, formulas_data, variants
from scratchlm.accounting.page_rules import rules
from scratchlm.accounting.setup import Setup
from scratchlm.config import ModelConfig

_HERE = Path(__file__).parent
_SCRIPTS = (
    *("page_formulas.js", "page_projection.js", "page_numbers.js", "page_controls.js"),
    "page.js",
)


def account_page(
    name: str,
    config: ModelConfig,
    setup: Setup | None = None,
    *,
    machine: str | Machine = "h100-sxm",
    convention: str = "full",
    tokens: int | None = None,
    mfu: float = DEFAULT_MFU,
    price: float | None = None,
    link: float | None = None,
) -> str:
    """Return the page's HTML; the arguments are what it opens with."""
    setup = setup or Setup()
    if setup.documents:
        raise ValueError(
            "a page cannot hold packed documents: documents and html exclude each other"
        )
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}; got {convention!r}")
    gpu = find_machine(machine) if isinstance(machine, str) else machine
    money = Money(tokens, mfu, price, None if link is None else link / 1e9)
    data = _data(name, config, setup, gpu, convention, money)
    scripts = [(_HERE / script).read_text(encoding="utf-8") for script in _SCRIPTS]
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    for slot, text in {
        "policy": _policy(scripts),
        "title": html.escape(f"{name}: what it costs"),
        "data": as_json(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }.items():
        page = page.replace(f"<!-- {slot} -->", text, 1)
    return page


def _data(
    name: str, config: ModelConfig, setup: Setup, gpu: Machine, convention: str, money: Money
) -> dict[str, Any]:
    machines = list({**MACHINES, gpu.name: gpu}.values())
    table = Formulas()
    trees = formulas_data(table, config, machines)
    controls = groups(config, setup, convention, gpu, machines, money)
    return {
        "name": name,
        "argument": shlex.quote(name),
        "kinds": {kind: _kinds(model) for kind, model in variants(config).items()},
        "prices_as_of": PRICES_AS_OF,
        "controls": {
            title: [control.data(table) for control in found] for title, found in controls.items()
        },
        "rules": rules(config, table),
        **trees,
        # last: until here formulas were being added
        "formulas": table.formulas,
        "nodes": table.nodes,
    }


def _kinds(model: ModelConfig) -> str:
    return ", ".join(type(part).__name__ for part in (model.ffn, model.norm, model.positions))


def _policy(scripts: list[str]) -> str:
    """Return a Content-Security-Policy that allows these scripts and inline style only."""
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
