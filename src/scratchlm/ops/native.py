"""Our C++ kernels for a CPU, compiled at first use and kept: which compiler, which flags, where.

The library lies in a folder that only its owner can write to, under a name that is a hash of all it
was made from: source, flags, compiler, processor. Beside it lies its own hash: what is not whole is
made again. Where there is no compiler, or anything else is in the way, there is no library;
`why_not` says why, and torch's own kernels do the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scratchlm.durable import temporary_directory, write_atomically
from scratchlm.errors import ScratchLMError

SOURCE = Path(__file__).with_name("attention.cpp")
HEADERS = SOURCE.parent  # of what every source may include
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
FOR_THIS_CPU = ("-march=native", "-mcpu=native")  # the first that the compiler takes
COMPILERS = ("c++", "g++", "clang++")
SYMBOLS = {
    "attention": ("attend", "attend_back"),
    "step": ("run_step", "run_product"),
    "transpose": ("transpose",),
}  # what a library must have
TIME_LIMIT = 60  # seconds of a compiler's own work, and of its doing nothing: it takes six
NOTICE_AFTER = 10  # seconds of silence
REMEMBERED = 3600  # seconds for which a compiler that hung is not asked again

_log = logging.getLogger(__name__)


class CompilerHangsError(Exception):
    """A compiler that did not end within its time."""


def library(*source: Path) -> ctypes.CDLL | None:
    """Return the kernels of a source, built if they must be; None where they cannot be had."""
    return _loaded(*source)[0]


def why_not(*source: Path) -> str | None:
    """Say why there are no kernels; None where there are."""
    return _loaded(*source)[1]


@cache
def _loaded(*source: Path) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        path = built(cache_folder(), *source)
        loaded = ctypes.CDLL(str(path))
    except (OSError, ValueError, CompilerHangsError, ScratchLMError) as error:
        return None, str(error)
    wanted = SYMBOLS[(source[0] if source else SOURCE).stem]
    missing = [name for name in wanted if not hasattr(loaded, name)]
    return (None, f"{path} has no {missing[0]}; remove it") if missing else (loaded, None)


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
    with _remembering(folder, compiler):
        return _built(folder, compiler, source)


@contextlib.contextmanager
def _remembering(folder: Path, compiler: str) -> Iterator[None]:
    """Let one process wait for a compiler that hangs, and the others learn of it."""
    found = os.stat(compiler)
    made_of = f"{compiler}\0{found.st_mtime_ns}\0{found.st_size}"
    name = hashlib.sha256(made_of.encode(errors="surrogateescape")).hexdigest()[:32]
    mark = folder / f"hangs-{name}"
    if mark.exists() and time.time() - mark.stat().st_mtime < REMEMBERED:
        raise OSError(f"{compiler} hung before and is not asked again (remove {mark} to try)")
    try:
        yield
    except CompilerHangsError:
        write_atomically(mark, b"")
        raise


def _built(folder: Path, compiler: str, source: Path) -> Path:
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
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # to end it with all that it has started
    ) as process:
        try:
            out, err = _ended(process, command[0])
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise OSError(f"{command[0]}: {err.strip()[:500]}")
    return out


def _ended(process: subprocess.Popen[str], name: str) -> tuple[str, str]:
    """Wait for a compiler as long as it works; other processes may leave it little of the machine.

    It hangs if it has worked for TIME_LIMIT, or has done nothing for as long.
    """
    begun = time.monotonic()
    worked, last_work, told = 0.0, begun, False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=min(NOTICE_AFTER, TIME_LIMIT))
        now = time.monotonic()
        if not told:
            _log.warning("waiting for %s, which compiles our kernels, once", name)
            told = True
        before, worked = worked, _seconds_of_work(process.pid, now - begun)
        last_work = now if worked > before else last_work
        if worked > TIME_LIMIT or now - last_work > TIME_LIMIT:
            raise CompilerHangsError(f"{name} did not end within {TIME_LIMIT} seconds of work")


def _seconds_of_work(group: int, otherwise: float) -> float:
    """Return the CPU time of a process group and its ended children, where that is told."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_bytes().rpartition(b")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else otherwise


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
    """Compile in a folder of its own, then rename: another process may be doing the same."""
    with temporary_directory(path.parent, path.stem) as folder:
        made, included = folder / path.name, ("-I", str(HEADERS))
        _run(compiler, *FLAGS, *_tuning(compiler), *included, "-o", str(made), str(source))
        os.chmod(made, 0o700)
        found = hashlib.sha256(made.read_bytes()).hexdigest()
        os.replace(made, path)
    write_atomically(_seal(path), found.encode())


def _tuning(compiler: str) -> Iterator[str]:
    """Yield the flag that asks for this processor's own instructions, where there is one."""
    for flag in FOR_THIS_CPU:
        try:
            _run(compiler, flag, "-E", "-x", "c++", os.devnull)
        except OSError:
            continue
        yield flag
        return
