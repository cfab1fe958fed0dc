"""The destination of traces, from a setting or from OpenTelemetry's environment variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from draftgate.gateway.config.values import read_collector
from draftgate.gateway.logs import log
from draftgate.gateway.tracing import Tracing

PROTOCOL: Final = "http/protobuf"
"""The supported value of `OTEL_EXPORTER_OTLP_PROTOCOL`."""

_HEADER_READER: Final = "opentelemetry.util.re"
"""The logger of the SDK's reader of headers in the environment."""


def open_tracing(endpoint: str | None, environ: Mapping[str, str]) -> Tracing:
    """Return tracing to an OTLP collector, or tracing that records nothing without a collector.

    Args:
        endpoint: address of the collector, such as `http://127.0.0.1:4318`. None uses
            `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`. The other
            standard variables (headers, sampler, limits, batches) apply in both cases.
        environ: the environment. `OTEL_SDK_DISABLED` disables tracing.

    Raises:
        ValueError: a variable is not an address.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    configured = any(environ.get(name) for name in names)
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        configured = False
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or not (endpoint or configured):
        return Tracing()
    for name in () if endpoint else names:
        _check_address(name, environ.get(name) or "http://localhost")
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL
    )
    if protocol != PROTOCOL:
        log(logging.WARNING, "unsupported OTLP protocol", requested=protocol, used=PROTOCOL)
    logging.getLogger(_HEADER_READER).addFilter(_without_header)
    # The import of the SDK takes 0.15 s, which nodes without an exporter avoid.
    from draftgate.gateway.telemetry.otel import otlp_tracing

    return otlp_tracing(None if endpoint is None else str(read_collector(endpoint)))


def _without_header(record: logging.LogRecord) -> bool:
    """Remove the header from a warning about it, because it may be a key."""
    record.msg = "a header in OTEL_EXPORTER_OTLP_HEADERS is ignored: expected NAME=VALUE"
    record.args = ()
    return True


def _check_address(name: str, address: str) -> None:
    """Check an address in the environment, without which no export would succeed."""
    try:
        read_collector(address.partition("?")[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
