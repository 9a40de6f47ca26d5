"""Attention in the report: where every head looks, in a text the model wrote."""

from __future__ import annotations

import html
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
    from scratchlm.training.report import escape_command, picture_html

    samples = [line["samples"] for line in read_metrics(run) if line.get("samples")]
    loaded = load_model(run, accelerate=False)
    if not samples or loaded.tokenizer is None:
        return None
    ids = loaded.tokenizer.encode(samples[-1][0])[: min(TOKENS, loaded.config.context_length)]
    if len(ids) < 2:
        return None
    weights = attention_weights(loaded.model, ids)[:LAYERS, :HEADS].float().tolist()
    wide, narrow = draw_attention(weights), draw_attention(weights, narrow=True)
    texts = [loaded.tokenizer.decode([token]) for token in ids]
    shown = " ".join(f"<b>{html.escape(text)}</b>" for text in texts)
    command = escape_command(f"scratchlm next {run} --prompt TEXT --attention LAYER.HEAD")
    body = (
        picture_html("attention", wide, narrow)
        + "<p>A row is a token, a column what it looks at; the more it does, the stronger. "
        f"<code>{command}</code> shows one head. The tokens: {shown}</p>"
    )
    return Section("Where the heads look", body)


def draw_attention(weights: list[Any], *, narrow: bool = False) -> bytes:
    """Draw a picture for every layer (down) and head (across) as a PNG.

    For a phone the heads of a layer go on in the next row, each named LAYER.HEAD.
    """
    from matplotlib.figure import Figure

    from scratchlm.training.plots import png

    heads = len(weights[0])
    columns = min(heads, 4) if narrow else heads
    rows = len(weights) * -(-heads // columns)
    size = 3.4 / columns if narrow else 1.15 if heads > 4 else 1.8
    label = {"fontsize": 8, "color": "#6b7280"}
    height = (size + 0.2 if narrow else size) * rows + 0.5
    figure = Figure(figsize=(size * columns + (0.2 if narrow else 0.9), height), dpi=110)
    figure.set_layout_engine("constrained")
    panels = iter(figure.subplots(rows, columns, squeeze=False).flat)
    for layer, of_layer in enumerate(weights):
        for head in range(-(-heads // columns) * columns):
            axes = next(panels)
            if head >= heads:
                axes.set_axis_off()
                continue
            axes.imshow(of_layer[head], cmap="Blues", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            if narrow:
                axes.set_title(f"{layer}.{head}", **label)
            elif layer == 0:
                axes.set_title(f"head {head}", **label)
            if head == 0 and not narrow:
                axes.set_ylabel(f"layer {layer}", **label)
    return png(figure)
