"""A pytest plugin with the fixtures of the clients' suites, whose environments lack Draftgate.

The module is no `conftest.py`, because its hook would also apply to the tests of the project.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]
CALL = 'Call get_weather {"city": "Rome", "days": 2}'
"""An instruction for the scripted model."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": SCHEMA,
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the failures that a suite lists in `EXPECTED`, and fail for names without a test."""
    for module in {item.module for item in items}:
        expected = dict(getattr(module, "EXPECTED", {}))
        for item in items:
            if reason := expected.pop(item.nodeid.partition("::")[2], None):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        if expected:
            raise pytest.UsageError(f"no such tests: {sorted(expected)}")


@pytest.fixture
def shipped() -> str:
    """The URL of a node with the shipped model, `draftgate-demo`."""
    return os.environ["SHIPPED"] + "/v1"


@pytest.fixture
def scripted() -> str:
    """The URL of a node whose model, `scripted`, follows instructions."""
    return os.environ["SCRIPTED"] + "/v1"
