"""The command line: the only place that parses arguments, prints, and exits.

Each module of this package holds the commands of one room and imports that room inside the
command, so that `scratchlm --help` answers at once.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import warnings
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from scratchlm import __version__
from scratchlm.cli import (
    account,
    chat,
    check,
    config,
    demo,
    evaluate,
    explain,
    finetune,
    generate,
    inspect,
    interop,
    predict,
    prepare,
    quantize,
    serve,
    tokenizer,
    train,
)
from scratchlm.cli.errors import fold, is_for_the_user, one_line
from scratchlm.cli.help import App
from scratchlm.cli.interrupts import interrupts_between_steps
from scratchlm.cli.terminal import forget_output, open_standard_streams, say

app = App(
    name="scratchlm",
    help="A Transformer language model you can see through.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

config.register(app)
explain.register(app)
check.register(app)
tokenizer.register(app)
prepare.register(app)
train.register(app)
finetune.register(app)
demo.register(app)
evaluate.register(app)
account.register(app)
interop.register(app)
quantize.register(app)
generate.register(app)
chat.register(app)
inspect.register(app)
serve.register(app)
predict.register(app)

_COMMANDS = {command.name for command in app.registered_commands}
_show_traceback = False


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scratchlm {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the code an error arose.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    global _show_traceback
    _show_traceback = traceback


# Typer carries its own copy of click in some versions: the class is found through its child.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command line.

    What a user can cause is one line on stderr and exit status 2; a bug shows its traceback.
    """
    warnings.showwarning = _show_warning
    try:
        open_standard_streams()
        with interrupts_between_steps():
            status = app(prog_name="scratchlm", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        _explain(error)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        if _rank() in (None, "0"):  # of several ranks the first one speaks
            say("\nstopped" if sys.stderr.isatty() else "stopped", err=True)  # after the ^C
        raise SystemExit(130) from None
    except Exception as error:
        if _show_traceback or not is_for_the_user(error):
            raise
        whose = "" if _rank() is None else f"rank {_rank()}: "
        say(f"{whose}error: {one_line(error)}", err=True)
        forget_output()
        raise SystemExit(2) from None
    raise SystemExit(status if isinstance(status, int) else 0)


def _rank() -> str | None:
    """Return which rank of several this is, as it stands in the environment, right or wrong."""
    return os.environ.get("RANK") if "WORLD_SIZE" in os.environ else None


_show_python_warning = warnings.showwarning


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
) -> None:
    """Say a warning of ours on one line; others as Python does."""
    if category is FutureWarning and "scratchlm" in filename:
        say(f"warning: {fold(str(message))}", err=True)
    else:
        _show_python_warning(message, category, filename, *rest, **more)


def _explain(error: Any) -> None:
    """Say a wrong call on one line; a bare group of commands shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    typed = sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in _COMMANDS else []
    command = error.ctx.command_path if error.ctx else " ".join(["scratchlm", *typed])
    message = error.format_message()
    if type(error).__name__ == "NoSuchOption":  # click takes anything for near
        message = f"No such option: {error.option_name}{_meant(error, command)}"
    message = fold(_expected(error, message)).rstrip(".")
    see = " See" if message.endswith("?") else "; see"
    say(f"error: {message}{see} {command} --help", err=True)


# What Typer's checks say, and what was expected in plain words.
_EXPECTED = {
    r"Input should be a valid integer.*": "must be a whole number",
    r"Input should be a valid number.*": "must be a number",
    r"Input should be greater than or equal to": "must be at least",
    r"Input should be less than or equal to": "must be at most",
}


def _expected(error: Any, message: str) -> str:
    """Say what an option must be, and what was typed."""
    option, _, says = message.removeprefix("Invalid value for ").partition(": ")
    for pattern, words in _EXPECTED.items():
        if re.match(pattern, says):
            typed = [word for given in sys.argv for word in given.split("=", 1)]
            pairs = itertools.pairwise(typed)
            got = [f"; got {value!r}" for name, value in pairs if name in error.param.opts]
            return option.strip("'") + " " + re.sub(pattern, words, says) + "".join(got[-1:])
    message = re.sub(r"^(Missing argument) '(\w+)'", lambda of: f"{of[1]} {of[2].upper()}", message)
    return message.replace(": Value error, ", ": ")


def _meant(error: Any, command: str) -> str:
    """Ask whether an option that there is was meant, where one is near; of settings, the key."""
    names = [name for param in error.ctx.command.params for name in param.opts]
    options = [name for name in names if name.startswith("-")]  # not of arguments
    if near := get_close_matches(error.option_name, options, 1, 0.75):
        return f". Did you mean {near[0]}?"
    if command in ("scratchlm train", "scratchlm finetune"):
        from scratchlm.training import TrainConfig

        name = error.option_name.strip("-").replace("-", "_")
        if name in TrainConfig.__dataclass_fields__:
            return f". Did you mean train.{name}=…?"
    return ""
