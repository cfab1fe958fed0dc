"""Readers and checks for settings that are text, such as sizes, indices and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from typing import Final

from draftgate.addresses import read_server_url, same_server


def read_list(value: object) -> object:
    """Return the texts of a list, each without surrounding space.

    Flags, variables and YAML give a text with commas or a list of such texts. A comma always
    separates, so that all of them mean the same. A blank text is an empty list. Any other value is
    returned unchanged for the type check.

    Raises:
        ValueError: one of several texts is empty.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        return value
    found = [
        item.strip() if isinstance(item, str) else item
        for text in texts
        for item in (text.split(",") if isinstance(text, str) else [text])
    ]
    if found == [""]:
        return []
    if "" in found:
        raise ValueError("expected texts separated by commas, without empty texts")
    return found


def read_indices(value: object) -> list[int]:
    """Return distinct indices from a list such as `0,1`, or from one number.

    Raises:
        ValueError: the value is not a list of distinct indices.
    """
    items = read_list(value)
    try:
        found = [int(str(item)) for item in (items if isinstance(items, list) else [items])]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError("expected distinct indices of 0 or more, such as 0,1")
    return found


def read_models(value: object) -> object:
    """Return `NAME=CHECKPOINT` texts from a list, or from a mapping in YAML.

    Raises:
        ValueError: a name or a checkpoint is empty.
    """
    return _checked(_pairs(value), r"[^=]+(=.+)?", "NAME=CHECKPOINT, or a checkpoint alone")


def read_shares(value: object) -> object:
    """Return `NAME=SHARE` texts from a list, or from a mapping in YAML.

    Raises:
        ValueError: a share is not a number.
    """
    return _checked(_pairs(value), r".+=[0-9]*\.?[0-9]+", "NAME=SHARE, such as chat=0.6")


def read_fallbacks(value: object) -> object:
    """Return `MODEL=FALLBACK` texts from a list, or from a mapping of lists in YAML.

    Further fallbacks may follow a text after a comma, without the model.

    Raises:
        ValueError: a name is empty, or a model is reached again from itself.
    """
    if isinstance(value, dict):
        value = [f"{name}={item}" for name, items in value.items() for item in _items(items)]
    items = read_list(value)
    if not isinstance(items, list):
        return value
    found, model = [], ""
    for text in map(str, items):
        before, equals, after = text.partition("=")
        model, fallback = (before, after) if equals else (model, text)
        found.append(f"{model}={fallback}")
    _checked(found, r"[^=]+=.+", "MODEL=FALLBACK, such as large=small")
    chains = chains_of(found)
    try:
        TopologicalSorter(chains).prepare()
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ValueError(f"two models must not be fallbacks of each other: {cycle}") from None
    if any(len(set(chain)) < len(chain) for chain in chains.values()):
        raise ValueError("expected distinct fallbacks of a model")
    return found


def chains_of(pairs: Iterable[str]) -> dict[str, list[str]]:
    """Return the fallbacks of each model in order, from `MODEL=FALLBACK` texts."""
    found: dict[str, list[str]] = {}
    for pair in pairs:
        model, _, fallback = pair.partition("=")
        found.setdefault(model, []).append(fallback)
    return found


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def read_hosts(value: object) -> object:
    """Return host names in lower case from a list.

    Raises:
        ValueError: an entry is not a host name, or has a port.
    """
    pattern, expected = r"[a-z0-9._-]+|\[[0-9a-f:.]+\]", "host names such as api.example.com"
    return _checked(_lower(read_list(value)), pattern, expected)


def read_origins(value: object) -> object:
    """Return origins of web pages in lower case from a list.

    Raises:
        ValueError: an entry is not an origin, or has a path.
    """
    pattern, found = r"[a-z][a-z0-9+.-]*://[^\s/?#*@]+", _lower(read_list(value))
    if isinstance(found, list):
        found = [origin.removesuffix("/") for origin in found]
    return _checked(found, pattern, "origins such as https://example.com")


def read_upstreams(value: object) -> object:
    """Return upstreams as mappings, from a list of `URL`, `NAME=URL` and, in YAML, of mappings.

    Raises:
        ValueError: an address is not an HTTP address, or occurs twice.
    """
    items = read_list(value)
    if not isinstance(items, list):
        return value
    found = [_upstream(item) for item in items]
    _check_distinct([str(one["url"]) for one in found])
    return found


def _upstream(item: object) -> dict[str, object]:
    if not isinstance(item, dict):
        name, equals, url = str(item).partition("=")
        named = bool(equals) and "/" not in name
        item = {"name": name, "url": url} if named else {"url": item}
    if "url" not in item:
        raise ValueError("expected a url for each upstream")
    if re.fullmatch(r"[A-Za-z0-9._:-]{0,64}", str(item.get("name", ""))) is None:
        raise ValueError("expected a name of letters, digits, dots, dashes, underscores")
    headers = item.get("headers")
    for name, text in headers.items() if isinstance(headers, dict) else ():
        if not re.fullmatch(r"[A-Za-z0-9-]+", str(name)) or not str(text).isprintable():
            raise ValueError(f"expected a header, not {str(name)!r}")
    price = item.get("price")
    if isinstance(price, dict) and not any(isinstance(one, dict) for one in price.values()):
        item = {**item, "price": {"": price}}  # of all models
    return {**item, "url": read_server_url(str(item["url"]))}


def read_urls(value: object) -> object:
    """Return server addresses from a list, as `read_server_url` does.

    Raises:
        ValueError: an entry is not an HTTP address, or occurs twice.
    """
    items = read_list(value)
    if not isinstance(items, list):
        return value
    found = [read_server_url(str(item)) for item in items]
    _check_distinct(found)
    return found


def _check_distinct(urls: list[str]) -> None:
    if len(set(map(same_server, urls))) < len(urls):
        raise ValueError("expected distinct addresses")


def read_url(value: object) -> object:
    """Return a server address as `read_server_url` does. None is returned unchanged."""
    return value if value is None else read_server_url(str(value))


def read_collector(value: object) -> object:
    """Return the address of an OTLP collector, also from the whole address for traces."""
    return read_url(value if value is None else str(value).rstrip("/").removesuffix("/v1/traces"))


def _pairs(value: object) -> object:
    """Return `NAME=VALUE` texts from a mapping, whose values may have commas, or read a list."""
    if isinstance(value, dict):
        return [f"{name}={item}" for name, item in value.items()]
    return read_list(value)


def _lower(value: object) -> object:
    return [str(item).lower() for item in value] if isinstance(value, list) else value


def _checked(value: object, pattern: str, expected: str) -> object:
    """Return a list whose texts all match, or any other value for the type check."""
    items = value if isinstance(value, list) else []
    if not all(re.fullmatch(pattern, str(item), re.DOTALL) for item in items):
        raise ValueError(f"expected {expected}")
    return value


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


def is_variable(text: str) -> bool:
    """Return whether a text can be the name of an environment variable."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None


def check_variable(name: str) -> None:
    """Check the name of an environment variable, in place of which users sometimes give its value.

    Raises:
        ValueError: the text cannot be such a name.
    """
    if not is_variable(name):
        raise ValueError("expected the name of an environment variable, not its value")
