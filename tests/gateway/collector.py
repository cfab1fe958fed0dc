"""An OTLP/HTTP collector for tests, and the spans that it receives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector received it."""

    span: Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]

    def attributes_of(self, event: str) -> dict[str, Any]:
        """Return the attributes of the only event with this name."""
        (found,) = (item for item in self.span.events if item.name == event)
        return _plain(found.attributes)

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    def within(self, other: ReceivedSpan) -> bool:
        """Return whether this span begins and ends during the other span."""
        begin_ns, end_ns = self.span.start_time_unix_nano, self.span.end_time_unix_nano
        outer = other.span
        return outer.start_time_unix_nano <= begin_ns <= end_ns <= outer.end_time_unix_nano


class Collector:
    """An OTLP/HTTP endpoint that stores the spans that it receives."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []

    async def take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        message = ExportTraceServiceRequest.FromString(await request.read())
        for of_resource in message.resource_spans:
            resource = _plain(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [ReceivedSpan(span, resource) for span in of_scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    def named(self, name: str) -> ReceivedSpan:
        """Return the only span with this name."""
        (found,) = (span for span in self.spans if span.name == name)
        return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Run a collector at `/v1/traces` on a free local port."""
    collector = Collector()
    app = web.Application()
    app.add_routes([web.post("/v1/traces", collector.take)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield collector
    finally:
        await runner.cleanup()


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
