"""Asking an upstream for its metrics, now and then, in bounded time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import aiohttp

from backends.openai.metrics.dialects import read_metrics
from backends.openai.metrics.reading import Reading

POLL_S: Final = 1.0
"""Between readings. A request to an engine takes seconds, and what this gateway sends itself it
counts at once: only what others send is as old as that. A page costs a server some milliseconds;
SGLang brings its own up to date every 40 steps, which is about as often. (Chosen, not tuned;
2026-11-22.)"""

PATIENCE_S: Final = 2.0
"""For a page. What came later would be no news."""

MISSING_S: Final = 60.0
"""Before a page is asked for again that was not there: somebody may have restarted the engine with
its metrics on."""

MOST_BYTES: Final = 4 << 20
"""Of a page; vLLM's have 60 to 300 kB."""

INLINE_BYTES: Final = 128 << 10
"""Larger pages are read in a thread: 250 kB in 3,400 lines, like vLLM's with eight engines, take
2.1 ms (Zen 5, 2026-11-22), and the event loop may be held for 5."""

_PATIENCE: Final = aiohttp.ClientTimeout(total=PATIENCE_S)


class Slots(NamedTuple):
    """What llama.cpp's server says of itself at `/props`, with or without metrics.

    Attributes:
        seats: its slots.
        drafts: whether it was told to speculate.
    """

    seats: int
    drafts: bool


class MetricsPoller:
    """Asks one upstream. Never raises: who has no news says None."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, clock: Callable[[], float]
    ) -> None:
        """Know where to ask."""
        self._session = session
        self._url = url
        self._clock = clock
        self._missing_until_s = 0.0

    async def reading(self) -> Reading | None:
        """Return what the metrics say now; None where there are none, or not in time."""
        if self._clock() < self._missing_until_s:
            return None
        try:
            async with self._session.get(self._url + "/metrics", timeout=_PATIENCE) as response:
                if response.status == 200:
                    return await _read(response)
                if 400 <= response.status < 500 or response.status == 501:
                    self._missing_until_s = self._clock() + MISSING_S
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError
            pass
        return None

    async def slots(self) -> Slots | None:
        """Return the slots of a llama.cpp; None of anything else."""
        try:
            async with self._session.get(self._url + "/props", timeout=_PATIENCE) as response:
                return _slots(await response.json(content_type=None))
        except (aiohttp.ClientError, OSError, ValueError):
            return None


async def _read(response: aiohttp.ClientResponse) -> Reading | None:
    page = bytearray()
    async for block in response.content.iter_any():
        page += block
        if len(page) > MOST_BYTES:
            return None
    text = page.decode("utf-8", "replace")
    if len(page) <= INLINE_BYTES:
        return read_metrics(text)
    return await asyncio.to_thread(read_metrics, text)


def _slots(props: Any) -> Slots | None:
    seats = props.get("total_slots") if isinstance(props, dict) else None
    if not isinstance(seats, int) or seats < 1:
        return None
    settings = props.get("default_generation_settings")
    params = settings.get("params") if isinstance(settings, dict) else None
    kinds = params.get("speculative.types") if isinstance(params, dict) else None
    return Slots(seats, isinstance(kinds, str) and kinds not in {"", "none"})
