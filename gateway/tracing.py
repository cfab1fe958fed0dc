"""The interfaces of spans and tracing, whose base classes record nothing.

The module `telemetry.otel` has subclasses that record. A node without an exporter therefore pays
only for method calls that return immediately.

A request has one trace. An HTTP SERVER span is the parent of a span for each hop, and `dispatch` is
the parent of the worker's spans (`dispatch.worker_spans`). Tokens have no spans. A span is a
context manager that ends when its block ends. Times are seconds of `time.monotonic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self, TypeAlias

from draftgate.gateway.errors import as_gateway_error

AttributeValue: TypeAlias = (
    str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]
)
Attributes: TypeAlias = Mapping[str, AttributeValue]


class Span:
    """A running span.

    The span ends when its block ends. An exception in the block is passed to `fail`.

    Attributes:
        recording: whether the span will be exported. Check it before computing costly attributes.
    """

    recording = False

    @property
    def trace_id(self) -> str | None:
        """The W3C trace id with 32 hexadecimal digits, or None without a trace."""
        return None

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def event(
        self, name: str, attributes: Attributes | None = None, at_s: float | None = None
    ) -> None:
        """Add an event at the given time, or now."""

    def fail(self, error: BaseException) -> None:
        """Set `error.type`, and status ERROR if the error is a server error."""

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_s: float | None = None,
        *,
        client: bool = False,
    ) -> Span:
        """Start a child span now, or at an earlier time.

        Args:
            client: whether the span is a request to another server (CLIENT).
        """
        return self

    def propagation(self) -> dict[str, str]:
        """Return the headers that make a request to another server part of this trace."""
        return {}

    def end(self, at_s: float | None = None) -> None:
        """End the span now, or at an earlier time.

        The method is idempotent.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Pass an exception to `fail`, and end the span."""


NO_SPAN: Final = Span()


class Tracing:
    """The source of the traces of requests.

    Attributes:
        records: whether any spans are recorded.
    """

    records = False

    def server(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Span:
        """Start a SERVER span whose parent is in the `traceparent` of the headers, if any."""
        return NO_SPAN

    def shutdown(self) -> None:
        """Export the remaining spans, and block until this is done."""


def is_server_error(error: BaseException) -> bool:
    """Return whether an error is the server's fault, not the client's."""
    if isinstance(error, ConnectionResetError) or not isinstance(error, Exception):
        return False
    return as_gateway_error(error).status >= 500
