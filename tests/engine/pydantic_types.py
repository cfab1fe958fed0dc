"""Types that pydantic can describe as JSON schemas."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, Optional, TypeVar

import pydantic
import pydantic.networks
import pydantic.types
import typing_extensions
from pydantic import BaseModel, Field, TypeAdapter

Item = TypeVar("Item")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Word(enum.StrEnum):
    YES = "yes"
    NO = "no"


class Single(enum.Enum):
    ONLY = "only"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    name: str = Field(max_length=5)


class Nested(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: list[Cat] = Field(max_length=2)


class Node(BaseModel):
    value: int
    next: Node | None = None


class Tree(BaseModel):
    children: list[Tree]


class Page(BaseModel, Generic[Item]):
    items: list[Item]
    total: int


class Aliased(BaseModel):
    first: str = Field(alias="firstName")
    second: int = Field(validation_alias="in", serialization_alias="out")
    third: bool = Field(default=False, title="Third", description="words", examples=[True])


class Defaults(BaseModel):
    number: int = 3
    words: list[str] = Field(default_factory=list, max_length=2)


class Closed(BaseModel, extra="forbid"):
    a: int
    b: str | None = None


class Open(BaseModel, extra="allow"):
    a: int


class Computed(BaseModel):
    side: int

    @pydantic.computed_field
    @property
    def area(self) -> int:
        return self.side**2


class Text(pydantic.RootModel[str]):
    pass


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Movie(typing_extensions.TypedDict, total=False):
    name: typing_extensions.Required[str]
    year: int


class ReadOnly(typing_extensions.TypedDict, closed=True):
    name: str


@dataclass
class Plain:
    a: int
    b: str = "x"


@pydantic.dataclasses.dataclass
class Checked:
    a: Annotated[int, Field(gt=3)]


_PLAIN: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        str, int, float, bool, bytes, type(None), list, dict, tuple, set, frozenset, object,
        dt.date, dt.time, dt.datetime, dt.timedelta, decimal.Decimal,
        uuid.UUID, pathlib.Path, pathlib.PurePosixPath, pathlib.PurePath, fractions.Fraction,
        collections.deque, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network,
        ipaddress.IPv6Network, ipaddress.IPv4Interface, ipaddress.IPv6Interface, re.Pattern,
        Color, Number, Word, Single, Cat, Dog, Nested, Node, Tree, Aliased, Defaults, Closed, Open,
        Computed, Text, Point, Movie, ReadOnly, Plain, Checked,
    )
}  # fmt: skip

_COMPOSED: Final[dict[str, Any]] = {
    "Any": Any,
    "list[int]": list[int],
    "list[Any]": list[Any],
    "set[str]": set[str],
    "set[int]": set[int],
    "set[Color]": set[Color],
    "frozenset[float]": frozenset[float],
    "deque[int]": collections.deque[int],
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "tuple[()]": tuple[()],
    "Sequence[bool]": Sequence[bool],
    "Iterable[int]": Iterable[int],
    "Iterator[int]": Iterator[int],
    "AbstractSet[int]": AbstractSet[int],
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[float, bool]": dict[float, bool],
    "dict[bool, int]": dict[bool, int],
    "dict[str, Any]": dict[str, Any],
    "dict[Literal, int]": dict[Literal["a", "b"], int],
    "dict[Color, int]": dict[Color, int],
    "dict[UUID, int]": dict[uuid.UUID, int],
    "dict[date, int]": dict[dt.date, int],
    "dict[short, int]": dict[Annotated[str, Field(min_length=1, max_length=3)], int],
    "dict[pattern, int]": dict[Annotated[str, Field(pattern=r"^k\d$")], int],
    "dict[str, dict[str, bool]]": dict[str, dict[str, bool]],
    "dict of one": Annotated[dict[str, int], Field(min_length=1)],
    "dict of few": Annotated[dict[str, int], Field(max_length=2)],
    "Mapping[str, Cat]": Mapping[str, Cat],
    "MutableMapping[str, int]": MutableMapping[str, int],
    "defaultdict": collections.defaultdict[str, list[int]],
    "OrderedDict": collections.OrderedDict[str, int],
    "Counter": collections.Counter[str],
    "Optional": Optional[int],  # noqa: UP045 - an old name that users write
    "Union": int | str | None,
    "Literal": Literal["a", 1, True] | None,
    "Literal of one": Literal["only"],
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list of discriminated": list[Annotated[Cat | Dog, Field(discriminator="kind")]],
    "union of models": Cat | Dog,
    "generic": Page[int],
    "generic of models": Page[Cat],
    "constr": Annotated[str, Field(min_length=2, max_length=5)],
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{2}\d{3}$")],
    "conint": Annotated[int, Field(ge=3, lt=10)],
    "multiple": Annotated[int, Field(multiple_of=3, ge=0)],
    "confloat": Annotated[float, Field(gt=0, lt=1)],
    "condecimal": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    "condecimal bounds": Annotated[decimal.Decimal, Field(ge=0, le=100)],
    "conlist": Annotated[list[int], Field(min_length=1, max_length=3)],
    "conset": Annotated[set[int], Field(min_length=1, max_length=3)],
    "conbytes": Annotated[bytes, Field(min_length=1, max_length=3)],
    "past": pydantic.PastDate,
    "Json of list": pydantic.Json[list[int]],
    "Secret of int": pydantic.Secret[int],
    "Base64Bytes": pydantic.Base64Bytes,
    "JsonValue": pydantic.JsonValue,
    "nested annotated": Annotated[Annotated[int, Field(ge=1)], Field(le=4)],
    "description": Annotated[str, Field(description="words", examples=["x"], deprecated=True)],
    "extra": Annotated[str, Field(json_schema_extra={"x-order": 1, "example": "a"})],
}


def _public(module: Any) -> dict[str, Any]:
    """Return the public types of a module of pydantic, without those that need a parameter."""
    types = {name: getattr(module, name) for name in module.__all__}
    return {f"{module.__name__}.{name}": one for name, one in types.items()}


def pydantic_types() -> dict[str, TypeAdapter[Any]]:
    """Return the types that pydantic can describe, by name."""
    found = {}
    named = {**_PLAIN, **_COMPOSED, **_public(pydantic.types), **_public(pydantic.networks)}
    for name, kind in named.items():
        try:
            adapter = TypeAdapter[Any](kind)
            adapter.json_schema()
        except Exception:  # noqa: BLE001 - pydantic itself has no schema for it
            continue
        found[name] = adapter
    return found
