"""Mutations that keep the structure of an input, so that they reach beyond the decoder.

A mutated tree is a valid document with a wrong value somewhere. libFuzzer mutates the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

STRANGE = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e300, 1e-300, 1 << 31, (1 << 63) - 1, 1 << 63,
    1 << 64, 10**400, -(1 << 63), float("nan"), float("inf"), "", "0", "null", "a" * 2000, "\0",
    "\ud800", "\U0001f600", "../../etc/passwd", "{{", "*", [], {}, [[]], [{}], {"": None},
)  # fmt: skip
"""Values at the limits of types, and texts that parsers tend to treat wrongly."""

DEEP = (100, 1_000, 5_000)
"""Depths of nesting, below and above Python's recursion limit."""


@dataclass(frozen=True)
class Form:
    """A structured format. `decode` raises an exception for bytes without this structure."""

    decode: Callable[[bytes], Any] | None = None
    encode: Callable[[Any], bytes] | None = None


def _json_of(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _header_of(data: bytes) -> Any:
    (length,) = struct.unpack_from("<Q", data)
    return [json.loads(data[8 : 8 + length]), data[8 + length :].decode("latin-1")]


def _with_header(tree: Any) -> bytes:
    header, rest = json.dumps(tree[0]).encode(), str(tree[1]).encode("latin-1", "replace")
    return struct.pack("<Q", len(header)) + header + rest


BYTES = Form()
JSON = Form(json.loads, _json_of)
MSGPACK = Form(msgspec.msgpack.decode, msgspec.msgpack.encode)
SAFETENSORS = Form(_header_of, _with_header)


def mutated(form: Form, data: bytes, random: Random) -> bytes | None:
    """Return a document with one to three changed values, or None without the structure."""
    if form.decode is None or form.encode is None:
        return None
    try:
        tree = form.decode(data)
        for _ in range(random.randint(1, 3)):
            tree = _changed(tree, random)
        return form.encode(tree)
    except Exception:  # noqa: BLE001 - not a document, or a tree that the format cannot hold
        return None


def _changed(tree: Any, random: Random) -> Any:
    """Return a tree with one changed node, which may be the root."""
    places = list(_places(tree))
    values = [tree] + [holder[key] for holder, key in places]
    if not places or random.random() < 0.02:
        return _other(tree, values, random)
    holder, key = random.choice(places)
    act = random.random()
    if act < 0.1:
        del holder[key]
    elif act < 0.2 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif act < 0.25 and isinstance(holder, list):
        holder.extend(deepcopy(holder * random.choice((1, 30))))
    elif act < 0.4 and isinstance(holder, dict):
        names = [name for _, name in places if isinstance(name, str)]
        holder[random.choice(names)] = deepcopy(random.choice(values))
    else:
        holder[key] = _other(holder[key], values, random)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place below the root: a container and a key."""
    open_ = [tree]
    while open_:
        holder = open_.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder))
        if not isinstance(holder, dict | list):
            continue
        for key in list(keys):
            yield holder, key
            if isinstance(holder[key], dict | list):
                open_.append(holder[key])


def _other(value: Any, values: list[Any], random: Random) -> Any:
    act = random.random()
    if act < 0.5:
        return deepcopy(random.choice(STRANGE))
    if act < 0.7:
        return deepcopy(random.choice(values))
    if act < 0.73:
        return _nested(value, random)
    if isinstance(value, str) and value:
        return _changed_text(value, random)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return random.choice((value + 1, value - 1, -value, value * 1000, value / 2, str(value)))
    return [value] if act < 0.9 else {"type": value}


def _nested(value: Any, random: Random) -> Any:
    name = random.choice((None, "items", "properties", "content"))
    for _ in range(random.choice(DEEP)):
        value = [value] if name is None else {name: value}
    return value


def _changed_text(text: str, random: Random) -> str:
    begin, end = sorted((random.randint(0, len(text)), random.randint(0, len(text))))
    piece = random.choice(
        ("", text, text[begin:end] * 50, chr(random.randint(0, 0x2FFF)), "\\", '"')
    )
    return text[:begin] + piece + text[end:]
