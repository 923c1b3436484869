"""The chat page at `/`.

Owns: the one HTML file, its security headers.
Does not know: what the page does; it speaks the public API like any client.
Invariants: the page needs nothing but itself and this server: its policy allows its own script and style by their
hashes, calls to its own origin, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

PAGE = Path(__file__).parent / "static" / "index.html"


def page_handler() -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Reads the page once and returns the handler for GET and HEAD."""
    html = PAGE.read_text(encoding="utf-8")
    body = html.encode()
    etag = hashlib.sha256(body).hexdigest()[:16]
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-cache",
        "Content-Security-Policy": content_security_policy(html),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }

    async def page(request: web.Request) -> web.StreamResponse:
        response = web.Response(body=body, headers=headers)
        response.etag = etag
        if any(known.value == etag for known in request.if_none_match or ()):
            response.body = None
            response.set_status(304)
        return response

    return page


def content_security_policy(html: str) -> str:
    """Allows exactly the inline script and style that stand in `html`."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(html, 'script')}",
            f"style-src {_hashes(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(html: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
