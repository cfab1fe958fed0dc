"""The scaling advice of gateways, read from their metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from draftgate.addresses import mask_url
from draftgate.gateway.telemetry.metric_definitions import DESIRED_WORKERS

READ_S: Final = 10.0
"""Interval of reading the advice. The advice itself reacts to a burst within about 30 s."""

_TIMEOUT_S: Final = 5.0
"""Timeout of reading the metrics of a gateway."""

STALE_S: Final = 300.0
"""Seconds for which the last advice of a gateway that does not respond counts, so that a restart of
the busiest gateway stops no workers. (Chosen, not tuned, 2026-11-23.)"""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The fewest and the most workers of a pool."""

    fewest: int
    most: int

    def clamp(self, workers: int) -> int:
        """Return the number within the limits that is closest to a number of workers."""
        return min(max(workers, self.fewest), self.most)


class GatewayAdvice:
    """Reads how many workers the gateways of a pool advise."""

    def __init__(
        self,
        urls: Sequence[str],
        pool: str,
        key: str | None,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing yet.

        Args:
            urls: addresses of the gateways.
            key: an API key that may read metrics, or None.
            show: a function that prints a line about a gateway that does not respond.
            clock: a clock in seconds.
        """
        self._urls = urls
        self._pool = pool
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._show = show
        self._clock = clock
        self._latest: dict[str, tuple[float, int]] = {}  # time and advice, by address
        self._silent = set[str]()

    async def read(self) -> int | None:
        """Return the largest advice, or None while no gateway has one."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http:
            for url in self._urls:
                await self._read_one(http, url)
        now_s = self._clock()
        return max(
            (advised for at_s, advised in self._latest.values() if now_s - at_s < STALE_S),
            default=None,
        )

    async def _read_one(self, http: aiohttp.ClientSession, url: str) -> None:
        try:
            async with http.get(f"{url}/metrics", raise_for_status=True) as response:
                found = list(advised_workers(await response.text(), self._pool))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if url not in self._silent:
                self._silent.add(url)
                reason = str(error) or type(error).__name__
                self._show(f"cannot read the scaling advice of {mask_url(url)}: {reason}")
            return
        self._silent.discard(url)
        if found:
            self._latest[url] = self._clock(), max(found)


def advised_workers(page: str, pool: str) -> Iterator[int]:
    """Yield each advice for a pool on a page of metrics.

    Raises:
        ValueError: the page is not in Prometheus' text format.
    """
    for family in text_string_to_metric_families(page):
        if family.name == DESIRED_WORKERS.name:
            for sample in family.samples:
                if sample.labels.get("pool") == pool:
                    yield int(sample.value)
