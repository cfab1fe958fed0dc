"""A pytest plugin with the fixtures of the clients' suites, whose environments lack Draftgate.

The module is no `conftest.py`, because its hook would also apply to the tests of the project.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
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


WARNING = re.compile(r"\bWARN|\bERROR\b|\bCRITICAL\b|Warning:|Traceback|\u26a0")
"""What a line of a load generator's output with a warning or an error contains."""

BUSY = re.compile(r"Event loop for|generation delay|dispatch delay|schedule_delay|validation\.json")
"""Warnings of load generators about their own pace, which depends on the machine.

Version 0.7 of inference-perf also warns of a request that it sent early, and then names its file
`validation.json`. Each finding in this file is a warning of its own.
"""

TOKENIZER = Path(__file__).parents[3] / "draftgate" / "backends" / "engine" / "demo" / "target"
"""The tokenizer of the shipped model."""


def output_of(command: list[str], folder: Path) -> str:
    """Return the output of a load generator, which must succeed without a warning.

    Args:
        command: the program of this environment, and its arguments.
        folder: folder of its results.
    """
    program = Path(sys.executable).with_name(command[0])
    # The programs format their output for the width of a terminal. They import many modules, which
    # Python compiles once for all runs.
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "COLUMNS": "400"}
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    warnings = [one for one in lines if WARNING.search(one) and not BUSY.search(one)]
    assert not warnings, "\n".join(warnings)
    return done.stdout


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


@pytest.fixture(params=["SCRIPTED", "TOOLLESS"])
def scripted(request: pytest.FixtureRequest) -> str:
    """The URL of a node whose model, `scripted`, follows instructions.

    A test runs against two such nodes: the chat template of the second one does not render tools.
    """
    return os.environ[request.param] + "/v1"
