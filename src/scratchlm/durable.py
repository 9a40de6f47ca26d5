"""Files that survive a crash or a power cut: written beside their place, fsync'd, renamed into it.

Every command writes through `write_atomically` or `whole_directory`: a file or a directory is there
whole, or as it was before. While one is being written its temporary place is locked by the writer;
the system drops the lock however the writer ends, so the next writer of the same kind finds what a
killed one left behind, and removes it.

A rename is durable only once its directory is fsync'd: `fsync_directory` is the one place for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from scratchlm.errors import ScratchLMError

PREFIX = ".scratchlm-tmp-"  # of directories that are being filled
_COUNT = itertools.count()


def write_atomically(path: Path, data: bytes | memoryview, folder: Path | None = None) -> None:
    """Write a file so that a crash leaves either the old one or the whole new one.

    It is written in `folder`, by default beside the file, and renamed into place; a link stays,
    and the file it leads to is replaced. An error names the file.
    """
    stream_atomically(path, [data], folder)


def stream_atomically(
    path: Path, pieces: Iterable[bytes | memoryview], folder: Path | None = None
) -> None:
    """Write a file as `write_atomically` does, piece by piece: only the one at hand is held."""
    if path.is_symlink():
        path = path.resolve()
    if path.exists() and not path.is_file():
        raise ScratchLMError(f"{path}: not a regular file")
    with naming(path):
        with _new_file(folder or path.parent, path.name) as (beside, fd):
            for piece in pieces:
                _write_all(fd, piece)
            os.fsync(fd)
            os.replace(beside, path)
        fsync_directory(path.parent)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write and fsync a new file inside a directory that is not in its place yet."""
    with naming(path), open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def check_is_new(directory: Path) -> None:
    """Refuse a place where something is already; an empty directory is nothing."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ScratchLMError(f"{directory} exists already and is not overwritten")


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Give a directory to fill beside its place; renamed into it on success, removed otherwise."""
    with temporary_directory(directory.parent, directory.name) as beside:
        yield beside
        with naming(directory):
            fsync_directory(beside)
            beside.rename(directory)
            try:
                fsync_directory(directory.parent)
            except OSError:
                directory.rename(beside)  # not at all, then
                raise


@contextlib.contextmanager
def temporary_directory(parent: Path, name: str) -> Iterator[Path]:
    """Give a locked directory, removed in the end; those of dead processes are removed first."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent, f"{PREFIX}*")
    while True:
        beside = parent / f"{PREFIX}{name}-{_own_mark()}"
        with contextlib.suppress(FileExistsError):  # of a dead process with our number
            beside.mkdir()
            lock = _locked(beside, os.O_RDONLY)
            if lock is not None:
                break
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # nothing, where it was renamed
        os.close(lock)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove temporary files and directories of this pattern that no living process holds."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _try_lock(held):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(held)


@contextlib.contextmanager
def _new_file(folder: Path, name: str) -> Iterator[tuple[Path, int]]:
    """Give a new, locked file of this process; what dead ones left of the same name is removed."""
    remove_abandoned(folder, f".{glob.escape(name)}.*.partial")
    while True:
        beside = folder / f".{name}.{_own_mark()}.partial"
        with contextlib.suppress(FileExistsError):  # of a dead process with our number
            fd = _locked(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if fd is not None:
                break
    try:
        yield beside, fd
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    finally:
        os.close(fd)


def _own_mark() -> str:
    return f"{os.getpid()}-{next(_COUNT)}"


def _locked(path: Path, flags: int) -> int | None:
    """Open and lock; None where another process took it for abandoned just before the lock."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):  # a file system without locks: nothing is ever abandoned
        fcntl.flock(fd, fcntl.LOCK_EX)  # waits for one who has just taken it for abandoned
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
    os.close(fd)
    return None


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    rest = view.cast("B") if view.nbytes else b""
    while rest:  # a disk that is filling up takes a part first
        rest = rest[os.write(fd, rest) :]


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system name the file that was to be written: a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def fsync_directory(path: Path) -> None:
    """Make the names inside a directory, new or renamed, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
