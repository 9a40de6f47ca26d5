"""Write the README's tree: one line per file, taken from the file's own first line.

python docs/make_tree.py          rewrite the tree in README.md
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tree: docs/make_tree.py -->", "<!-- /tree -->"


SAID_IN = {".cpp", ".h", ".js"}  # the first comment, elsewhere the docstring


def first_line(path: Path) -> str:
    """Return the first sentence a file says of itself."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in SAID_IN:
        comments = [line for line in text.splitlines() if line.startswith("// ")]
        return comments[0].removeprefix("// ").split(". ")[0].rstrip(".,") + "."
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def tree() -> str:
    """Lay out the files of the package and the benchmarks."""
    lines = []
    for folder in ("src/scratchlm", "bench"):
        paths = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", *SAID_IN}]
        paths.sort(key=lambda path: (path.parent.as_posix(), path.name))
        directory = None
        for path in paths:
            if path.parent != directory:
                directory = path.parent
                lines.append(f"{directory.relative_to(ROOT).as_posix()}/")
            lines.append(f"    {path.name:<24}{first_line(path)}")
    return "\n".join(lines)


def with_tree(readme: str) -> str:
    """Return the README with its tree replaced by the files as they are."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```text\n{tree()}\n```\n{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tree(readme.read_text(encoding="utf-8")), encoding="utf-8")
