"""`scratchlm presets` and `scratchlm config`: list the presets, print a model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scratchlm.cli.terminal import say, write_output


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("presets")(presets)
    app.command("config")(config)


def presets(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models known by name; `scratchlm config NAME` prints one whole."""
    import json

    from rich.console import Console
    from rich.table import Table

    from scratchlm.accounting import count_parameters
    from scratchlm.config import PRESETS, to_dict

    if as_json:
        rows = {
            name: {"parameters": count_parameters(model).unique, **to_dict(model)}
            for name, model in PRESETS.items()
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("preset", "params", "layers", "d_model", "heads", "vocab", "context", "ffn"):
        left = title in ("preset", "ffn")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for name, model in PRESETS.items():
        heads = f"{model.num_heads}" + (
            f"/{model.num_kv_heads}" if model.num_kv_heads != model.num_heads else ""
        )
        table.add_row(
            name,
            short_count(count_parameters(model).unique),
            str(model.num_layers),
            f"{model.d_model:,}",
            heads,
            f"{model.vocab_size:,}",
            f"{model.context_length:,}",
            type(model.ffn).__name__,
        )
    Console(width=max(80, Console().width), highlight=False).print(table)


def short_count(count: int) -> str:
    """Write a count as people say it: 124M, 1.56B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def config(
    model: Annotated[
        str | None, typer.Argument(help="A preset, or a .toml or .json config file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
    train: Annotated[bool, typer.Option("--train", help="List every train. key.")] = False,
    model_: Annotated[bool, typer.Option("--model", help="List every model. key.")] = False,
    data: Annotated[bool, typer.Option("--data", help="List every data. key.")] = False,
) -> None:
    """Print a model's whole config, with its defaults filled in; or list the keys there are."""
    from scratchlm.config import load_config, preset, to_json, to_toml

    if train or model_ or data:
        if model is not None or json:
            raise ValueError("--train, --model and --data list keys; leave MODEL and --json out")
        _print_keys(train, model_, data)
        return
    if model is None:
        raise ValueError("whose config? give MODEL; or --train, --model or --data for the keys")
    path = Path(model)
    resolved = load_config(path) if path.suffix in (".toml", ".json") else preset(model)
    write_output(to_json(resolved) if json else to_toml(resolved))


def _print_keys(train: bool, model: bool, data: bool) -> None:
    from scratchlm.cli.help import two_columns
    from scratchlm.cli.settings_help import data_keys, model_keys, train_keys

    wanted = ((train, train_keys), (model, model_keys), (data, data_keys))
    found = [key for asked, keys in wanted if asked for key in keys()]
    rows = [(key.name, f"{key.meaning} ({key.kind}, {key.default})") for key in found]
    say("\n".join(two_columns([("key", "meaning (type, default)"), *rows], indent=0)))
