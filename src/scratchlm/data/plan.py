"""The plan of a `prepare` run: which sources, checked and hashed, cut into which parts.

Every part has a key, the hash of all that its ids depend on; the plan's name is the hash of all
that the finished files depend on. Equal names mean equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scratchlm.data.encoding import EncodeOptions, Tokenizer
from scratchlm.data.parts import Part, cut_source, read_head
from scratchlm.data.sources import Checked, Source, check_source
from scratchlm.data.split import is_fair, side_of
from scratchlm.data.token_file import FORMAT_VERSION
from scratchlm.errors import ScratchLMError


@dataclass(frozen=True)
class Progress:
    """How far a run is: bytes of the sources checked or encoded, and ids so far."""

    stage: str  # "check" or "encode"
    done: int
    total: int
    tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything the result depends on."""

    sources: list[Source]
    checked: list[Checked]
    parts: list[Part]
    keys: list[str]
    options: EncodeOptions
    split: str
    may_cut: bool  # the split was left to us: if no document is held out, the tail is
    val_fraction: float
    name: str


def spooled(source: Source, folder: Path) -> Source:
    """Copy stdin to the work folder: it must be read twice and in parallel."""
    if source.path != "-":
        return source
    path = folder / "stdin"
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
    if not path.stat().st_size:
        raise ScratchLMError("-: stdin is empty")
    return replace(source, path=str(path), size=path.stat().st_size)


def check_all(
    sources: list[Source], marker: str | None, report: Callable[[Progress], None]
) -> list[Checked]:
    """Read every source once: hash it, and raise the first error found."""
    total, done, lock = sum(source.size for source in sources), 0, threading.Lock()
    stopping = threading.Event()

    def advance(count: int) -> None:
        nonlocal done
        if stopping.is_set():  # Ctrl-C, or another source is bad: do not keep reading for hours
            raise InterruptedError
        with lock:
            done += count
            report(Progress("check", done, total))

    with ThreadPoolExecutor(min(4, len(sources)), "scratchlm-check") as threads:
        futures = [threads.submit(check_source, source, marker, advance) for source in sources]
        try:
            done_ones, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in done_ones and (error := future.exception()) is not None:
                    raise error
            return [future.result() for future in futures]
        finally:
            stopping.set()
            for future in futures:
                future.cancel()


def make_plan(
    sources: list[Source],
    checked: list[Checked],
    tokenizer: Tokenizer,
    options: EncodeOptions,
    split: str,
    val_fraction: float,
) -> Plan:
    """Resolve the split, cut the sources into parts, and compute the keys."""
    may_cut = split == "auto"
    if val_fraction == 0:
        split = "none"
    elif may_cut:
        split = _choose_split(sources, options.separator, val_fraction)
    by_document = val_fraction if split == "documents" else None
    options = replace(options, val_fraction=by_document)
    fixed = [FORMAT_VERSION, tokenizer.fingerprint(), tokenizer.vocab_size, asdict(options)]
    parts: list[Part] = []
    keys: list[str] = []
    for source, known in zip(sources, checked, strict=True):
        for part in cut_source(source, options.separator, by_document):
            range_ = [source.kind, source.gzipped, part.start, part.end, part.side]
            parts.append(part)
            keys.append(_digest([*fixed, known.sha256, *range_, part.ends_document]))
    names = [source.name for source in sources]
    name = _digest([keys, names, split, val_fraction])
    return Plan(sources, checked, parts, keys, options, split, may_cut, val_fraction, name)


def _choose_split(sources: list[Source], separator: str | None, val_fraction: float) -> str:
    """Hold out whole documents, unless they are files of which no fair part would be held out."""
    if separator or any(source.kind != "text" for source in sources):
        return "documents"
    sides = [side_of(read_head(source), val_fraction) for source in sources]
    fair = is_fair([source.size for source in sources], sides, val_fraction)
    return "documents" if fair else "tail"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def stamps(sources: list[Source]) -> list[tuple[int, int]]:
    """Size and mtime of each file: equal before and after means it was not modified meanwhile."""
    found = [os.stat(source.path) for source in sources]
    return [(status.st_size, status.st_mtime_ns) for status in found]
