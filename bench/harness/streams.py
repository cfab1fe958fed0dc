"""Streams of a benchmark's requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx


async def event_times_s(http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> list[float]:
    """Send a request as a stream, and return the times of its events in seconds since then.

    Raises:
        httpx.HTTPStatusError: the server refused the request.
        RuntimeError: the stream had no event.
    """
    begin_s, times_s = time.perf_counter(), list[float]()
    async with http.stream("POST", url, json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter() - begin_s)
    if not times_s:
        raise RuntimeError(f"{url} sent no event")
    return times_s
