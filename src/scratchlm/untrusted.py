"""Files from outside, opened one way: a regular file, inside its directory, of bounded size.

Every file that somebody else may have made (weights, configs, tokenizers, token files, manifests,
logs) is opened here. A FIFO or a device is refused without waiting for it; JSON and TOML are read
strictly: a size limit, no key twice, no NaN, no nesting that exhausts the stack. A byte order mark
before a text is dropped. What is wrong is one line with the file's name.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from scratchlm.errors import ScratchLMError

MIB = 1 << 20
BOM = "\ufeff"  # some editors write it before UTF-8; it is no part of the text
# What the small files of a model or a run may take; real ones need a hundredth of it.
MAX_CONFIG_BYTES, MAX_MANIFEST_BYTES = MIB, 64 * MIB
MAX_SIDECAR_BYTES, MAX_TOKENIZER_BYTES = 64 * MIB, 256 * MIB

# The maximum length of a file's name or value in an error message.
_NAME_SHOWN = 80


def shown(name: object) -> str:
    """Format a name from a file so that it fits on one line of any terminal."""
    text = ascii(name) if isinstance(name, str) else ascii(str(name))
    return text if len(text) <= _NAME_SHOWN else f"{text[: _NAME_SHOWN - 2]}…'"


def brief(error: object, limit: int = 300) -> str:
    """Format an error that quotes a file's values on one line of limited length."""
    text = " ".join(str(error).split()).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def listed(names: Iterable[object], limit: int = 6) -> str:
    """List the first names, and say how many more there are."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(shown(name) for name in every[:limit]) + more


# Opening


def inner_file(directory: Path, name: object) -> Path:
    """Return the regular file of this plain name in the directory.

    A link may lead only to a place inside the directory, or to where the Hugging Face cache keeps
    the contents its snapshots link to (`../../blobs`): a link elsewhere in a downloaded directory
    would make us read, and with the tokenizer copy, a file of the user's.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= 255:
        raise ScratchLMError(f"{directory}: a file name was expected; got {shown(name)}")
    if name in (".", "..") or any(character in name for character in "/\\\0:"):
        raise ScratchLMError(f"{directory}: {shown(name)} is not a plain file name")
    path = directory / name
    try:
        real, home = path.resolve(strict=True), directory.resolve()
    except (FileNotFoundError, UnicodeEncodeError):
        raise ScratchLMError(f"{directory}: no file {shown(name)}") from None
    except (OSError, RuntimeError):  # a loop of links
        raise ScratchLMError(f"{directory}: {shown(name)} cannot be opened") from None
    blobs = home.parent.parent / "blobs"
    if not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        raise ScratchLMError(f"{directory}: {shown(name)} is a link that leaves the directory")
    if not real.is_file():
        raise ScratchLMError(f"{directory}: {shown(name)} is not a regular file")
    return path


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading; anything else is refused, and never waited for."""
    # Without O_NONBLOCK, opening a FIFO waits for its writer. A regular file does not mind it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ScratchLMError(f"{os.fspath(path)}: not a regular file")
    return os.fdopen(fd, "rb", buffering)


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > max_bytes else file.read(max_bytes + 1)
    size = max(size, len(data))  # a file may grow while it is read
    if size > max_bytes:
        raise ScratchLMError(
            f"{os.fspath(path)}: must not exceed {max_bytes:,} bytes; got {size:,}"
        )
    return data


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """Read a regular file of UTF-8 text; line ends stay as they are."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8").removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise ScratchLMError(f"{os.fspath(path)}: not UTF-8 at byte {error.start}") from None


# Parsing


def read_json(path: str | os.PathLike[str], max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most `max_bytes`."""
    return parse_json(read_bytes(path, max_bytes), os.fspath(path))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file of at most `MAX_CONFIG_BYTES`."""
    text, what = read_text(path, MAX_CONFIG_BYTES), os.fspath(path)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ScratchLMError(f"{what}: not valid TOML: nested too deeply") from None
    except ValueError as error:
        raise ScratchLMError(f"{what}: not valid TOML: {brief(error, 160)}") from None


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; a key that stands twice, NaN and Infinity are refused."""
    try:
        value = json.loads(
            text.decode("utf-8").removeprefix(BOM),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
        )
    except RecursionError:
        raise ScratchLMError(f"{what}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ScratchLMError(f"{what}: not valid JSON: {brief(error, 160)}") from None
    if not isinstance(value, dict):
        raise ScratchLMError(f"{what}: a JSON object was expected; got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {shown(counts.most_common(1)[0][0])} stands twice")
    return table


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON value")
