"""What every explanation of a number is made of: formula, values, and a line of code.

An explanation is `name`, `formula`, `numbers` (the formula with the values in), `value`, `parts`
(name, value, and what to ask to have that value explained, or None), and `source`. Numbers are
computed once more in float64 from what the model kept.
"""

from __future__ import annotations

import ast
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inspect import Look, inspect
from scratchlm.model import LayerNorm, RMSNorm
from scratchlm.serve.subject import Ids, Subject, check_index

Explanation = dict[str, Any]
Part = list[Any]
REFERENCE = "ops/reference.py"
_PACKAGE = Path(__file__).parents[1]
_TERMS = 6  # of a long sum that are written out


@cache
def source(file: str, line: str) -> dict[str, Any]:
    """Return the function in which the first line that holds `line` stands, and where."""
    text = (_PACKAGE / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    at = next(i for i, one in enumerate(lines, 1) if line in one)
    kinds = (ast.FunctionDef, ast.Assign, ast.AnnAssign)
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and node.lineno <= at <= (node.end_lineno or 0)
    ]
    inner = max(around, key=lambda node: (isinstance(node, ast.FunctionDef), node.lineno))
    code = "\n".join(lines[inner.lineno - 1 : inner.end_lineno])
    return {
        "file": file,
        "line": at,
        "first": inner.lineno,
        "code": textwrap.dedent(code).splitlines(),
    }


def softmax(x: Float[Tensor, " vocab"], token: int, letter: str) -> Explanation:
    """Explain a probability by the logits it comes from; −∞ is a token that was removed."""
    top, own = float(x.max()), float(x[token])
    total = float((x - top).exp().sum())
    return {
        "formula": f"p = exp({letter}_t − max {letter}) / Σ_i exp({letter}_i − max {letter})",
        "numbers": f"exp({own:.6g} − {top:.6g}) / {total:.6g}",
        "value": math.exp(own - top) / total,
        "parts": [
            [f"{letter}_t", own, None],
            [f"max {letter}", top, None],
            [f"Σ over {int(x.isfinite().sum())} tokens", total, None],
        ],
        "source": source(REFERENCE, "weights / total"),
    }


@torch.no_grad()
def logit_terms(
    subject: Subject,
    ids: Ids,
    token: int,
    against: int | None,
    change: Callable[[Look], None] = lambda look: None,
) -> Explanation:
    """Explain the last position's logit of a token, or its lead, while `change` is in the model."""
    model: Any = subject.model
    last, stream = len(ids) - 1, f"layers.{len(model.layers) - 1}.out"
    head = model.lm_head
    check_token(token, len(head.weight))
    with inspect(model) as look:
        change(look)
        look.keep(["final", stream], positions=[last])
        model(subject.row(ids))
    h, row = look.cache["final"][0, 0].double(), head.weight[token].double()
    bias = getattr(head, "bias", None)
    added = 0.0 if bias is None else float(bias[token])
    weight, sum_of, of_bias = f"W[{token}, ", "W[t, c]", " + b[t]"
    if against is not None:
        check_token(against, len(head.weight))
        row = row - head.weight[against].double()
        added -= 0.0 if bias is None else float(bias[against])
        weight, sum_of, of_bias = "ΔW[", "(W[t, c] − W[a, c])", " + b[t] − b[a]"
    terms = h * row
    return {
        "formula": f"x = Σ_c {sum_of} · h[c]" + ("" if bias is None else of_bias),
        "numbers": sum_text(terms) + ("" if bias is None else f" + {added:.4g}"),
        "value": float(terms.sum()) + added,
        "parts": [
            [f"{weight}{c}] · h[{c}] = {row[c]:.4g} · {h[c]:.4g}", float(terms[c]), None]
            for c in largest(terms)
        ]
        + norm_part(model.ln_final, look.cache[stream][0, 0]),
        "source": source(REFERENCE, "einsum(x, weight"),
    }


def norm_part(norm: Any, stream: Tensor) -> list[Part]:
    """Name the scale by which the final norm divides."""
    x = stream.double()
    if isinstance(norm, RMSNorm):
        scale = float((x.pow(2).mean() + norm.eps).sqrt())
        return [["√(mean(x²) + ε) of the final norm", scale, None]]
    if isinstance(norm, LayerNorm):
        deviation = ((x - x.mean()).pow(2).mean() + norm.eps).sqrt()
        return [["√(var + ε) of the final norm", float(deviation), None]]
    return []


def largest(terms: Tensor) -> list[int]:
    """Return the places of the terms of a sum that are largest in size."""
    found: list[int] = terms.abs().topk(min(_TERMS, len(terms))).indices.tolist()
    return found


def sum_text(terms: Tensor | Sequence[float]) -> str:
    """Write the largest terms of a sum, and the rest as one."""
    terms = torch.as_tensor(terms, dtype=torch.float64)
    order = largest(terms)
    shown = [f"{float(terms[i]):.4g}" for i in order]
    if len(terms) > len(order):
        rest = float(terms.sum() - terms[order].sum())
        shown.append(f"{rest:.4g} (the other {len(terms) - len(order)})")
    return " + ".join(shown).replace("+ -", "− ")


def quoted(subject: Subject, token: int) -> str:
    """Return a token's text in quotation marks."""
    return json.dumps(subject.text(token), ensure_ascii=False)


def check_token(token: int, vocab: int) -> None:
    """Refuse a token the vocabulary does not have."""
    check_index("token", token, vocab)
