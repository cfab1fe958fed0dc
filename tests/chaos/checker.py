"""The check of every response against its expected text.

The expected text of a distinct request is that of an undisturbed response without drafts in the
same numerics class. Each is computed once and kept in a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import Record

BROKEN = frozenset({Verdict.CUT, Verdict.NO_CONNECTION})
"""Verdicts of a connection whose server has been killed."""


class Outcome(StrEnum):
    """What became of a request, or of one attempt to send it."""

    INTACT = "intact"
    """The whole text and nothing else arrived once."""
    OTHER_CLASS = "other_class"
    """The stream is complete, and the response says that it ran in another numerics class."""
    ALTERED = "altered"
    """The text differs, or a broken stream is not the beginning of the text."""
    CUT = "cut"
    FAILED = "failed"
    LOST_WITH_SERVER = "lost_with_server"
    """The process at the other end of a connection was killed. Its streams cannot continue."""


@dataclass(frozen=True)
class Death:
    """A kill of a process whose connections belong to clients or to a gateway.

    Attributes:
        server: URL of the gateway, or the name of the model of an upstream.
    """

    server: str
    at_s: float


class Truths:
    """The expected texts by request and numerics class."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists."""
        self._path = path
        self._texts: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return any(known.startswith(f"{key} ") for known in self._texts)

    def add(self, key: str, record: Record) -> None:
        """Keep the text of an undisturbed response."""
        assert record.verdict == Verdict.OK, (key, record.detail)
        self._texts[_name(key, record)] = _text(record)

    def merge(self, other: Truths) -> None:
        """Add the texts of another version of Draftgate.

        Both versions must have the same text for a request in a numerics class, because they may
        continue each other's streams.
        """
        differing = [
            name
            for name, text in other._texts.items()
            if self._texts.setdefault(name, text) != text
        ]
        assert not differing, f"the versions have other texts: {differing}"

    def write(self) -> None:
        """Write all texts to the file."""
        self._path.write_text(json.dumps(self._texts, indent=0))

    def judge(
        self, key: str, record: Record, url: str, model: str, deaths: Sequence[Death]
    ) -> Outcome:
        """Return what became of an attempt.

        Args:
            url: URL of the gateway.
            model: name of the requested model.
            deaths: kills on the clock of the record.
        """
        if record.verdict == Verdict.OK:
            expected = self._texts.get(_name(key, record))
            if expected is None:
                return Outcome.OTHER_CLASS
            return Outcome.INTACT if _text(record) == expected else Outcome.ALTERED
        if not self._is_beginning(key, record):
            return Outcome.ALTERED
        for death in deaths:
            during = record.sent_s <= death.at_s <= record.end_s
            if during and death.server == model:
                return Outcome.LOST_WITH_SERVER
            if during and death.server == url and record.verdict in BROKEN:
                return Outcome.LOST_WITH_SERVER
        if record.verdict in {Verdict.HTTP_STATUS, Verdict.ERROR_EVENT, Verdict.NO_CONNECTION}:
            return Outcome.FAILED
        return Outcome.CUT

    def _is_beginning(self, key: str, record: Record) -> bool:
        """Return whether a broken stream begins like an expected text in any numerics class."""
        begun = "".join(record.texts)
        texts = (text for name, (text, _) in self._texts.items() if name.startswith(f"{key} "))
        return any("".join(text).startswith(begun) for text in texts)


def _name(key: str, record: Record) -> str:
    return f"{key} {(record.metrics or {}).get('numerics_class')}"


def _text(record: Record) -> list[Any]:
    return [list(record.texts), list(record.finish_reasons)]
