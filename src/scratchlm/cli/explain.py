"""`scratchlm explain`: which fusions run on a model here, and why the others do not."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from scratchlm.cli.device import Device, choose_device
from scratchlm.cli.terminal import say


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("explain")(explain)


def explain(
    model: Annotated[
        str, typer.Argument(help="A run, a preset, a config file, or a folder with a config.json.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sequence.", show_default="the model's")
    ] = None,
    training: Annotated[bool, typer.Option(help="With gradients, or without.")] = True,
    quantize: Annotated[
        str | None,
        typer.Option(help="With weights in few bits: q8_0, q4_k, ….", show_default="as stored"),
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which fusions run on a model's layers on this machine, and why the others do not.

    All layers of a model are alike: the first stands for all.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from scratchlm import acceleration
    from scratchlm.errors import ScratchLMError

    if not acceleration.is_available():
        raise ScratchLMError("explain needs scratchlm.accelerate, which is not there")
    from scratchlm.accelerate import accelerate
    from scratchlm.accelerate import explain as explain_model
    from scratchlm.cli.account_models import find_model, stored_format
    from scratchlm.model import TransformerLM
    from scratchlm.quantization.convert import make_room
    from scratchlm.quantization.rule import choose

    config, to = find_model(model).replace(num_layers=1), quantize or stored_format(model)
    where = choose_device(device)
    first = TransformerLM(config, device="meta")
    if to is not None:
        make_room(first, choose(config, to))
        acceleration.lay_out(first, where)
    first.to_empty(device=where)  # no fusion looks at a weight's value
    rows = explain_model(accelerate(first), batch=batch, seq=context, training=training)
    found = [(r.layer.replace("layers.0", "layers.*") or "model", r.fusion, r.reason) for r in rows]
    if as_json:
        keys = ("layer", "fusion", "reason")
        say(json.dumps([dict(zip(keys, row, strict=True)) for row in found], indent=2))
        return
    table = Table("layer", "fusion", "runs, or why not", box=None, pad_edge=False)
    last = ""
    for layer, fusion, reason in found:
        state = Text("runs", "green") if reason is None else Text(reason, "dim")
        table.add_row(layer if layer != last else "", fusion, state)
        last = layer
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
