"""Immutable values that are cheap to create."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots whose objects never change.

    The type checker enforces this. The interpreter does not, because the constructor of a frozen
    dataclass takes five times as long. Use this decorator for values of each request or step.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
