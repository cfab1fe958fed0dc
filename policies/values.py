"""Immutable values that are cheap to create."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, dataclass_transform

import msgspec

if TYPE_CHECKING:
    from dataclasses import replace
else:
    from msgspec.structs import replace

__all__ = ["immutable", "replace"]

T = TypeVar("T")

_METACLASS: Final[Any] = type(msgspec.Struct)
_NOT_INHERITED: Final = frozenset({"__dict__", "__weakref__"})
_DATACLASS_FIELDS: Final = "__dataclass_fields__"


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(cls: type[T]) -> type[T]:
    """Make a class a frozen struct of msgspec, which the functions of `dataclasses` also accept.

    Use this decorator and `replace` for values of each request or step. C code creates such a
    value. The constructor of a dataclass takes several times as long, and that of a frozen
    dataclass five times as long again.
    """
    namespace = {name: value for name, value in vars(cls).items() if name not in _NOT_INHERITED}
    # The fields let `dataclasses.replace`, `fields` and `asdict` work for all values alike.
    namespace[_DATACLASS_FIELDS] = vars(dataclass(cls))[_DATACLASS_FIELDS]
    return cast(type[T], _METACLASS(cls.__name__, (msgspec.Struct,), namespace, frozen=True))
