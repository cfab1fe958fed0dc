"""Targets: what upstream engines send, and the text of models."""

from __future__ import annotations

from typing import Any

from draftgate.backends.openai.events import EventScan, usage_in
from draftgate.backends.openai.metrics import read_metrics
from draftgate.gateway.tools.dialects import HERMES, LLAMA, MISTRAL
from draftgate.gateway.tools.parsing import CallParser
from draftgate.loadgen.sending.sse import SseParser
from tests.fuzz.target import Target


def pieces_of(data: bytes) -> list[bytes]:
    """Return two pieces of the input."""
    middle = len(data) // 2
    return [data[:middle], data[middle:]]


def events(data: bytes) -> None:
    """Scan a stream, whose ending and events do not depend on its division into pieces."""
    whole, parts = EventScan(), EventScan()
    passed = whole.feed(data)
    assert b"".join(map(parts.feed, pieces_of(data))) == passed
    assert parts.ending is whole.ending
    for scan in (whole, parts):
        scan.close()
        scan.usage()
    assert data.startswith(passed)


def usage(data: bytes) -> None:
    """Read the tokens of a response."""
    found = usage_in(data)
    assert found is None or min(found) >= 0


def sse(data: bytes) -> None:
    """Parse events in the load generator."""
    whole, parts = SseParser(), SseParser()
    expected = whole.feed(data)
    found = [event for piece in pieces_of(data) for event in parts.feed(piece)]
    assert found == expected


def metrics(data: bytes) -> None:
    """Read a metrics page."""
    read_metrics(data.decode("utf-8", "replace"))


def calls(data: bytes) -> None:
    """Split the text of a model into content and calls, without losing a character."""
    text = data.decode("utf-8", "replace")
    for dialect in (HERMES, LLAMA, MISTRAL):
        parser = CallParser(dialect, ("weather", "now"))
        pieces: list[Any] = [*parser.add(text), *parser.finish()]
        assert "".join(piece.source for piece in pieces) == text


TARGETS = [
    Target("upstream_events", events),
    Target("upstream_usage", usage),
    Target("upstream_metrics", metrics, (ValueError,)),
    Target("client_events", sse),
    Target("tool_calls", calls),
]
