"""Asking an upstream for its metrics, now and then, in bounded time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from draftgate.backends.openai.metrics.dialects import read_metrics
from draftgate.backends.openai.metrics.reading import Reading

POLL_S: Final = 1.5
"""Between readings. A request to an engine takes seconds, and what this gateway sends itself it
counts at once: only what others send is as old as that. SGLang brings its page up to date every 40
steps, which is about as often. And llama.cpp's server finds that the client of a whole answer has
left only behind a second in which it had no result for anybody, a page included: asked every 0.1 or
0.5 s it computed 16,000 tokens for nobody, asked every 1.5 s it stopped (b1-0c1e570, Zen 5,
2026-11-22)."""

PATIENCE_S: Final = 2.0
"""For a page. What came later would be no news."""

MISSING_S: Final = 60.0
"""Before a page is asked for again that was not there, or slots that are known: somebody may have
restarted the engine with other settings."""

MOST_BYTES: Final = 4 << 20
"""Of a page: ten times those of a vLLM with eight engines."""

INLINE_BYTES: Final = 512 << 10
"""Larger pages are read in a thread: 344 kB in 3,457 lines, like those of a vLLM with eight
engines, take 1.4 ms (Zen 5, 2026-11-22), and the event loop may be held for 5."""

_PATIENCE: Final = aiohttp.ClientTimeout(total=PATIENCE_S)


class MetricsPoller:
    """Asks one upstream. Never raises: who has no news says None."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, clock: Callable[[], float]
    ) -> None:
        """Know where to ask."""
        self._session = session
        self._url = url
        self._clock = clock
        self._missing_until_s = self._slots_until_s = 0.0

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

    async def slots(self) -> int | None:
        """Return how many slots a llama.cpp has; None where it is known, or does not say.

        Its server tells at `/props`, with or without metrics. Whether it speculates does not stand
        there: `speculative.types` is `none` also where it does.
        """
        if self._clock() < self._slots_until_s:
            return None
        self._slots_until_s = self._clock() + MISSING_S
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


def _slots(props: Any) -> int | None:
    seats = props.get("total_slots") if isinstance(props, dict) else None
    return seats if isinstance(seats, int) and seats > 0 else None
