"""What is recorded about a version in a differential test."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.differential.exchange import Observed


class Outcome(msgspec.Struct):
    """What was observed in a case.

    Attributes:
        upstream: the requests that the upstream received.
        lines: the log lines.
    """

    exchanges: list[Observed]
    upstream: list[bytes] = []
    lines: list[dict[str, Any]] = []


class Record(msgspec.Struct):
    """Everything that was observed in a scenario. Pages are by the number of cases before them."""

    outcomes: list[Outcome] = []
    pages: dict[int, dict[str, Observed]] = {}
