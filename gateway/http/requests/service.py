"""How soon a client wants its tokens: the headers by which Draftgate and inference-perf name it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from draftgate.gateway.errors import InvalidRequest
from draftgate.policies.types import ServiceLevel

TTFT_HEADER: Final = "x-slo-ttft-ms"
TPOT_HEADER: Final = "x-slo-tpot-ms"
RETRIES_HEADER: Final = "x-stainless-retry-count"


def service_of(headers: Mapping[str, str]) -> ServiceLevel:
    """Return the targets that the headers of a request name; its priority is in the body.

    Raises:
        InvalidRequest: one is no positive number of milliseconds; the header is named.
    """
    return ServiceLevel(_seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER))


def retries_of(headers: Mapping[str, str]) -> int | None:
    """Return how often the client says to have sent a request before, as OpenAI's do."""
    text = headers.get(RETRIES_HEADER, "")
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
        raise InvalidRequest(
            f"{name}: must be a positive number of milliseconds, not {text!r}", name
        )
    return milliseconds / 1e3
