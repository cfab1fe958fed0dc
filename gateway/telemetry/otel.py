"""Traces through OpenTelemetry. Imported only where there is somewhere to send them."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from gateway import __version__
from gateway.telemetry.tracing import Attributes


class OtelTracing:
    """Implements `Tracing` with a provider of its own; global state is left alone."""

    def __init__(self, processor: SpanProcessor) -> None:
        """Send ended spans to the processor."""
        resource = Resource.create({SERVICE_NAME: "draftgate", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("draftgate", __version__)

    def server(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> OtelSpan:
        """Start a SERVER span below the client's, if it sent one."""
        carrier = {key.lower(): value for key, value in headers.items()}
        parent = extract(carrier)
        span = self._tracer.start_span(
            name, parent, kind=trace.SpanKind.SERVER, attributes=dict(attributes)
        )
        return OtelSpan(self._tracer, span)

    def shutdown(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


class OtelSpan:
    """Implements `Span`."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add an event."""
        self._span.add_event(name, dict(attributes or {}))

    def fail(self, kind: str, message: str) -> None:
        """Mark it as failed."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(trace.StatusCode.ERROR, message)

    def child(self, name: str) -> OtelSpan:
        """Start an INTERNAL span below this one."""
        context = trace.set_span_in_context(self._span, Context())
        return OtelSpan(self._tracer, self._tracer.start_span(name, context))

    def propagation(self) -> dict[str, str]:
        """Return `traceparent`, and what else the propagators of the environment add."""
        carrier: dict[str, str] = {}
        inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier

    def end(self) -> None:
        """End it, once."""
        if self._span.is_recording():
            self._span.end()


def otlp_tracing() -> OtelTracing:
    """Return tracing to the OTLP endpoint that the environment names."""
    return OtelTracing(BatchSpanProcessor(OTLPSpanExporter()))
