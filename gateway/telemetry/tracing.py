"""Traces, behind two small protocols: a node without an exporter pays a method call that returns.

Spans of a request: the HTTP SERVER span, below it `decide` and `dispatch`; events for the first
token; attributes for the decision and the outcome. Never a span per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """A running span."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add an event that happens now."""
        ...

    def fail(self, kind: str, message: str) -> None:
        """Mark it as failed; `kind` becomes `error.type`."""
        ...

    def child(self, name: str) -> Span:
        """Start a span below this one."""
        ...

    def propagation(self) -> dict[str, str]:
        """Return the headers that make a request to another server part of this span."""
        ...

    def end(self) -> None:
        """End it. Idempotent."""
        ...


class Tracing(Protocol):
    """Where spans come from."""

    def server(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Span:
        """Start a SERVER span whose parent is in the `traceparent` of the headers, if any."""
        ...

    def shutdown(self) -> None:
        """Export what is left; blocks."""
        ...


class _NoSpan:
    """A span that nobody reads."""

    def set(self, attributes: Attributes) -> None:
        """Do nothing."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Do nothing."""

    def fail(self, kind: str, message: str) -> None:
        """Do nothing."""

    def child(self, name: str) -> Span:
        """Return itself."""
        return self

    def propagation(self) -> dict[str, str]:
        """Return none."""
        return {}

    def end(self) -> None:
        """Do nothing."""


NO_SPAN: Final[Span] = _NoSpan()


class NoTracing:
    """Tracing without an exporter."""

    def server(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Span:
        """Return the span that does nothing."""
        return NO_SPAN

    def shutdown(self) -> None:
        """Do nothing."""


def open_tracing(environ: Mapping[str, str]) -> Tracing:
    """Return tracing to the endpoint of `OTEL_EXPORTER_OTLP_ENDPOINT`, or none if it is unset."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not any(environ.get(name) for name in names) or environ.get("OTEL_SDK_DISABLED") == "true":
        return NoTracing()
    from gateway.telemetry.otel import otlp_tracing

    return otlp_tracing()
