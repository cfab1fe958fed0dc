"""Background requests to an upstream, which read its health, its models and its metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from draftgate.backends.connection_errors import public_reason
from draftgate.backends.openai.connection import Response
from draftgate.backends.openai.connections import Connections
from draftgate.backends.openai.metrics import EngineMetrics, read_metrics

PROBE_S: Final = 2.0
"""Seconds between health probes of a healthy upstream. An outage is three failures, so it is
noticed in 6 s or after three failed requests."""

POLL_S: Final = 1.5
"""Seconds between readings of its metrics. A request takes an engine seconds, and this gateway
counts its own requests immediately. Only requests of other clients are known with this delay.
SGLang updates its page every 40 steps, about as often. llama.cpp's server detects that the client
of a complete response has left only after a second without any result. A metrics page is a result.
With readings every 0.1 or 0.5 s, the server computed 16,000 more tokens for such a client. With
readings every 1.5 s, it stopped (b1-0c1e570, Zen 5, 2026-11-22)."""

PATIENCE_S: Final = 2.0
"""Timeout of any response in seconds. An engine with a slower event loop is overloaded, and an
older metrics page is of no use."""

MISSING_S: Final = 30.0
"""Seconds until the gateway requests a missing metrics page, or the known number of slots, again.
The engine may have restarted with other settings."""

_MOST_BYTES: Final = 4 << 20
"""Maximum size of a page in bytes: for metrics ten times that of a vLLM with eight engines."""

_INLINE_BYTES: Final = 512 << 10
"""Size in bytes from which pages are parsed in a thread. A page of 344 kB in 3,457 lines, as from a
vLLM with eight engines, takes 1.4 ms (Zen 5, 2026-11-22). The event loop may be blocked for 5."""


class ProbeFailure(NamedTuple):
    """The cause of a failed probe, and whether it was a timeout."""

    reason: str
    timeout: bool


class ListedModel(NamedTuple):
    """A model of an upstream's list.

    Attributes:
        max_model_len: maximum number of tokens, or 0 if it is not listed.
        is_llama_cpp: whether the server is llama.cpp's.
    """

    model_id: str
    max_model_len: int
    created_s: int
    is_llama_cpp: bool = False


class UpstreamMonitor:
    """Sends background requests to one upstream.

    Attributes:
        model: first model in the upstream's list, or None until the list was read.
        models: the models of its latest list by name, or None until one was read.
    """

    def __init__(self, connections: Connections, clock: Callable[[], float]) -> None:
        self.model: ListedModel | None = None
        self.models: dict[str, dict[str, Any]] | None = None
        self._connections = connections
        self._clock = clock
        self._next_metrics_s = self._next_slots_s = 0.0

    async def probe(self) -> ProbeFailure | None:
        """Return None if the upstream is healthy, else the cause of the failure.

        The probe requests `GET /health` (vLLM, SGLang, llama.cpp, Draftgate) and the list of
        models. The list decides if `/health` is missing, or if no list has been read.
        """
        healthy = False
        try:
            async with self._get("/health") as response:
                await response.read(_MOST_BYTES)
                if response.status >= 500:
                    reason = f"/health responded with status {response.status}"
                    return ProbeFailure(reason, timeout=False)
                healthy = response.status in {200, 204} and self.models is not None
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            return _failure(error)
        failure = await self._read_models()
        return None if healthy else failure

    async def metrics(self) -> EngineMetrics | None:
        """Return the present metrics, or None if the page is missing or late."""
        if self._clock() < self._next_metrics_s:
            return None
        try:
            async with self._get("/metrics") as response:
                if response.status == 200:
                    return await _read_page(response)
                if 400 <= response.status < 500 or response.status == 501:
                    self._next_metrics_s = self._clock() + MISSING_S
        except (OSError, ValueError):  # TimeoutError is an OSError
            pass
        return None

    async def slots(self) -> int | None:
        """Return the slots of a llama.cpp server, or None if unknown or unchanged.

        The slots are at `/props`, with or without metrics. The page does not show whether the
        server speculates, because its `speculative.types` is always `none`.
        """
        if self.model is None or not self.model.is_llama_cpp or self._clock() < self._next_slots_s:
            return None
        self._next_slots_s = self._clock() + MISSING_S
        try:
            async with self._get("/props") as response:
                props = json.loads(await response.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        return _number(props, "total_slots") or None

    @asynccontextmanager
    async def _get(self, path: str) -> AsyncGenerator[Response, None]:
        async with asyncio.timeout(PATIENCE_S):
            response = await self._connections.request("GET", path)
            try:
                yield response
            finally:
                response.close()

    async def _read_models(self) -> ProbeFailure | None:
        """Read the list, where denied access (401, 404) still counts as reachable."""
        try:
            async with self._get("/v1/models") as response:
                if response.status >= 500:
                    reason = f"/v1/models responded with status {response.status}"
                    return ProbeFailure(reason, timeout=False)
                if response.status == 200:
                    entries = await _read_list(response)
                    found = {one["id"]: one for one in entries}
                    if found and found != self.models:
                        self.model, self.models = listed_model(entries[0]), found
        except (OSError, ValueError, RecursionError) as error:
            return _failure(error)
        return None


def _failure(error: Exception) -> ProbeFailure:
    if isinstance(error, TimeoutError):
        return ProbeFailure(f"it did not respond in {PATIENCE_S:g} s", timeout=True)
    return ProbeFailure(public_reason(error), timeout=False)


async def _read_page(response: Response) -> EngineMetrics | None:
    page = await response.read(_MOST_BYTES)
    text = page.decode("utf-8", "replace")
    if len(page) <= _INLINE_BYTES:
        return read_metrics(text)
    return await asyncio.to_thread(read_metrics, text)


async def _read_list(response: Response) -> list[dict[str, Any]]:
    """Return the entries of a list of models.

    Raises:
        OSError, ValueError, RecursionError: the list cannot be read.
    """
    page = await response.read(_MOST_BYTES)
    if len(page) <= _INLINE_BYTES:
        return _entries(json.loads(page))
    return _entries(await asyncio.to_thread(json.loads, page))


def _entries(listing: Any) -> list[dict[str, Any]]:
    data = listing.get("data") if isinstance(listing, dict) else None
    entries = data if isinstance(data, list) else []
    return [one for one in entries if isinstance(one, dict) and isinstance(one.get("id"), str)]


def listed_model(entry: Mapping[str, Any]) -> ListedModel:
    """Return what is known about a model from its entry in a list."""
    return ListedModel(
        entry["id"],
        # llama.cpp has the context of each slot in `meta`.
        _number(entry, "max_model_len") or _number(entry.get("meta"), "n_ctx"),
        _number(entry, "created"),
        entry.get("owned_by") == "llamacpp",
    )


def _number(fields: Any, key: str) -> int:
    value = fields.get(key) if isinstance(fields, Mapping) else None
    # JSON of others may hold any number, and NaN compares as False.
    return int(value) if isinstance(value, int | float) and 0 < value < 1e15 else 0
