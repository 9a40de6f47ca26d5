"""A hook of mkdocs: what lies outside docs/ and is linked from there is in the site, too.

Pages stay pages, a notebook becomes one, code is shown as code, a folder as its files.
"""

import json
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = "repository"  # the site's folder for what is not in docs/, or is code there
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def is_outside(path: Path) -> bool:
    """Whether mkdocs does not take a file by itself."""
    return path.suffix == ".py" or not path.is_relative_to(DOCS)


def outside_files() -> list[Path]:
    """Return what pages link to outside docs/, and what these pages link to."""
    queue, found = sorted(DOCS.rglob("*.md")), list[Path]()
    for page in queue:
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.exists() and is_outside(target) and target not in found:
                found.append(target)
                queue += [target] * (target.suffix == ".md")
    return found


def uri_of(path: Path) -> str:
    """Return where a file of the repository is in the site, as a source of mkdocs."""
    if not is_outside(path):
        return path.relative_to(DOCS).as_posix()
    uri = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return uri if path.suffix == ".md" else f"{uri}.md"


def as_page(path: Path) -> str:
    """Return a file of the repository as a page."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.is_file())
        return "\n".join([f"# {name}", "", *(f"- `{file}`" for file in files)])
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return with_links(text, path)
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(_code(body, "py") if kind == "code" else body for kind, body in cells)
    return f"# {name}\n\n{_code(text, path.suffix[1:])}\n"


def _code(text: str, language: str) -> str:
    return f"~~~~~~{language}\n{text.rstrip()}\n~~~~~~"


def with_links(markdown: str, path: Path) -> str:
    """Let the links of a page lead to where things are in the site."""

    def moved(link: re.Match[str]) -> str:
        target = (path.parent / link[0]).resolve()
        if not target.is_relative_to(ROOT):
            return link[0]
        return posixpath.relpath(uri_of(target), posixpath.dirname(uri_of(path)))

    return _LINK.sub(moved, markdown)


def on_files(files, config):
    """Add what lies outside docs/."""
    from mkdocs.structure.files import File

    for path in outside_files():
        files.append(File.generated(config, uri_of(path), content=as_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Mend the links of a page of docs/; those of others are mended already."""
    path = DOCS / page.file.src_uri
    return with_links(markdown, path) if path.is_file() else markdown
