"""One self-contained page of a `Report`: lens, attention, attribution. It loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

import torch

from scratchlm.inspect.report import Guess, Report

_HERE = Path(__file__).parent


def inspect_page(name: str, report: Report, opened: tuple[int, int] | None = None) -> str:
    """Return the page's HTML; `opened` is the layer and head whose pattern it shows first."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    data = json.dumps(_data(name, report, opened), ensure_ascii=False).replace("<", "\\u003c")
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    for slot, text in {
        "policy": policy,
        "title": html.escape(f"{name}, looked into"),
        "script": f"<script>{script}</script>",
        "data": data,
    }.items():
        page = page.replace(f"<!-- {slot} -->", text, 1)
    return page


def _data(name: str, report: Report, opened: tuple[int, int] | None) -> dict[str, Any]:
    attribution = report.attribution
    return {
        "name": name,
        "tokens": report.tokens,
        "next": [_guess(guess) for guess in report.next],
        "lens": [
            {"point": point, "best": [[_guess(guess) for guess in best[:3]] for best in positions]}
            for point, positions in report.lens.items()
        ],
        # a weight as a byte: what a pixel can show
        "weights": {
            layer: [
                base64.b64encode(
                    (head * 255).round().to(torch.uint8).cpu().numpy().tobytes()
                ).decode()
                for head in heads
            ]
            for layer, heads in report.weights.items()
        },
        "opened": opened or (min(report.weights, default=0), 0),
        "attribution": None
        if attribution is None
        else {
            "token": report.attributed[0],
            "against": report.attributed[1],
            "parts": attribution.top(),
            "logit": float(attribution.logit[0]),
            "error": attribution.error,
        },
        "ablated": report.ablated,
        "changes": [[c.text, c.before, c.after] for c in report.changes],
    }


def _guess(guess: Guess) -> list[Any]:
    return [guess.text, round(guess.probability, 5)]
