"""The errors of decoders in plain words, with what they leave out.

msgspec's messages have the names of Python's types, and name neither the members of an enum nor the
tags of a union. PyYAML's messages quote the file, which may have keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

import msgspec.inspect as types

TYPE_NAMES: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""The words for msgspec's names of types in messages."""

_EXPECTED = re.compile(
    r"Expected `(?P<types>[^`]*)`(?P<bound>.*?)(?:, got `(?P<got>\w+)`)?$", re.DOTALL
)

_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}

_LENGTH = re.compile(r"of length (?P<bound>[<>]=|) ?(?P<length>\d+)")

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


def plain_words(reason: str) -> str:
    """Return what a message of msgspec says about a value, without the path of the value."""
    if "out of range" in reason:
        return "the number is too large"
    found = _EXPECTED.match(reason)
    if found is None:
        reason = reason.replace("`", "")
        return reason[:1].lower() + reason[1:]
    names = [one for one in found["types"].split(" | ") if one != "null"] or ["null"]
    words = " or ".join(TYPE_NAMES.get(one, one) for one in names)
    if length := _LENGTH.search(found["bound"]):
        unit = "elements" if "array" in names else "characters"
        unit = unit[:-1] if length["length"] == "1" else unit
        least = {">=": "at least ", "<=": "at most ", "": ""}[length["bound"]]
        words += f" of {least}{length['length']} {unit}"
    elif " matching regex" in found["bound"]:
        words += " of another form"
    elif found["bound"]:
        sign, _, bound = found["bound"].strip().partition(" ")
        words += f" {_BOUNDS.get(sign, sign)} {bound.removesuffix('.0')}"
    got = found["got"]
    if got == "int" or (got == "float" and "int" not in names):
        return f"expected {words}, not a number"
    if got == "float":
        return f"expected {words}, not a fraction"
    return f"expected {words}" + (f", not {TYPE_NAMES.get(got, got)}" if got else "")


def malformed(error: ValueError) -> str:
    """Return why a text is not valid JSON."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start})"
    reason = str(error).removeprefix("JSON is malformed: ")
    return "it ends too early" if reason == "Input data was truncated" else reason


def description_of(kind: Any, path: str) -> str | None:
    """Return the description of a field, or None if it has none.

    Args:
        kind, path: as in `allowed_values`.
    """
    *parts, last = _PART.findall(path) or [""]
    for outer in _at(kind, parts):
        for inner in _inner(outer, last):
            if isinstance(inner, types.Metadata) and inner.extra_json_schema is not None:
                return inner.extra_json_schema.get("description")
    return None


def allowed_values(kind: Any, path: str) -> tuple[str, ...]:
    """Return the names that a field may have, or nothing if they are not a fixed list.

    Args:
        kind: the type of the whole value.
        path: the path of the field, as in `messages[0].role`.
    """
    *parts, last = _PART.findall(path) or [""]
    names: dict[str, None] = {}
    for one in _at(kind, parts) if last else ():
        if isinstance(one, types.StructType) and one.tag_field == last:
            names[str(one.tag)] = None
        for inner in _members(_inner(one, last)):
            if isinstance(inner, types.EnumType):
                names |= dict.fromkeys(str(member.value) for member in inner.cls)
            elif isinstance(inner, types.LiteralType):
                names |= dict.fromkeys(map(str, inner.values))
    return tuple(names)


def _at(kind: Any, parts: Iterable[str]) -> list[types.Type]:
    """Return the types that a value may have at a path."""
    found = [_type_info(kind)]
    for part in parts:
        found = [inner for outer in _members(found) for inner in _inner(outer, part)]
    return list(_members(found))


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
