"""Readers and checks for settings that are text, such as sizes, indices and addresses."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final
from urllib.parse import urlsplit


def read_indices(value: object) -> list[int]:
    """Return distinct indices from the text `0,1`, one number, or a list of numbers.

    Raises:
        ValueError: the value is not a list of distinct indices.
    """
    items = value.split(",") if isinstance(value, str) else value
    try:
        found = [int(str(item)) for item in (items if isinstance(items, list) else [items])]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError("expected distinct indices of 0 or more, such as 0,1")
    return found


def read_texts(value: object) -> object:
    """Return a list of texts from one text with commas.

    Any other value, such as a list, is returned unchanged for the type check.

    Raises:
        ValueError: one of the texts is empty.
    """
    if not isinstance(value, str):
        return value
    found = [item.strip() for item in value.split(",")] if value.strip() else []
    if "" in found:
        raise ValueError("expected texts separated by commas, without empty texts")
    return found


def read_models(value: object) -> object:
    """Return `NAME=CHECKPOINT` texts from a list, a text with commas, or a mapping in YAML.

    Raises:
        ValueError: a name or a checkpoint is empty.
    """
    if isinstance(value, dict):
        value = [f"{name}={path}" for name, path in value.items()]
    found = read_texts(value)
    if isinstance(found, list | tuple) and not all(all(str(one).split("=", 1)) for one in found):
        raise ValueError("expected NAME=CHECKPOINT, or a checkpoint alone")
    return found


def read_shares(value: object) -> object:
    """Return `NAME=SHARE` texts from a list, a text with commas, or a mapping in YAML.

    Raises:
        ValueError: a share is not a number.
    """
    if isinstance(value, dict):
        value = [f"{name}={share}" for name, share in value.items()]
    found = read_texts(value)
    pattern = re.compile(r".+=[0-9]*\.?[0-9]+")
    if isinstance(found, list | tuple) and not all(pattern.fullmatch(str(one)) for one in found):
        raise ValueError("expected NAME=SHARE, such as chat=0.6")
    return found


def read_urls(value: object) -> list[str]:
    """Return server addresses from a text with commas or a list.

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
        raise ValueError("expected distinct addresses")
    return found


def read_hosts(value: object) -> list[str]:
    """Return host names in lower case from a text with commas or a list.

    Raises:
        ValueError: an entry is not a host name, or has a port.
    """
    return _matching(value, r"[a-z0-9._-]+|\[[0-9a-f:.]+\]", "host names such as api.example.com")


def read_origins(value: object) -> list[str]:
    """Return origins of web pages in lower case from a text with commas or a list.

    Raises:
        ValueError: an entry is not an origin, or has a path.
    """
    pattern = r"[a-z][a-z0-9+.-]*://[^\s/?#*]+"
    return _matching(value, pattern, "origins such as https://example.com")


def _matching(value: object, pattern: str, expected: str) -> list[str]:
    items = value if isinstance(value, list | tuple) else [value]
    texts = (text.strip().lower() for item in items for text in str(item).split(","))
    found = [text for text in texts if text]
    if not all(re.fullmatch(pattern, item) for item in found):
        raise ValueError(f"expected {expected}")
    return found


_UNITS: Final = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def read_bytes(value: object) -> object:
    """Return a size in bytes from a text such as `1073741824`, `512MiB` or `1.5 GB`.

    Any other value is returned unchanged for the type check.

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
    """Check that a text is the address of an HTTP server.

    Raises:
        ValueError: the text is not such an address.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or an unclosed bracket
        valid = False
    if not valid:
        raise ValueError("expected an address such as http://127.0.0.1:4318")


def check_pool(text: str) -> None:
    """Check the name of a pool, which becomes part of keys in Redis.

    Raises:
        ValueError: the name has an invalid character or more than 64 characters.
    """
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is None:
        raise ValueError("expected a name of letters, digits, dots, dashes, underscores")


def check_backend(name: str) -> None:
    """Check that a built-in or installed backend has this name.

    Raises:
        ValueError: no backend has this name.
    """
    from draftgate.backends.registry import backend_names

    if name not in backend_names():
        raise ValueError(f"expected one of {', '.join(backend_names())}")


MASK: Final = "********"
"""The text shown in place of a secret."""


def mask_url(text: str) -> str:
    """Return an address, valid or not, with its passwords masked.

    The mask covers everything between the scheme and the last `@`, because a password may contain
    `@`. It also covers the value of each query option whose name contains `password`.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    secret, at, visible = rest.rpartition("@")
    shown = f"{scheme}{separator}{MASK}@{visible}" if at and secret else text
    return re.sub(r"([?&][^=&]*password[^=&]*=)[^&]*", rf"\g<1>{MASK}", shown, flags=re.IGNORECASE)
