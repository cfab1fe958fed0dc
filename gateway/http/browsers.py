"""Limits for web pages in browsers.

A browser lets every page send requests to every server that the browser can reach, for example to a
node on the same machine. The browser names the page's origin in `Origin`, so the node rejects
origins that are not its own. A page can also give its own host name the address of the node (DNS
rebinding). The origin of such a page is its own, but `Host` contains the name.

The operator can list origins of pages that may use the API. Their scripts can read the responses,
because the node then sends the headers of CORS (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

from aiohttp import web

from draftgate.backends.peer.channel import PREFIX
from draftgate.gateway.cluster.access import is_loopback
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.errors import ForbiddenHost, ForbiddenOrigin
from draftgate.gateway.http.context import ANTHROPIC_ID_HEADER, REQUEST_ID_HEADER
from draftgate.gateway.http.direct import Request, Response
from draftgate.gateway.http.rate_limits import RATE_LIMIT_HEADERS

EXEMPT_PATHS: Final = frozenset({"/health", "/ready"})
"""Paths for probes, which may use any address and name of the node."""

SCRAPED_PATH: Final = "/metrics"
"""The path for Prometheus, which may use any address of the node, such as that of its pod.

A page that points its own name at the node (DNS rebinding) sends this name as `Host`, and never an
address. Names stay limited, because the metrics of a node without keys name its tenants.
"""

PREFLIGHT_S: Final = 600
"""Time for which a browser may reuse the response to a preflight, in seconds."""

_EXPOSED: Final = ", ".join(
    (
        *(REQUEST_ID_HEADER, ANTHROPIC_ID_HEADER, "Retry-After", "retry-after-ms"),
        *RATE_LIMIT_HEADERS,
    )
)
"""Headers that scripts of listed origins can read."""


class BrowserAccess:
    """The rules for `Host` and `Origin` of a node.

    Attributes:
        origins: the listed origins.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._loopback = is_loopback(config.host)
        self._hosts = frozenset(config.allowed_hosts)
        self.origins = frozenset(config.cors_origins)

    def check(self, request: Request, *, keys: bool) -> None:
        """Check that the request is not from a foreign page.

        Nodes of a cluster are exempt, because `PeerAccess` checks their requests.

        Args:
            keys: whether clients need an API key.

        Raises:
            ForbiddenHost: the node does not accept the name in `Host`.
            ForbiddenOrigin: `Origin` is neither the node's own nor a listed origin.
        """
        path = request.path.rstrip("/")
        if path in EXEMPT_PATHS or path.startswith(PREFIX):
            return
        host = request.headers.get("Host", "").lower()
        name = _without_port(host)
        accepts = self._accepts_host(name, keys=keys) if host else True
        if not accepts and not (path == SCRAPED_PATH and _is_address(name)):
            raise ForbiddenHost(f"the Host {host!r} is not allowed; list it in --allowed-hosts")
        origin = _origin_of(request)
        if origin and not (self.is_own_page(request) or origin in self.origins):
            raise ForbiddenOrigin(f"the Origin {origin!r} is not listed in --cors-origins")

    def is_own_page(self, request: Request) -> bool:
        """Return whether a page of this node sent the request, by its `Origin`."""
        host = request.headers.get("Host", "").lower()
        return _origin_of(request) in (f"http://{host}", f"https://{host}")

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the response to a preflight of a listed origin, or None for other requests.

        A preflight has no API key, so the response must not depend on a key.
        """
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None or not self._lists(request):
            return None
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": method,
                "Access-Control-Allow-Headers": request.headers.get(
                    "Access-Control-Request-Headers", ""
                ),
                "Access-Control-Max-Age": str(PREFLIGHT_S),
            },
        )

    def add_headers(self, request: Request, response: Response) -> None:
        """Let scripts of listed origins read a response, if any are listed."""
        response.headers.add("Vary", "Origin")  # for caches between the node and its clients
        if self._lists(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _accepts_host(self, name: str, *, keys: bool) -> bool:
        if self._loopback and not keys:
            return _is_loopback(name.strip("[]")) or name in self._hosts
        return not self._hosts or name in self._hosts

    def _lists(self, request: Request) -> bool:
        return _origin_of(request) in self.origins


@lru_cache(maxsize=64)
def _is_loopback(name: str) -> bool:
    """Return whether a name is of this machine, from a cache of the names that clients use."""
    return is_loopback(name)


def _is_address(name: str) -> bool:
    """Return whether a host is an IP address, of which one of version 6 has brackets."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _origin_of(request: Request) -> str:
    """Return the origin of the page that sent a request, or an empty text."""
    return request.headers.get("Origin", "").lower()


def _without_port(host: str) -> str:
    """Return the name in a `Host` header, with the brackets of an IPv6 address."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
