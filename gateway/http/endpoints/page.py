"""The live page: `/`, and the files it is made of. Nothing of it comes from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from aiohttp import web

from draftgate.gateway.errors import RouteNotFound

WEB: Final = Path(__file__).parents[2] / "web"
INDEX: Final = "index.html"

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS: Final = {
    # A page that shows a node's requests runs no script but its own and is framed by nobody.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Ask each time: an upgraded node's page must not mix with the old one's modules.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


@cache
def _files() -> dict[str, _File]:
    """Return every file of the page by its name; read once, they are small."""
    return {path.name: _read(path) for path in sorted(WEB.iterdir()) if path.suffix in _TYPES}


def file_names() -> list[str]:
    """Return what there is below `/web/`."""
    return list(_files())


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:20])


async def index(request: web.Request) -> web.Response:
    """Return the page."""
    return _served(request, INDEX)


async def file(request: web.Request) -> web.Response:
    """Return a file of the page.

    Raises:
        RouteNotFound: it has no such file.
    """
    return _served(request, request.match_info["name"])


def _served(request: web.Request, name: str) -> web.Response:
    found = _files().get(name)
    if found is None:
        raise RouteNotFound(f"there is no {request.path}")
    headers = {**_HEADERS, "ETag": f'"{found.etag}"'}
    known = request.if_none_match or ()
    if any(tag.value in (found.etag, "*") for tag in known):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers={**headers, "Content-Type": found.content_type})
