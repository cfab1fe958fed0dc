"""Traces, behind two small protocols: a node without an exporter pays method calls that return.

One trace per request (design, section 4): the HTTP SERVER span, below it a span for each hop, and
below `dispatch` those of the worker (`hops`). Never a span per token. Spans are context managers;
they end when they are left, also by a cancel. Instants are those of `time.monotonic`, in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

from draftgate.gateway.errors import as_gateway_error
from draftgate.gateway.telemetry.logs import log

PROTOCOL: Final = "http/protobuf"
"""Of OTLP, in the words of `OTEL_EXPORTER_OTLP_PROTOCOL`."""

AttributeValue: TypeAlias = (
    str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]
)
Attributes: TypeAlias = Mapping[str, AttributeValue]


class Span(Protocol):
    """A running span. Leaving it as a context ends it, and an exception is noted (`fail`)."""

    @property
    def recording(self) -> bool:
        """Whether anybody will read it: ask before making attributes that cost something."""
        ...

    @property
    def trace_id(self) -> str | None:
        """The W3C trace id, 32 hexadecimal digits; None where there is no trace."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def event(
        self, name: str, attributes: Attributes | None = None, at_s: float | None = None
    ) -> None:
        """Add an event that happens now, or happened at an instant."""
        ...

    def fail(self, error: BaseException) -> None:
        """Note what it ended with: `error.type`, and an ERROR status if it is a fault of ours."""
        ...

    def child(
        self, name: str, attributes: Attributes | None = None, start_s: float | None = None
    ) -> Span:
        """Start a span below this one, now or at an instant that has been."""
        ...

    def propagation(self) -> dict[str, str]:
        """Return the headers that make a request to another server part of this span."""
        ...

    def end(self, at_s: float | None = None) -> None:
        """End it, now or at an instant that has been. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


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

    recording = False
    trace_id = None

    def set(self, attributes: Attributes) -> None:
        """Do nothing."""

    def event(
        self, name: str, attributes: Attributes | None = None, at_s: float | None = None
    ) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        """Do nothing."""

    def child(
        self, name: str, attributes: Attributes | None = None, start_s: float | None = None
    ) -> Span:
        """Return itself."""
        return self

    def propagation(self) -> dict[str, str]:
        """Return none."""
        return {}

    def end(self, at_s: float | None = None) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


NO_SPAN: Final[Span] = _NoSpan()


class NoTracing:
    """Tracing without an exporter."""

    def server(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Span:
        """Return the span that does nothing."""
        return NO_SPAN

    def shutdown(self) -> None:
        """Do nothing."""


def is_ours(error: BaseException) -> bool:
    """Whether an error is a fault of ours: no bad request, and no client that left."""
    if isinstance(error, ConnectionResetError) or not isinstance(error, Exception):
        return False
    return as_gateway_error(error).status >= 500


def open_tracing(endpoint: str | None, environ: Mapping[str, str]) -> Tracing:
    """Return tracing to a collector, or none: nobody asked for it, or OpenTelemetry is disabled.

    Args:
        endpoint: the collector's address, such as `http://127.0.0.1:4318`; None leaves it to the
            standard variables, `OTEL_EXPORTER_OTLP_ENDPOINT` or that of traces. What else there is
            of those (headers, sampler, limits, batches) counts either way.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    asked = any(environ.get(name) for name in names)
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        asked = False
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or not (endpoint or asked):
        return NoTracing()
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL
    )
    if protocol != PROTOCOL:
        log(logging.WARNING, "unsupported OTLP protocol", asked=protocol, used=PROTOCOL)
    from draftgate.gateway.telemetry.otel import otlp_tracing

    return otlp_tracing(endpoint)
