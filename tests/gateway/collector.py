"""An OTLP/HTTP collector for tests, and the spans that it received."""

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
class Sent:
    """A span as it was received."""

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
        """The attributes of the only event of that name."""
        (found,) = (one for one in self.span.events if one.name == event)
        return _plain(found.attributes)

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    def within(self, other: Sent) -> bool:
        """Whether it runs only while the other one runs."""
        begin_ns, end_ns = self.span.start_time_unix_nano, self.span.end_time_unix_nano
        outer = other.span
        return outer.start_time_unix_nano <= begin_ns <= end_ns <= outer.end_time_unix_nano


class Collector:
    """The received spans, in order."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Sent] = []
        self.headers: list[dict[str, str]] = []

    async def take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        message = ExportTraceServiceRequest.FromString(await request.read())
        for of_resource in message.resource_spans:
            resource = _plain(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [Sent(span, resource) for span in of_scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    def named(self, name: str) -> Sent:
        """The only span of that name."""
        (found,) = (span for span in self.spans if span.name == name)
        return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Accept spans at `/v1/traces` on a free port of this machine."""
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
