"""Which errors are for the user, one line and status 2, and which are bugs, with their traceback.

The one rule for what a user or a file can cause. An error is for the user if it was raised for
them: a `ScratchLMError`, an error of the operating system about a file, or a ValueError or
TypeError from a `raise` statement of ours. So is a memory that is too small, wherever it is
noticed. A ValueError that comes out of `int(…)`, torch or json, where nobody expected it, is a bug.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from opcode import opmap

from scratchlm.cli.terminal import visible
from scratchlm.errors import ScratchLMError

PACKAGE = __name__.partition(".")[0]
_RAISE = opmap["RAISE_VARARGS"]  # `raise error` and `raise error from cause`
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)  # a write names no file


def is_for_the_user(error: BaseException) -> bool:
    """Say whether an error was raised for the user, and not by a mistake in our code."""
    if isinstance(error, ScratchLMError) or is_out_of_memory(error):
        return True
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL_DISK):
        return True
    return isinstance(error, (ValueError, TypeError, OSError)) and raised_on_purpose(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether something did not fit in memory, as Python, numpy or torch say it."""
    torch_says = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # from mmap
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in torch_says)
    )


def raised_on_purpose(error: BaseException) -> bool:
    """Say whether the error began at a `raise` statement inside this package.

    The last entry of a traceback is where the error began, however often it was raised again.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    ours = module == PACKAGE or module.startswith(f"{PACKAGE}.")
    return ours and trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def one_line(error: BaseException) -> str:
    """Say an error on one line that cannot control a terminal."""
    if is_out_of_memory(error):
        found = re.search(r"allocate ([\d.]+ ?[A-Za-z]+)", str(error))
        size = f": {found[1]} more were asked for" if found else ""
        return f"not enough memory{size}; a smaller batch, context or model needs less"
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: " if error.filename else ""
        return fold(f"{what}{error.strerror}")
    return in_words_of_the_command_line(fold(str(error))) or type(error).__name__


# What the library calls its arguments, and what the command line calls them.
_OPTIONS = {
    r"\bpast_context='slide'": "--past-context slide",
    r"\bpast_context\b": "--past-context",
    r"\buse_cache=False": "--no-cache",
    r"\bkv_dtype='(\w+)'": r"--kv-cache \1",
    r"\bkv_dtype must": "--kv-cache must",
    r"\bwith accelerate=False\b": "with --no-accelerate",
    r"\bspeculate='draft'": "--speculate draft",
    r"\bspeculate must": "--speculate must",
    r"\bmax_new_tokens\b": "--max-new-tokens",
    r"\bnum_beams\b": "--beam",
    r"\bnum_logprobs\b": "--logprobs",
    r"\blength_penalty\b": "--length-penalty",
    r"(?<!-)\btop_([kp])\b": r"--top-\1",
    r"\bmin_p\b": "--min-p",
    r"\btemperature(?= must|=)": "--temperature",
    r"^vocab_size must be from": "--vocab-size must be from",
    r"^ablation must": "--ablation must",
    r"\buse split 'tail' or": "use `prepare --split tail` or",
    r"\bval_fraction\b": "--val-fraction",
    r"\blogit_bias\b": "--logit-bias",
    r"^end_of_text\b": "--end-of-text",
    r"\b(repetition|presence|frequency)_penalty\b": r"--\1-penalty",
}


def in_words_of_the_command_line(text: str) -> str:
    """Call arguments of the library what the command line calls them."""
    for pattern, option in _OPTIONS.items():
        text = re.sub(rf"(?<!: )(?<!['\"]){pattern}", option, text)  # these are keys of a file
    return text


@contextmanager
def named_as_options(*names: str, **others: str) -> Iterator[None]:
    """Call what an error names first as the option is called: --new-tokens, not new_tokens."""
    called = {**dict(zip(names, names, strict=True)), **others}
    with _called({name: "--" + option.replace("_", "-") for name, option in called.items()}):
        yield


@contextmanager
def named_as_keys(**sections: Iterable[str]) -> Iterator[None]:
    """Call a field that an error names first as its key is called: train.lr, not lr."""
    with _called({name: f"{section}.{name}" for section in sections for name in sections[section]}):
        yield


@contextmanager
def _called(names: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (ScratchLMError, ValueError, TypeError) as error:
        name = re.split(r"[ :]", str(error), maxsplit=1)[0]
        if name not in names or not raised_on_purpose(error):
            raise
        raise type(error)(re.sub(rf"\b{name}(?=[ =:])", names[name], str(error))) from None


def fold(text: str) -> str:
    """Fold white space, so that a text fits on one line, and show control characters."""
    return visible(" ".join(text.split()))
