"""Reads the fields of a checkpoint's JSON file with type checks.

An error names the file and the field.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from draftgate.backends.errors import CheckpointError

MAX_COUNT: Final = 1 << 24
"""Upper bound on counts. A larger count means that the file is damaged."""

UPSTREAM_HINT: Final = (
    "to serve the model with vLLM or SGLang, use `--backend openai --upstream URL`"
)
"""The end of an error about a model that the engine does not support."""


class Fields:
    """The fields of a JSON object. A null field counts as missing.

    `raw` is the object at the dotted path `prefix` of `file`.
    """

    def __init__(self, raw: Mapping[str, Any], file: str, prefix: str = "") -> None:
        self._raw = raw
        self._file = file
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the unchecked value of a field, or None if the field is missing."""
        return self._raw.get(name)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Return an error that names the file and the field."""
        return CheckpointError(f"{self._file}: {self._prefix}{name} {problem}")

    def section(self, name: str) -> Fields:
        """Return a field that must be an object, or an empty object if the field is missing."""
        value = {} if self._raw.get(name) is None else self._raw[name]
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {reprlib.repr(value)}")
        return Fields(value, self._file, f"{self._prefix}{name}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return these fields, and defaults for those that are absent. A null field is not."""
        return Fields({**defaults, **self._raw}, self._file, self._prefix)

    @property
    def names(self) -> list[str]:
        """The names of all fields that are not missing."""
        return [name for name in self._raw if name in self]

    @property
    def nested(self) -> bool:
        """Whether the value of any field is an object."""
        return any(isinstance(value, Mapping) for value in self._raw.values())

    def count(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_COUNT
    ) -> int:
        """Return a field that must be an integer from `minimum` to `maximum`.

        Raises:
            CheckpointError: the field has another value, or is missing and has no default.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            shown = reprlib.repr(value)
            raise self.error(
                name, f"must be a whole number from {minimum} to {maximum}, not {shown}"
            )
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """Return a field that must be a finite number greater than `above`.

        Raises:
            CheckpointError: the field has another value, or is missing and has no default.
        """
        return self._number(name, self._value(name, default), above)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a field that must list `count` finite numbers greater than 0.

        Raises:
            CheckpointError: the field has another value, or is missing.
        """
        values = self._value(name, None)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, f"must list {count} numbers, not {reprlib.repr(values)}")
        return tuple(self._number(name, value, 0.0) for value in values)

    def _number(self, name: str, value: object, above: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {reprlib.repr(value)}")
        if not above < value <= sys.float_info.max:
            shown = reprlib.repr(value)
            raise self.error(name, f"must be a finite number above {above:g}, not {shown}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a field that must be true or false.

        Raises:
            CheckpointError: the field has another value.
        """
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {reprlib.repr(value)}")
        return value

    def _value(self, name: str, default: float | None) -> Any:
        value = default if self._raw.get(name) is None else self._raw[name]
        if value is None:
            raise self.error(name, "is missing")
        return value
