"""The page's own files, sent with a policy that lets them load nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_HERE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# In the order in which they may follow each other in one script.
SCRIPTS = (
    *("dom.js", "state.js", "api.js", "python.js", "numbers.js", "tokens.js", "write.js"),
    *("choices.js", "attention.js", "lens.js", "edits.js", "engine.js", "share.js", "main.js"),
)


async def page_response(request: Request) -> Response:
    """Send the page, one of its files, or the template of a page that works offline."""
    name = request.path_params.get("name", "index.html")
    if name == "offline.html":
        return Response(offline_page(), headers=HEADERS, media_type="text/plain; charset=utf-8")
    if name not in ("index.html", "page.css", *SCRIPTS):
        return Response("not found", 404, media_type="text/plain")
    kind = _TYPES[Path(name).suffix]
    return Response(_read(name), headers=HEADERS, media_type=f"{kind}; charset=utf-8")


@cache
def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def offline_page() -> str:
    """Return the page as one file with a place for answers: style and scripts are inside.

    The modules are joined into one: an import of a neighbour goes, and so does `export`.
    """
    joined = "\n".join(_bare(_read(name)) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(joined.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = _read("index.html")
    page = page.replace(
        '<link rel="stylesheet" href="/page/page.css">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{_read('page.css')}</style>",
    )
    return page.replace(
        '<script type="module" src="/page/main.js"></script>',
        '<script type="application/json" id="answers"><!-- answers --></script>\n'
        f'<script type="module">{joined}</script>',
    )


def _bare(script: str) -> str:
    script = re.sub(r'(?m)^import [^;]*? from "\./[a-z]+\.js";\n', "", script)
    return re.sub(r"(?m)^export ", "", script)
