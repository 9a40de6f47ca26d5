"""`scratchlm prepare`: text → token files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.terminal import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from scratchlm.data import Prepared, Progress


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("prepare")(prepare)


def prepare(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Text, .jsonl and .parquet files (also .gz), directories, globs, or - for stdin."
        ),
    ],
    tokenizer: Annotated[
        Path, typer.Option(help="The tokenizer: a folder with tokenizer.json, or the file.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write train.bin and val.bin into.")],
    field: Annotated[
        str | None,
        typer.Option(
            help="Which field of JSON Lines, or column of Parquet, holds the text.",
            show_default="text",
        ),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="How much to keep for validation; 0 writes no val.bin.")
    ] = 0.1,
    split: Annotated[
        str,
        typer.Option(
            help="documents: whole documents go to either side. tail: the end validates. "
            "auto: documents, but tail where they are too few."
        ),
    ] = "auto",
    separator: Annotated[
        str | None,
        typer.Option(help="Split text files into documents at this text, e.g. '<|endoftext|>'."),
    ] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option(help="The special token that ends a document.", show_default="<|endoftext|>"),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="text, jsonl or parquet, whatever the files' names say."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes to encode with.", show_default="all cores")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace token files made from something else.")
    ] = False,
) -> None:
    """Turn text into token files for training, in parallel.

    Stopped at any point, the same command resumes.
    """
    from rich.console import Console

    from scratchlm.cli.training_checks import check_source_options
    from scratchlm.data import prepare as run
    from scratchlm.data.sources import find_sources

    check_source_options(find_sources(files, format), field, separator)
    console = Console(stderr=True)
    try:
        with _Bars(console) as bars:
            prepared = run(
                files,
                tokenizer,
                out,
                val_fraction=val_fraction,
                split=split,
                separator=separator,
                end_of_text=end_of_text,
                field=field or "text",
                format=format,
                workers=workers,
                overwrite=overwrite,
                progress=bars.update,
            )
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    _print(prepared)


class _Bars:
    """A progress bar for each stage, where stderr is a terminal."""

    def __init__(self, console: Console) -> None:
        from rich import progress as rich

        self.bars = rich.Progress(
            rich.TextColumn("{task.description:<7}"),
            rich.BarColumn(),
            rich.DownloadColumn(),
            rich.TimeRemainingColumn(elapsed_when_finished=True),
            rich.TextColumn("{task.fields[tokens]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        return self  # the bars start with the first report, so that an early error is printed alone

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def update(self, progress: Progress) -> None:
        """Move the bar of the stage that is reported."""
        self.bars.start()
        if progress.stage not in self.tasks:
            self.tasks[progress.stage] = self.bars.add_task(progress.stage, tokens="")
        self.bars.update(
            self.tasks[progress.stage],
            completed=progress.done,
            total=progress.total,
            tokens=f"{progress.tokens:,} tokens" if progress.tokens else "",
        )


def _print(prepared: Prepared) -> None:
    for note in prepared.notes:
        say(f"note: {note}", err=True)
    if prepared.resumed_parts == prepared.parts:
        say("already prepared: nothing was left to do", err=True)
    elif prepared.resumed_parts:
        done, parts = prepared.resumed_parts, prepared.parts
        say(f"went on after {done:,} of {parts:,} parts", err=True)
    for side, info in (("train", prepared.train), ("val", prepared.val)):
        if info is not None:
            documents = "" if info.documents is None else f"  {info.documents:>9,} documents"
            path = prepared.out / f"{side}.bin"
            say(f"{side:<5} {info.count:>15,} tokens{documents}  {info.dtype}  {path}")
