"""Traces through OpenTelemetry.

Only nodes that export traces import this module. The SDK itself reads the standard variables for
sampler, limits, batches, headers, compression, certificates and resource attributes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, get_global_textmap, inject
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from draftgate import __version__
from draftgate.gateway.errors import as_gateway_error
from draftgate.gateway.tracing import NO_SPAN, Attributes, Span, Tracing, is_server_error

TRACES_PATH: Final = "/v1/traces"
"""The path at which an OTLP/HTTP collector accepts spans."""


class _HeaderGetter(Getter[Mapping[str, str]]):
    """A getter of single headers.

    The default getter would copy all headers.
    """

    def get(self, carrier: Mapping[str, str], key: str) -> list[str] | None:
        found = carrier.get(key)
        return None if found is None else [found]

    def keys(self, carrier: Mapping[str, str]) -> list[str]:
        return list(carrier)


_HEADERS: Final = _HeaderGetter()


class _TraceIds(RandomIdGenerator):
    """Random ids, after a trace id that has been drawn before.

    Attributes:
        drawn: the id of the next trace, or None.
    """

    drawn: int | None = None

    def generate_trace_id(self) -> int:
        """Return the drawn id, or a random one."""
        found, self.drawn = self.drawn, None
        return super().generate_trace_id() if found is None else found


class OtelTracing(Tracing):
    """Tracing that records with a provider of its own.

    OpenTelemetry's global state does not change.
    """

    records = True

    def __init__(self, processor: SpanProcessor) -> None:
        """Pass ended spans to the processor."""
        of_environment = OTELResourceDetector().detect().attributes
        ours = {SERVICE_NAME: "draftgate", SERVICE_VERSION: __version__}
        resource = Resource.create({**ours, **of_environment})
        self._ids = _TraceIds()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("draftgate", __version__)
        self._fields = get_global_textmap().fields  # headers that may name a parent
        sampler = self._provider.sampler
        root = getattr(sampler, "_root", sampler)  # of `ParentBased`, which has no public name
        self._bound = root.bound if isinstance(root, TraceIdRatioBased) else None

    def server(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Span:
        """Start a child span of the client's span, or return `NO_SPAN` if not sampled."""
        # The SDK makes about thirty calls to find that a request without a parent is not sampled.
        if self._bound is not None and not any(name in headers for name in self._fields):
            drawn = self._ids.generate_trace_id()
            if drawn & TraceIdRatioBased.TRACE_ID_LIMIT >= self._bound:
                return NO_SPAN
            self._ids.drawn = drawn
        start_ns = time.time_ns()
        offset_ns = start_ns - time.monotonic_ns()
        parent = extract(headers, getter=_HEADERS)
        span = self._tracer.start_span(
            name, parent, trace.SpanKind.SERVER, dict(attributes), start_time=start_ns
        )
        return OtelSpan(self._tracer, span, offset_ns) if span.is_recording() else NO_SPAN

    def shutdown(self) -> None:
        """Export the remaining spans, and block until this is done."""
        self._provider.shutdown()


class OtelSpan(Span):
    """A recorded span.

    All times of a trace come from one monotonic clock, shifted to the wall clock at the trace's
    start. A step of the wall clock therefore cannot make a span end before it starts or outlive its
    parent.
    """

    recording = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset_ns: int) -> None:
        """Wrap a span.

        Args:
            offset_ns: the offset from the monotonic clock to the wall clock, in nanoseconds.
        """
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns
        self._context: Context | None = None  # the context of its children

    @property
    def trace_id(self) -> str:
        """The W3C trace id."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(dict(attributes))

    def event(
        self, name: str, attributes: Attributes | None = None, at_s: float | None = None
    ) -> None:
        """Add an event."""
        self._span.add_event(name, dict(attributes or {}), self._wall_ns(at_s))

    def fail(self, error: BaseException) -> None:
        """Set the error, with the message for the client as the description."""
        self._span.set_attribute("error.type", type(error).__name__)
        if isinstance(error, Exception) and is_server_error(error):
            self._span.set_status(trace.StatusCode.ERROR, as_gateway_error(error).message)

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_s: float | None = None,
        *,
        client: bool = False,
    ) -> OtelSpan:
        """Start a child span of the kind CLIENT or INTERNAL."""
        if self._context is None:
            self._context = trace.set_span_in_context(self._span, Context())
        span = self._tracer.start_span(
            name,
            self._context,
            trace.SpanKind.CLIENT if client else trace.SpanKind.INTERNAL,
            attributes=None if attributes is None else dict(attributes),
            start_time=self._wall_ns(start_s),
        )
        return OtelSpan(self._tracer, span, self._offset_ns)

    def propagation(self) -> dict[str, str]:
        """Return `traceparent` and the headers of the other configured propagators."""
        carrier: dict[str, str] = {}
        inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier

    def end(self, at_s: float | None = None) -> None:
        """End the span.

        The method is idempotent.
        """
        if self._span.is_recording():
            self._span.end(self._wall_ns(at_s))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.end()

    def _wall_ns(self, at_s: float | None) -> int:
        now_ns = time.monotonic_ns() if at_s is None else int(at_s * 1e9)
        return self._offset_ns + now_ns


def otlp_tracing(endpoint: str | None) -> OtelTracing:
    """Return tracing to an OTLP/HTTP collector.

    Args:
        endpoint: address of the collector, or None for the address in the environment.
    """
    traces = None if endpoint is None else endpoint + TRACES_PATH
    return OtelTracing(BatchSpanProcessor(OTLPSpanExporter(traces)))
