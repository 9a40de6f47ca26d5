"""Write docs/tree.md: one line per file, taken from the file's own first line.

python docs/make_tree.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tree.md"
COMMENTED = {".cpp", ".h", ".js"}  # the line is the first comment; elsewhere the docstring


def first_line(path: Path) -> str:
    """Return the first sentence a file says of itself."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in COMMENTED:
        comments = [line for line in text.splitlines() if line.startswith("// ")]
        return comments[0].removeprefix("// ").split(". ")[0].rstrip(".,") + "."
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def tree(folder: str) -> str:
    """Lay out the source files below a folder, directory by directory."""
    lines = []
    paths = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", *COMMENTED}]
    paths.sort(key=lambda path: (path.parent.as_posix(), path.name))
    directory = None
    for path in paths:
        if path.parent != directory:
            directory = path.parent
            lines.append(f"{directory.relative_to(ROOT).as_posix()}/")
        lines.append(f"    {path.name:<26}{first_line(path)}")
    return "\n".join(lines)


def page() -> str:
    """Return the page for the files as they are."""
    blocks = [f"```text\n{tree(folder)}\n```\n" for folder in ("src/scratchlm", "bench")]
    note = "Every file, by its own first line. Written by `python docs/make_tree.py`.\n"
    return "\n".join(["# The tree\n", note, *blocks])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
