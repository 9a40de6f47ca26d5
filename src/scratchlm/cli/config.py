"""`scratchlm presets` and `scratchlm config`: list the presets, print a model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scratchlm.cli.terminal import write_output


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("presets")(presets)
    app.command("config")(config)


def presets() -> None:
    """List the models known by name."""
    from rich.console import Console
    from rich.table import Table

    from scratchlm.config import PRESETS

    table = Table("preset", box=None, pad_edge=False)
    sizes = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_head", "d_ff")
    for name in (*sizes, "vocab_size", "context_length"):
        table.add_column(name, justify="right")
    table.add_column("parts")
    for name, model in PRESETS.items():
        parts = (model.positions, model.ffn, model.norm)
        table.add_row(
            name,
            *(f"{getattr(model, size):,}" for size in (*sizes, "vocab_size", "context_length")),
            " ".join(type(part).__name__ for part in parts),
        )
    Console(width=None if Console().is_terminal else 160).print(table)


def config(
    model: Annotated[str, typer.Argument(help="A preset, or a .toml or .json config file.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print a model's whole config, checked and with its defaults filled in."""
    from scratchlm.config import load_config, preset, to_json, to_toml

    path = Path(model)
    resolved = load_config(path) if path.suffix in (".toml", ".json") else preset(model)
    write_output(to_json(resolved) if json else to_toml(resolved))
