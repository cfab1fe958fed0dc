"""Typed access to the fields of a checkpoint's JSON file; complaints name file and field."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Final

from draftgate.backends.errors import CheckpointError

MOST: Final = 1 << 24
"""No count of a real model comes near: larger is damage, and must not be looped over."""


class Fields:
    """The fields of one JSON object. A field that is null counts as missing."""

    def __init__(self, raw: Mapping[str, Any], file: str, prefix: str = "") -> None:
        """Read `raw`, an object of `file`; `prefix` is where in the file it stands."""
        self._raw = raw
        self._file = file
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._raw.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a field as it stands, None if it is missing."""
        return self._raw.get(name)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Return the complaint about a field."""
        return CheckpointError(f"{self._file}: {self._prefix}{name} {problem}")

    def section(self, name: str) -> Fields:
        """Return a field that is an object; an empty one if it is missing."""
        value = self._raw.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {reprlib.repr(value)}")
        return Fields(value, self._file, f"{self._prefix}{name}.")

    @property
    def nested(self) -> bool:
        """Whether some field is an object itself."""
        return any(isinstance(value, Mapping) for value in self._raw.values())

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST
    ) -> int:
        """Return a field that counts something, from `least` to `most`.

        Raises:
            CheckpointError: it is no such number, or missing without a default.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            shown = reprlib.repr(value)
            raise self.error(name, f"must be a whole number from {least} to {most}, not {shown}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """Return a field that is a finite number greater than `above`.

        Raises:
            CheckpointError: it is no such number, or missing without a default.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {reprlib.repr(value)}")
        if not (math.isfinite(value) and value > above):
            raise self.error(name, f"must be a finite number above {above:g}, not {value}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a field that is true or false.

        Raises:
            CheckpointError: it is neither.
        """
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {reprlib.repr(value)}")
        return value

    def _value(self, name: str, default: float | None) -> Any:
        value = self._raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
