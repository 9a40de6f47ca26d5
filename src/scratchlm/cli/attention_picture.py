"""Attention in the report: where every head looks, in a text the model wrote."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scratchlm.training import Section

TOKENS, LAYERS, HEADS = 24, 6, 8  # shown at most


def attention_section(run: Path) -> Section | None:
    """Draw the attention of the run's best model over the beginning of its last sample."""
    from scratchlm.inference import load_model
    from scratchlm.inspect import attention_weights
    from scratchlm.training import Section, read_metrics
    from scratchlm.training.report import escape_command

    samples = [line["samples"] for line in read_metrics(run) if line.get("samples")]
    loaded = load_model(run, accelerate=False)
    if not samples or loaded.tokenizer is None:
        return None
    ids = loaded.tokenizer.encode(samples[-1][0])[: min(TOKENS, loaded.config.context_length)]
    if len(ids) < 2:
        return None
    weights = attention_weights(loaded.model, ids)[:LAYERS, :HEADS].float()
    texts = [loaded.tokenizer.decode([token]) for token in ids]
    picture = base64.b64encode(draw_attention(weights.tolist(), texts)).decode()
    shown = " ".join(f"<b>{html.escape(text)}</b>" for text in texts)
    command = escape_command(f"scratchlm next {run} --prompt TEXT --attention LAYER.HEAD")
    body = (
        f'<div class="scroll"><img alt="attention" src="data:image/png;base64,{picture}"></div>'
        "<p>A row is a token, a column what it looks at; the more it does, the bluer. "
        f"<code>{command}</code> shows one head. The tokens: {shown}</p>"
    )
    return Section("Where the heads look", body)


def draw_attention(weights: list[Any], texts: list[str]) -> bytes:
    """Draw a picture for every layer (down) and head (across) as a PNG."""
    from matplotlib.figure import Figure

    layers, heads = len(weights), len(weights[0])
    size = 1.15 if heads > 4 else 1.8
    figure = Figure(figsize=(size * heads + 0.9, size * layers + 0.5), dpi=110)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes = panels[layer][head]
            axes.imshow(weights[layer][head], cmap="Blues", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            if layer == 0:
                axes.set_title(f"head {head}", fontsize=8, color="#6b7280")
            if head == 0:
                axes.set_ylabel(f"layer {layer}", fontsize=8, color="#6b7280")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
