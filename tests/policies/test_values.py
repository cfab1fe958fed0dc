"""Immutable values."""

from __future__ import annotations

import dataclasses
import pickle

import msgspec
import pytest

from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.values import replace

NEED = CapacityNeed(1, prompt_tokens=10, most_tokens=30)


def test_value_cannot_change() -> None:
    """A value rejects the assignment of a field, so values can be shared and hashed."""
    with pytest.raises(AttributeError):
        NEED.sequences = 2  # type: ignore[misc]
    assert hash(NEED) == hash(CapacityNeed(1, 10, 30))


def test_value_is_replaced_like_a_dataclass() -> None:
    """Both functions `replace` return the same value, and `fields` and `asdict` work."""
    changed = replace(NEED, sequences=2)
    assert changed == dataclasses.replace(NEED, sequences=2) == CapacityNeed(2, 10, 30)
    assert [field.name for field in dataclasses.fields(NEED)] == list(dataclasses.asdict(NEED))


def test_value_survives_serialisation() -> None:
    """A value is equal after a trip through pickle and through JSON."""
    assert pickle.loads(pickle.dumps(NEED)) == NEED
    assert msgspec.json.decode(msgspec.json.encode(NEED), type=CapacityNeed) == NEED
