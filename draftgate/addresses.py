"""Addresses of HTTP servers, as every command and setting reads and shows them."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

MASK: Final = "********"
"""The text shown in place of a secret."""

_PORTS: Final = {"http": 80, "https": 443}

_EXPECTED: Final = "expected an address such as http://127.0.0.1:8000"

_AUTHORITY: Final = re.compile(r"(?:[^\s/?#@]*@)?(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")
"""The part of an address between its scheme and its path."""

_SECRET_OPTION: Final = re.compile(
    r"([?&][^=&]*(?:password|passwd|secret|token|api[-_]?key)[^=&]*=)[^&]*", re.IGNORECASE
)


def read_server_url(text: str) -> str:
    """Return the address of a server without the path of its API.

    The address has no final slash and no final `/v1`, because the paths of requests begin with
    `/v1`. A path in front of it remains, for servers below a prefix.

    Raises:
        ValueError: the text is not such an address. The message says what to write instead, and
            contains no password.
    """
    text = text.strip()
    try:
        parts = urlsplit(text)
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        valid = _is_valid(parts)
    except ValueError:  # an invalid port, or an unclosed bracket
        valid = False
    if not valid:
        raise ValueError(_EXPECTED + _suggestion(text))
    root = f"{parts.scheme}://{parts.netloc}{path}"
    if parts.query or parts.fragment:
        raise ValueError(f"expected an address without ? and #, such as {mask_url(root)}")
    prefix, endpoint, _ = path.partition("/v1/")
    if endpoint:
        root = f"{parts.scheme}://{parts.netloc}{prefix}"
        raise ValueError(f"expected the address of a server, such as {mask_url(root)}")
    return root


def same_server(text: str) -> tuple[str, str, int, str]:
    """Return a key that is equal for all ways to write an address of `read_server_url`."""
    parts = urlsplit(text)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme], parts.path


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return an address of `read_server_url` without its credentials, and user and password."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    name, _, password = user.partition(":")
    return parts._replace(netloc=host).geturl(), (unquote(name), unquote(password))


def mask_url(text: str) -> str:
    """Return an address, valid or not, with its passwords masked.

    The mask covers everything between the scheme and the last `@`, because a password may contain
    `@`. It also covers the values of query options such as `password` and `api_key`.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or "@" in scheme:
        scheme, separator, rest = "", "", text
    secret, at, visible = rest.rpartition("@")
    shown = f"{scheme}{separator}{MASK}@{visible}" if at and secret else text
    return _SECRET_OPTION.sub(rf"\g<1>{MASK}", shown)


def _is_valid(parts: SplitResult) -> bool:
    return (
        parts.scheme in _PORTS
        and bool(parts.hostname)
        and parts.port != 0
        and _AUTHORITY.fullmatch(parts.netloc) is not None
        and not re.search(r"\s", parts.path)
    )


def _suggestion(text: str) -> str:
    """Return a question with the probable address after a semicolon, or an empty string."""
    host, slash, path = text.partition("/")
    if not _AUTHORITY.fullmatch(host) or text.startswith(("http:", "https:")):
        return ""
    try:
        return f"; did you mean {mask_url(read_server_url(f'http://{host}{slash}{path}'))}?"
    except ValueError:
        return ""
