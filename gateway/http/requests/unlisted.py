"""The fields of a body that its struct does not have, sorted out by the inventory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.inspect import ListType, StructType, Type, UnionType, type_info

from draftgate.gateway.errors import Unsupported, invalid
from draftgate.gateway.http.requests.inventory import FieldLists
from draftgate.gateway.http.requests.limits import RANGES
from draftgate.gateway.logs import log

MAX_LOGGED: Final = 100
"""Maximum number of unknown fields that the log names, because clients choose the names."""


class Place(NamedTuple):
    """A place in a body.

    Attributes:
        path: the names of the objects around a field, each with a trailing dot.
        shown: the same with the indexes of lists.
    """

    path: str
    shown: str

    def field(self, name: str) -> Place:
        """Return the place within a field."""
        return Place(f"{self.path}{name}.", f"{self.shown}{name}.")

    def item(self, index: int) -> Place:
        """Return the place within an item of a list."""
        return Place(self.path, f"{self.shown[:-1]}[{index}].")


_object: Final = msgspec.json.Decoder(dict[str, Raw])
_array: Final = msgspec.json.Decoder(list[Raw])
_encode: Final = msgspec.json.Encoder().encode
_logged: Final[set[str]] = set()


def only_listed(body: bytes, kind: Any, lists: FieldLists, within: str = "") -> bytes:
    """Return a body with only the fields that its struct has, and with their usual names.

    Args:
        kind: the struct of the body, or a type with structs.
        lists: the other fields that clients of the endpoint send.
        within: path of the body in a larger one, with a trailing dot.

    Raises:
        Unsupported: the value of a refused field would change the response.
        InvalidRequest: a field and its alias are given, or an alias is out of range.
    """
    return bytes(_Walk(lists).filtered(Raw(body), _info(kind), Place(within, within)))


_info: Final = cache(type_info)


class _Walk:
    """The walk through the objects of one body. Values that are not objects stay as sent."""

    def __init__(self, lists: FieldLists) -> None:
        self._lists = lists

    def filtered(self, raw: Raw, info: Type, place: Place) -> Raw:
        """Return a value without the fields that the structs of its type do not have.

        A value of another type stays as it is, because the decoder reports its path.
        """
        opening = bytes(memoryview(raw)[:64]).lstrip()[:1]
        if opening == b"[" and (items := _items(info)) is not None:
            sent = enumerate(_array.decode(raw))
            return Raw(_encode([self.filtered(one, items, place.item(i)) for i, one in sent]))
        if opening == b"{" and _has_struct(info):
            fields = _object.decode(raw)
            if (struct := _struct(info, fields)) is not None:
                return Raw(_encode(self._object(fields, struct, place)))
        return raw

    def _object(self, sent: dict[str, Raw], struct: StructType, place: Place) -> dict[str, Raw]:
        known = {one.encode_name: one.type for one in struct.fields}
        kept: dict[str, Raw] = {}
        others: dict[str, Raw] = {}
        for name, raw in sent.items():
            if name == struct.tag_field:
                kept[name] = raw
            elif name in known:
                kept[name] = self.filtered(raw, known[name], place.field(name))
            else:
                others[name] = raw
        for name, raw in others.items():
            value = msgspec.json.decode(raw)
            if value is None:
                continue
            usual = None if place.path else self._usual_name(name, known)
            if usual is None:
                self._check(name, value, place)
            else:
                _check_alias(name, usual, value, kept)
                kept[usual] = raw
        return kept

    def _usual_name(self, alias: str, known: Mapping[str, Type]) -> str | None:
        names = self._lists.aliases.get(alias, ())
        return next((name for name in names if name in known), None)

    def _check(self, name: str, value: Any, place: Place) -> None:
        """Check a field that the struct does not have.

        Raises:
            Unsupported: the field is refused, and its value would change the response.
        """
        path = place.path + name
        refused = self._lists.refused.get(path)
        if refused is not None:
            if not any(_same(value, one) for one in refused.neutral):
                raise Unsupported(place.shown + name, advice=refused.advice)
        elif path not in self._lists.harmless and f"*.{name}" not in self._lists.harmless:
            _log_unknown(path)


def _check_alias(name: str, usual: str, value: Any, kept: dict[str, Raw]) -> None:
    if bytes(kept.get(usual, b"null")) != b"null":
        raise invalid(usual, f"cannot be combined with {name}, which has the same meaning")
    if usual in RANGES:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(name, "must be a number")
        RANGES[usual].check(name, value)


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _log_unknown(path: str) -> None:
    """Log the path of an unknown field when it is first sent."""
    if path not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(path)
        log(logging.WARNING, "unknown request field ignored", field=path[:MAX_LOGGED])


def _alternatives(info: Type) -> tuple[Type, ...]:
    return info.types if isinstance(info, UnionType) else (info,)


def _items(info: Type) -> Type | None:
    """Return the type of the items of a list with structs."""
    for one in _alternatives(info):
        if isinstance(one, ListType) and _has_struct(one.item_type):
            return one.item_type
    return None


def _has_struct(info: Type) -> bool:
    return any(
        isinstance(one, StructType) or (isinstance(one, ListType) and _has_struct(one.item_type))
        for one in _alternatives(info)
    )


def _struct(info: Type, sent: dict[str, Raw]) -> StructType | None:
    """Return the struct of an object: that with its tag, or the only one."""
    structs = [one for one in _alternatives(info) if isinstance(one, StructType)]
    if len(structs) <= 1:
        return structs[0] if structs else None
    for one in structs:
        if one.tag_field in sent and msgspec.json.decode(sent[one.tag_field]) == one.tag:
            return one
    return None
