"""Files that survive a crash or a power cut: written beside their place, fsync'd, renamed into it.

A rename is durable only once its directory is fsync'd: `fsync_directory` is the one place for that.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | memoryview, folder: Path | None = None) -> None:
    """Write a file so that a crash leaves either the old one or the whole new one.

    It is written in `folder`, by default beside the file, and renamed into place.
    """
    beside = (folder or path.parent) / f".{path.name}.{os.getpid()}.partial"
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names inside a directory, new or renamed, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
