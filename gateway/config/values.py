"""Values of settings that are written as text: sizes, indices, lists, addresses and names."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final
from urllib.parse import urlsplit


def read_indices(value: object) -> list[int]:
    """Read distinct indices: the text `0,1`, one number, or a list of numbers.

    Raises:
        ValueError: the value is not a list of distinct indices.
    """
    items = value.split(",") if isinstance(value, str) else value
    try:
        found = [int(str(item)) for item in (items if isinstance(items, list) else [items])]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError("expected different indices from 0 on, such as 0,1")
    return found


def read_texts(value: object) -> object:
    """Read several texts: one text with commas, or a list, whose entries are not split.

    Any other value is returned unchanged, for the type check to reject.

    Raises:
        ValueError: one of the texts is empty.
    """
    if not isinstance(value, str):
        return value
    found = [item.strip() for item in value.split(",")] if value.strip() else []
    if "" in found:
        raise ValueError("expected texts with commas between them, none of them empty")
    return found


def read_urls(value: object) -> list[str]:
    """Read addresses of servers: a text with commas, or a list.

    Raises:
        ValueError: an entry is not an HTTP address, or occurs twice.
    """
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    found = [str(item).strip().rstrip("/") for item in items]
    for item in found:
        parts = urlsplit(item)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query:
            raise ValueError("expected addresses such as http://localhost:8001")
    if len(set(found)) < len(found):
        raise ValueError("expected different addresses")
    return found


_UNITS: Final = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def read_bytes(value: object) -> object:
    """Read a size such as `1073741824`, `512MiB` or `1.5 GB`; only texts are converted.

    Raises:
        ValueError: the text is not a size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?(?:ib)?)b?", value.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size in bytes, such as 512MiB or 1GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


def check_url(text: str) -> None:
    """Accept the address of an HTTP server.

    Raises:
        ValueError: the text is not one.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or an unclosed bracket
        valid = False
    if not valid:
        raise ValueError("expected an address such as http://127.0.0.1:4318")


def check_pool(text: str) -> None:
    """Accept the name of a pool, which becomes part of keys in Redis.

    Raises:
        ValueError: the name has other characters, or is too long.
    """
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is None:
        raise ValueError("expected a name of letters, digits, dots, dashes, underscores")


def check_backend(name: str) -> None:
    """Accept the name of a built-in or installed backend.

    Raises:
        ValueError: no backend has this name.
    """
    from draftgate.backends.registry import backend_names

    if name not in backend_names():
        raise ValueError(f"expected one of {', '.join(backend_names())}")


MASK: Final = "********"
"""Shown in place of a secret."""


def mask_url(text: str) -> str:
    """Return an address, valid or not, without its passwords.

    Everything between the scheme and the last `@` is masked, because a password may contain `@`,
    and so is the value of each option whose name contains `password`.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    secret, at, visible = rest.rpartition("@")
    shown = f"{scheme}{separator}{MASK}@{visible}" if at and secret else text
    return re.sub(r"([?&][^=&]*password[^=&]*=)[^&]*", rf"\g<1>{MASK}", shown, flags=re.IGNORECASE)
