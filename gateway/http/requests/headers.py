"""The request headers that Draftgate reads, for latency targets and the client's retries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from draftgate.gateway.errors import invalid
from draftgate.policies.types import ANYTIME, ServiceLevel

TTFT_HEADER: Final = "x-slo-ttft-ms"
TPOT_HEADER: Final = "x-slo-tpot-ms"
"""Latency targets, under the names that inference-perf uses."""

RETRIES_HEADER: Final = "x-stainless-retry-count"
"""The retry count that OpenAI's clients send."""


def service_level(headers: Mapping[str, str]) -> ServiceLevel:
    """Return the latency targets of a request.

    The body of the request sets its priority.

    Raises:
        InvalidRequest: a target is not a positive number of milliseconds.
    """
    if TTFT_HEADER not in headers and TPOT_HEADER not in headers:
        return ANYTIME
    return ServiceLevel(_seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER))


def retry_count(headers: Mapping[str, str]) -> int | None:
    """Return how often the client has sent the request before, or None if unknown."""
    text = headers.get(RETRIES_HEADER)
    if text is None:
        return None
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else None


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0.0 < milliseconds < math.inf:
        raise invalid(name, f"must be a positive number of milliseconds, not {text!r}")
    return milliseconds / 1e3
