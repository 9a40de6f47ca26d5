"""Write measured figures into bench/RESULTS.md: one section per benchmark, replaced by each run."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
HEADER = """# Measured

Each section is written by the command it names, peer and ours in one run. Compare within a
section: absolute times move from machine to machine. Nothing here is written by hand: what was
tried, and why, is in docs/speed-log.md.
"""


def machine() -> str:
    """Name the machine a figure was measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = re.findall(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = models[0] if models else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def versions(*packages: str) -> str:
    """Name the versions a figure was measured with."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay rows out as a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_section(title: str, command: str, where: str, with_: str, body: str) -> None:
    """Replace the section `title` of RESULTS.md, or add it at the end; no other line changes.

    Where OUT names a folder, a copy is left there, for runs on a remote machine.
    """
    date = datetime.date.today().isoformat()
    section = f"## {title}\n\n`{command}`, {date}, {where}; {with_}.\n\n{body.strip()}\n"
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEADER
    RESULTS.write_text(with_section(text, title, section), encoding="utf-8")
    if os.environ.get("OUT"):
        shutil.copy(RESULTS, Path(os.environ["OUT"]) / RESULTS.name)


def with_section(text: str, title: str, section: str) -> str:
    """Return `text` with one section replaced or added; every other line stays as it is."""
    first, *inner = re.findall(r"(?m)^## .*$", section)
    if first != f"## {title}" or inner:
        raise ValueError(
            f"a section begins with its title and holds no other; got {inner or first}"
        )
    preamble, *parts = re.split(r"(?m)^(?=## )", text)
    sections = {part.partition("\n")[0]: part.rstrip() for part in parts}
    if len(sections) != len(parts):
        raise ValueError("a title stands twice in RESULTS.md")
    sections[first] = section.rstrip()
    return "\n\n".join([preamble.rstrip(), *sections.values()]) + "\n"
