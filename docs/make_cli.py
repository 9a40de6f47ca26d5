"""Write docs/reference/cli.md: every command's help, as the command prints it."""

import os
from pathlib import Path
from typing import Any

import typer.main

from scratchlm.cli import app

PAGE = Path(__file__).parent / "reference" / "cli.md"
HEAD = """# Command line

What `scratchlm --help` and `scratchlm COMMAND --help` print in a terminal of 80 columns. Made by \
docs/make_cli.py from the code.
"""


def page() -> str:
    """Return the page."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        top = typer.main.get_command(app)
        blocks = list(_helps(top, "scratchlm", None))
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return "\n\n".join([HEAD.strip(), *blocks]) + "\n"


def _helps(command: Any, name: str, parent: Any) -> Any:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context).rstrip()}\n```"
    for child, found in getattr(command, "commands", {}).items():
        yield from _helps(found, child, context)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
