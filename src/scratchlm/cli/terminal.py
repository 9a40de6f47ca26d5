"""Text from outside on a terminal: control characters are shown, never sent.

A file's name, an error that quotes a file, a model's text: any of them may hold a sequence that
sets the window's title or moves the cursor. Messages are always made visible; a model's text only
where it goes to a terminal: in a pipe it stays as it is.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import BOM

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Control characters become their pictures (␛ for ESC), C1 controls and stray bytes U+FFFD.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)}


def visible(text: object) -> str:
    """Return a text whose control characters, all but line ends and tabs, can be seen."""
    return str(text).translate(_PICTURES)


def say(text: object = "", *, err: bool = False) -> None:
    """Print a line: a message on stderr, or a result, which a pipe gets as it is."""
    if err:
        print(fit_terminal(visible(text), sys.stderr), file=sys.stderr, flush=True)
    else:
        write_output(f"{text}\n")


def warn(message: object) -> None:
    """Print a warning."""
    say(f"warning: {message}", err=True)


def tell(text: str) -> None:
    """Print a result that is a sentence, not data: on a terminal it breaks between words."""
    say(fit_terminal(text, sys.stdout))


def fit_terminal(text: str, stream: TextIO) -> str:
    """Wrap lines at their spaces where they go to a terminal, which would cut through words."""
    if not stream.isatty():
        return text
    columns = max(40, shutil.get_terminal_size((80, 24)).columns)
    wrap = textwrap.TextWrapper(
        columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrap.fill(line) if len(line) > columns else line for line in text.split("\n"))


def does_fit(console: Console, table: Table) -> bool:
    """Whether a table fits a terminal whole: where it does not, its words would be cut."""
    wide = console.options.update(max_width=10_000)
    return console.measure(table, options=wide).maximum <= console.width


def write_output(text: str, flush: bool = True) -> None:
    """Write a model's text: as it is, or visibly where it goes to a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    if flush:
        sys.stdout.flush()


def read_prompt(prompt: str) -> str:
    """Return a prompt; `-` is what stdin holds."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read().removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise ScratchLMError(f"standard input: not UTF-8 at byte {error.start}") from None


def open_standard_streams() -> None:
    """Make sure of stdin, stdout and stderr: a closed one is empty, or refused where it matters.

    A file opened later would otherwise take its number, and be written to by mistake.
    """
    closed = [fd for fd in (0, 1, 2) if not _is_open(fd)]
    for fd in closed:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        stream = os.fdopen(fd, "r" if fd == 0 else "w")
        setattr(sys, ("stdin", "stdout", "stderr")[fd], stream)
    if 1 in closed:
        raise ScratchLMError("standard output is closed; > /dev/null drops what is printed")
    if hasattr(sys.stdout, "reconfigure"):  # a file's name need not be UTF-8: its bytes stay
        sys.stdout.reconfigure(errors="surrogateescape")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def forget_output() -> None:
    """Drop what could not be written, so that ending does not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
