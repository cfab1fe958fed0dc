"""The destination of traces, from a setting or from OpenTelemetry's environment variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from draftgate.gateway.telemetry.logs import log
from draftgate.gateway.telemetry.tracing import Tracing

PROTOCOL: Final = "http/protobuf"
"""The supported value of `OTEL_EXPORTER_OTLP_PROTOCOL`."""


def open_tracing(endpoint: str | None, environ: Mapping[str, str]) -> Tracing:
    """Return tracing to an OTLP collector, or tracing that records nothing without a collector.

    Args:
        endpoint: address of the collector, such as `http://127.0.0.1:4318`. None uses
            `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`. The other
            standard variables (headers, sampler, limits, batches) apply in both cases.
        environ: the environment. `OTEL_SDK_DISABLED` disables tracing.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    configured = any(environ.get(name) for name in names)
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        configured = False
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or not (endpoint or configured):
        return Tracing()
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL
    )
    if protocol != PROTOCOL:
        log(logging.WARNING, "unsupported OTLP protocol", requested=protocol, used=PROTOCOL)
    # The import of the SDK takes 0.15 s, which nodes without an exporter avoid.
    from draftgate.gateway.telemetry.otel import otlp_tracing

    return otlp_tracing(endpoint)
