"""Our C++ kernels for a CPU, compiled at first use and kept: which compiler, which flags, where.

The library lies in a folder that only its owner can write to, under a name that is a hash of all it
was made from: source, flags, compiler, processor. Beside it lies its own hash: what is not whole is
made again. Where there is no compiler, or anything else is in the way, there is no library;
`why_not` says why, and torch's own kernels do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("attention.cpp")
HEADERS = SOURCE.parent  # of what every source may include
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
FOR_THIS_CPU = ("-march=native", "-mcpu=native")  # the first that the compiler takes
COMPILERS = ("c++", "g++", "clang++")
TIME_LIMIT = 120  # seconds


def library(*source: Path) -> ctypes.CDLL | None:
    """Return the kernels of a source, built if they must be; None where they cannot be had."""
    return _loaded(*source)[0]


def why_not(*source: Path) -> str | None:
    """Say why there are no kernels; None where there are."""
    return _loaded(*source)[1]


@cache
def _loaded(*source: Path) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return ctypes.CDLL(str(built(cache_folder(), *source))), None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, str(error)


def cache_folder() -> Path:
    """Return the user's folder for what can be made again; `~/.cache` unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise OSError("no home folder to keep what is built in")
    return Path(base, "scratchlm")


def built(folder: Path, source: Path | None = None) -> Path:
    """Return the library in `folder`, compiled unless it is there; of attention by default."""
    source = SOURCE if source is None else source
    if not hasattr(os, "getuid"):
        raise OSError("no way to tell whose a folder is")
    _make_private(folder)
    compiler = _compiler()
    headers = sorted({*HEADERS.glob("*.h"), *source.parent.glob("*.h")})
    text = b"".join(path.read_bytes() for path in (source, *headers))
    made_from = "\0".join((*FLAGS, *FOR_THIS_CPU, _version(compiler), _processor()))
    name = hashlib.sha256(text + made_from.encode(errors="surrogateescape")).hexdigest()[:32]
    path = folder / f"{source.stem}-{name}.so"
    if not _is_whole(path):
        _compile(compiler, source, path)
    _refuse_others(path)
    return path


def _seal(path: Path) -> Path:
    """Return where the hash of a library is kept."""
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was written; half a one would end the process."""
    try:
        return _seal(path).read_text("ascii") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _make_private(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _refuse_others(folder)


def _refuse_others(path: Path) -> None:
    """Raise unless `path` is ours and nobody else's to write: what lies there will be run."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise OSError(f"{path} is a link")
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others may write to {path}")


def _compiler() -> str:
    chosen = os.environ.get("CXX", "")
    for name in (chosen, *COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise OSError(f"no C++ compiler: none of {', '.join(COMPILERS)}, and no $CXX")


def _run(*command: str) -> str:
    """Run to the end and return what it printed; raise with what it complained of."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT
    )
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()[:500]}")
    return done.stdout


def _version(compiler: str) -> str:
    return compiler + _run(compiler, "--version")


def _processor() -> str:
    """Return what tells this processor's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join((platform.machine(), platform.processor(), *sorted(told)))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Compile beside `path`, then rename: another process may be doing the same."""
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        included = ("-I", str(HEADERS))
        _run(compiler, *FLAGS, *_tuning(compiler), *included, "-o", temporary, str(source))
        os.chmod(temporary, 0o700)
        found = hashlib.sha256(Path(temporary).read_bytes()).hexdigest()
        os.replace(temporary, path)
        _seal(path).write_text(found, "ascii")
    finally:
        Path(temporary).unlink(missing_ok=True)


def _tuning(compiler: str) -> Iterator[str]:
    """Yield the flag that asks for this processor's own instructions, where there is one."""
    for flag in FOR_THIS_CPU:
        try:
            _run(compiler, flag, "-E", "-x", "c++", os.devnull)
        except OSError:
            continue
        yield flag
        return
