"""Values of settings that a text stands for: sizes, indices, lists of texts, addresses."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final
from urllib.parse import urlsplit


def indices(value: object) -> list[int]:
    """Read different indices from 0 on: the text `0,1`, one number, or a list of them.

    Raises:
        ValueError: they are none.
    """
    items = value.split(",") if isinstance(value, str) else value
    try:
        found = [int(str(item)) for item in (items if isinstance(items, list) else [items])]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError("expected different indices from 0 on, such as 0,1")
    return found


def texts(value: object) -> object:
    """Read several texts: one with commas between them, or a list, whose entries stay as they are.

    What is neither is returned as it is: whoever checks types complains about it.

    Raises:
        ValueError: one of them is empty.
    """
    if not isinstance(value, str):
        return value
    found = [item.strip() for item in value.split(",")] if value.strip() else []
    if "" in found:
        raise ValueError("expected texts with commas between them, none of them empty")
    return found


def check_url(text: str) -> None:
    """Return if a text is the address of an HTTP server.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(text)
        fine = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, an unclosed bracket
        fine = False
    if not fine:
        raise ValueError("expected an address such as http://127.0.0.1:4318")


def urls(value: object) -> list[str]:
    """Read addresses of servers: a text with commas between them, or a list.

    Raises:
        ValueError: one is no http or https address, or stands twice.
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


def size_bytes(text: str) -> int:
    """Read a size: `1073741824`, `512MiB`, `1.5 GB`.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?(?:ib)?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size in bytes, such as 512MiB or 1GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


MASK: Final = "********"
"""In the place of what is secret."""


def masked_url(text: str) -> str:
    """Return an address, or what was meant to be one, without what could be a password.

    That is all between the scheme and the last `@`, which a password may hold as well, and the
    values of options whose names speak of one.
    """
    scheme, parted, rest = text.partition("://")
    if not parted:
        scheme, rest = "", text
    secret, at, open_part = rest.rpartition("@")
    shown = f"{scheme}{parted}{MASK}@{open_part}" if at and secret else text
    return re.sub(r"([?&][^=&]*password[^=&]*=)[^&]*", rf"\g<1>{MASK}", shown, flags=re.IGNORECASE)


def check_pool(text: str) -> None:
    """Return if a text can be the name of a pool, which is part of keys in Redis.

    Raises:
        ValueError: it cannot.
    """
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is None:
        raise ValueError("expected a name of letters, digits, dots, dashes, underscores")
