"""`scratchlm tokenizer train|encode|decode|show`: train and inspect a tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.help import App
from scratchlm.cli.terminal import say, write_output

if TYPE_CHECKING:
    from rich.console import Console

    from scratchlm.tokenizer.files import AnyTokenizer
    from scratchlm.tokenizer.training import Progress

TokenizerPath = Annotated[
    Path,
    typer.Option(
        "--tokenizer",
        "-t",
        help="A directory with tokenizer.json (or vocab.json and merges.txt, or *.tiktoken), "
        "or such a file.",
    ),
]
TextArgument = Annotated[
    str | None, typer.Argument(help="The text; without it, --file or standard input.")
]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="Read this file; - is standard input.")
]
NoSpecial = Annotated[
    bool,
    typer.Option("--no-special", help="Treat what looks like a special token as ordinary text."),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    tokenizer = App(
        help="Train a tokenizer, and see what it does with a text.", no_args_is_help=True
    )
    tokenizer.command("train")(train)
    tokenizer.command("encode")(encode)
    tokenizer.command("decode")(decode)
    tokenizer.command("show")(show)
    app.add_typer(tokenizer, name="tokenizer")


def train(
    files: Annotated[list[str], typer.Argument(help="Text files in UTF-8; - is standard input.")],
    out: Annotated[Path, typer.Option("--out", help="The directory for tokenizer.json.")],
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", help="All ids: 256 bytes, merges and special tokens."),
    ] = None,
    special: Annotated[
        list[str] | None,
        typer.Option("--special", help="A special token; repeat the option for more."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            help="How text falls into words: gpt2, gpt4, llama3, qwen2.",
            show_default="gpt2",
        ),
    ] = None,
    char: Annotated[
        bool, typer.Option("--char", help="One id per character instead of merges.")
    ] = False,
) -> None:
    """Learn a vocabulary from text files and write DIR/tokenizer.json."""
    from scratchlm.tokenizer import PATTERNS, CharTokenizer, Tokenizer, train_bpe
    from scratchlm.tokenizer.training import read_text

    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a directory; {out} is a file")
    if (there := out / "tokenizer.json").exists():
        raise ValueError(f"{there} exists already and is not overwritten")
    tokenizer: AnyTokenizer
    if char:
        if vocab_size is not None:
            raise ValueError("--char takes every character there is; leave --vocab-size out")
        if pattern is not None:
            raise ValueError("--char needs no words; leave --pattern out")
        pieces = (piece for file in files for piece in read_text(file))
        tokenizer = CharTokenizer.of_text(pieces, special)
    else:
        if vocab_size is None:
            raise ValueError("--vocab-size is needed (or --char)")
        pattern = pattern or "gpt2"
        if pattern not in PATTERNS:
            raise ValueError(f"--pattern must be one of {', '.join(PATTERNS)}; got {pattern!r}")
        stages: set[str] = set()
        with _progress(stages) as progress:
            vocab, merges = train_bpe(files, vocab_size, special or [], pattern, progress=progress)
        if not stages:
            raise ValueError(f"nothing to learn from: {', '.join(files)} is empty")
        tokenizer = Tokenizer(vocab, merges, special, pattern)
    try:
        path = tokenizer.save(out)
    except BaseException:
        there.unlink(missing_ok=True)  # it may be there, and not yet safely
        raise
    say(f"{path}: {tokenizer.vocab_size:,} tokens")
    if vocab_size is not None and tokenizer.vocab_size < vocab_size:
        say(
            f"note: the text has no pair left to merge; {vocab_size:,} tokens were asked for",
            err=True,
        )


def encode(
    tokenizer: TokenizerPath,
    text: TextArgument = None,
    file: FileOption = None,
    no_special: NoSpecial = False,
) -> None:
    """Print the ids of a text, separated by spaces."""
    loaded = _load(tokenizer)
    allowed = () if no_special else "all"
    separator = ""
    for token in loaded.encode_iterable(_pieces(text, file), allowed_special=allowed):
        sys.stdout.write(f"{separator}{token}")
        separator = " "
    sys.stdout.write("\n")


def decode(
    tokenizer: TokenizerPath,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids; without them, --file or standard input.")
    ] = None,
    file: FileOption = None,
) -> None:
    """Print the text of ids, as it is: no line end is added."""
    loaded = _load(tokenizer)
    if ids and file:
        raise ValueError("give ids or --file, not both")
    words = iter(ids) if ids else (word for line in _lines(file) for word in line.split())
    decoder = loaded.stream_decoder()
    for word in words:
        for number in word.replace(",", " ").split():
            if not number.isascii() or not number.isdigit() or len(number) > 12:
                raise ValueError(f"a token id must be a number; got {number[:40]!r}")
            write_output(decoder.push(int(number)), flush=False)
    write_output(decoder.finish())


def show(
    tokenizer: TokenizerPath,
    text: TextArgument = None,
    file: FileOption = None,
    no_special: NoSpecial = False,
) -> None:
    """Show the pieces of a text, coloured, with the id of each beneath it."""
    from rich.console import Console

    loaded = _load(tokenizer)
    whole = "".join(_pieces(text, file))
    ids = loaded.encode(whole, allowed_special=() if no_special else "all")
    special = set(loaded.special_tokens.values())
    console = Console(highlight=False)
    for line in _rows([(piece_text(loaded.token_bytes(i)), i) for i in ids], console.width):
        _print_row(console, line, special)
    characters = len(whole)
    size = len(whole.encode("utf-8"))
    ratio = f", {size / len(ids):.2f} bytes per token" if ids else ""
    console.print(f"{len(ids):,} tokens, {characters:,} characters, {size:,} bytes{ratio}")


def piece_text(piece: bytes) -> str:
    """Format a token visibly: spaces as ·, line ends as ↵, stray bytes as <E2>."""
    visible = {" ": "·", "\n": "↵", "\t": "→", "\r": "␍"}
    text = piece.decode("utf-8", errors="surrogateescape")
    shown = []
    for character in text:
        if "\udc80" <= character <= "\udcff":
            shown.append(f"<{ord(character) - 0xDC00:02X}>")
        elif character in visible:
            shown.append(visible[character])
        elif character.isprintable():
            shown.append(character)
        else:
            shown.append(f"<U+{ord(character):04X}>")
    return "".join(shown)


def _rows(pieces: list[tuple[str, int]], width: int) -> Iterator[list[tuple[int, str, int]]]:
    """Arrange pieces in rows: (index, text, id), a line end in the text ends the row."""
    row: list[tuple[int, str, int]] = []
    used = 0
    for index, (text, token) in enumerate(pieces):
        cell = max(_cells(text), len(str(token))) + 1
        if row and used + cell > width:
            yield row
            row, used = [], 0
        row.append((index, text, token))
        used += cell
        if text.endswith("↵"):
            yield row
            row, used = [], 0
    if row:
        yield row


def _print_row(console: Console, row: list[tuple[int, str, int]], special: set[int]) -> None:
    from rich.text import Text

    shades = ("black on bright_cyan", "black on bright_yellow")
    texts, ids = Text(no_wrap=True), Text(no_wrap=True)
    for index, text, token in row:
        style = "bold white on red" if token in special else shades[index % 2]
        gap = max(len(str(token)) - _cells(text), 0) + 1
        texts.append(text, style=style)
        texts.append(("" if gap == 1 else " " * (gap - 1)) + " ")
        number = str(token)
        ids.append(number, style="dim")
        ids.append(" " * (max(_cells(text) - len(number), 0) + 1))
    console.print(texts, soft_wrap=True)
    console.print(ids, soft_wrap=True)


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _load(path: Path) -> AnyTokenizer:
    from scratchlm.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _pieces(text: str | None, file: Path | None) -> Iterator[str]:
    """Yield the input text: an argument, a file, or standard input."""
    from scratchlm.tokenizer.training import read_text

    if text is not None and file is not None:
        raise ValueError("give a text or --file, not both")
    if text is not None:
        return iter([text])
    return read_text("-" if file is None else file)


def _lines(file: Path | None) -> Iterator[str]:
    """Read lines of ids without holding the whole file."""
    from scratchlm.tokenizer.training import read_text

    rest = ""
    for piece in read_text("-" if file is None else file):
        *whole, rest = (rest + piece).replace("\n", " ").split(" ")
        yield " ".join(whole)
    yield rest


@contextmanager
def _progress(stages: set[str]) -> Iterator[Progress]:
    """Draw a bar on stderr for each stage of training, and note which stages had work."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    titles = {"count": "counting words", "merge": "merging"}
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            if stage == "merge" and done % 64 and done != total:
                return
            if stage not in tasks:
                tasks[stage] = bars.add_task(titles[stage], total=total or None, state="")
            state = f"{done / 1e6:,.1f} MB" if stage == "count" else f"{done:,} of {total:,}"
            bars.update(tasks[stage], completed=done, state=state)

        yield report
