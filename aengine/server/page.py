"""The chat page at `/`, the timeline at `/trace`, and their files under `/static/`.

Owns: the HTML files, their styles, scripts and vendored libraries, their security headers.
Does not know: what the pages do; they speak the public API like any client.
Invariants: the files are read once, so that no request reaches the file system; the page needs nothing but them and
this server: its policy allows scripts, styles and calls of its own origin, no inline code, and strings become markup
only in the sanitiser's policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from aengine.errors import NotFound
from aengine.server.envelope import shorten

STATIC = Path(__file__).parent / "static"
PREFIX = "/static/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    type: str
    etag: str


def read_files() -> Mapping[str, StaticFile]:
    """Every file of the page by its path under the static folder."""
    paths = (path for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES)
    return {path.relative_to(STATIC).as_posix(): _read(path) for path in paths}


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:16])


def add_page(router: web.UrlDispatcher) -> None:
    """Reads the files and adds their routes, for GET and HEAD."""
    files = read_files()

    async def page(request: web.Request) -> web.StreamResponse:
        return _answer(request, files["index.html"])

    async def timeline(request: web.Request) -> web.StreamResponse:
        return _answer(request, files["trace.html"])

    async def static(request: web.Request) -> web.StreamResponse:
        file = files.get(request.match_info["path"])
        if file is None:
            raise NotFound(f"there is no {shorten(request.path, 200)}")
        return _answer(request, file)

    router.add_get("/", page)
    router.add_get("/trace", timeline)
    router.add_get(PREFIX + "{path:.+}", static)


def _answer(request: web.Request, file: StaticFile) -> web.Response:
    known = any(tag.value == file.etag for tag in request.if_none_match or ())
    headers = {**HEADERS, "Content-Type": file.type}
    response = web.Response(headers=headers, status=304) if known else web.Response(body=file.body, headers=headers)
    response.etag = file.etag
    return response
