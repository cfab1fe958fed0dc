"""The pages of the node, and their files below `/web/`.

The pages load nothing from other servers. They contain no data, so they need no API key: their
scripts read the data from endpoints that do.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from aiohttp import web

from draftgate.gateway.errors import RouteNotFound
from draftgate.gateway.http.context import LONGEST_ID, NODE, SESSION
from draftgate.gateway.http.endpoints.records import find_record

WEB: Final = Path(__file__).parents[2] / "web"

PAGES: Final = {
    "/": "index.html",
    "/requests": "requests.html",
    "/requests/{request_id}": "requests.html",
    "/operations": "operations.html",
    "/docs": "docs.html",
    "/login": "login.html",
}
"""The files of the pages, by their paths."""

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS: Final = {
    # The page shows requests, so it runs only its own scripts and no other page may frame it.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers must revalidate, so that they do not mix modules of two versions of the node.
    "Cache-Control": "no-cache",
}


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return the body and the ETag of every file of the page, by name."""
    paths = (path for path in sorted(WEB.iterdir()) if path.suffix in _TYPES)
    bodies = {path.name: path.read_bytes() for path in paths}
    return {name: (body, hashlib.sha256(body).hexdigest()[:20]) for name, body in bodies.items()}


def file_names() -> list[str]:
    """Return the names of the files below `/web/`."""
    return list(_files())


async def page(request: web.Request) -> web.Response:
    """Return the page of a path (`PAGES`), with status 404 for a request that does not exist.

    Raises:
        RouteNotFound: no request has an id of this length.
    """
    resource = request.match_info.route.resource
    assert resource is not None
    name = PAGES[resource.canonical.rstrip("/") or "/"]
    request_id = request.match_info.get("request_id", "")
    if len(request_id) > LONGEST_ID:
        raise RouteNotFound("the id of the request is too long")
    if request_id and await _is_missing(request, request_id):
        return _served(request, name, 404)  # the script shows why
    return _served(request, name)


async def _is_missing(request: web.Request, request_id: str) -> bool:
    """Return whether no request has an id, as far as the browser may know that."""
    node, of_browser = request.app[NODE], request.get(SESSION)
    if node.accounts.required and of_browser is None:
        return False  # the script asks for a key
    tenant = None if of_browser is None else of_browser.account.sees_tenant
    return await find_record(node, request_id, tenant) is None


async def file(request: web.Request) -> web.Response:
    """Return a file of the page.

    Raises:
        RouteNotFound: the file does not exist.
    """
    return _served(request, request.match_info["name"])


def _served(request: web.Request, name: str, status: int = 200) -> web.Response:
    if name not in _files():
        raise RouteNotFound(f"the path {request.path} does not exist")
    body, etag = _files()[name]
    headers = {**_HEADERS, "Content-Type": _TYPES[Path(name).suffix]}
    if status != 200:
        return web.Response(status=status, body=body, headers=headers)
    headers["ETag"] = f'"{etag}"'
    if any(tag.value in (etag, "*") for tag in request.if_none_match or ()):
        del headers["Content-Type"]
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers=headers)
