"""What the errors of decoders leave out: allowed values, and the cause and the line of YAML errors.

msgspec's messages name neither the members of an enum nor the tags of a union. PyYAML's messages
quote the file, which may have keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec.inspect as types

_PART = re.compile(r"[^.\[\]]+|\[[\d.]*\]")

_QUOTED = re.compile(r"'\w[^'\s]{2,}'")
"""A quoted word of the file. The names of YAML's tokens, such as `'<stream end>'`, stay."""


def yaml_problem(error: BaseException | None, content: bytes) -> str:
    """Return the line and the cause of an error about YAML, without longer quotes of the file."""
    import yaml

    line, cause = 0, ""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, cause = 0 if mark is None else mark.line + 1, error.problem or error.context or ""
    elif isinstance(error, yaml.reader.ReaderError):
        text = content.decode("utf-8", "replace")
        line, cause = text.count("\n", 0, error.position) + 1, error.reason
    elif isinstance(error, UnicodeDecodeError):
        line, cause = content.count(b"\n", 0, error.start) + 1, "the text is not UTF-8"
    words = [f"line {line}" if line else "", _QUOTED.sub("'...'", cause)]
    return "not YAML, " + ": ".join(filter(None, words)) if any(words) else "not YAML"


def allowed_values(kind: Any, path: str) -> tuple[str, ...]:
    """Return the names that a field may have, or nothing if they are not a fixed list.

    Args:
        kind: the type of the whole value.
        path: the path of the field, as in `messages[0].role`.
    """
    *parts, last = _PART.findall(path) or [""]
    found = [_type_info(kind)] if last else []
    for part in parts:
        found = [inner for outer in _members(found) for inner in _inner(outer, part)]
    names: dict[str, None] = {}
    for one in _members(found):
        if isinstance(one, types.StructType) and one.tag_field == last:
            names[str(one.tag)] = None
        for inner in _members(_inner(one, last)):
            if isinstance(inner, types.EnumType):
                names |= dict.fromkeys(str(member.value) for member in inner.cls)
            elif isinstance(inner, types.LiteralType):
                names |= dict.fromkeys(map(str, inner.values))
    return tuple(names)


_type_info = cache(types.type_info)


def _members(found: Iterable[types.Type]) -> Iterator[types.Type]:
    """Yield types, with the members of unions in their place."""
    for one in found:
        if isinstance(one, types.UnionType):
            yield from _members(one.types)
        elif isinstance(one, types.Metadata):
            yield from _members([one.type])
        else:
            yield one


def _inner(outer: types.Type, part: str) -> list[types.Type]:
    """Return the types of a field or an element of a type."""
    if part.startswith("["):
        if isinstance(outer, types.DictType):
            return [outer.value_type]
        if isinstance(outer, types.CollectionType):
            return [outer.item_type]
        if isinstance(outer, types.TupleType):
            return list(outer.item_types)
    if isinstance(outer, types.StructType):
        return [field.type for field in outer.fields if field.encode_name == part]
    return []
