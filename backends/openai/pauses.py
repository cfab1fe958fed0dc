"""When an upstream must be left alone: it does not answer, or it asked for a pause."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import aiohttp

from draftgate.backends.base import Rest
from draftgate.backends.openai.retry_after import retry_after_s
from draftgate.policies.resilience.breaker import Breaker, Patience

DEFAULT_REST_S: Final = 1.0
"""Pause of an upstream that refuses (429, 503) without saying for how long."""

PATIENCE: Final = Patience(failures=3, timeouts_span_s=5.0, first_pause_s=1.0, longest_pause_s=30.0)
"""With an upstream. One failure in a row may be a connection that it closed when idle; a restart of
an engine takes tens of seconds to minutes."""

_REFUSALS: Final = (429, 503)


class Pauses:
    """Of one upstream. Times are of one monotonic clock, in seconds.

    Attributes:
        breaker: is told of failures; open while the upstream is out.
    """

    def __init__(self, url: str) -> None:
        """Begin with none; `url` stands in reasons."""
        self.breaker = Breaker(PATIENCE)
        self._url = url
        self._rest = Rest(0.0, 503, "")
        self._until_s = 0.0

    def out(self, failure: str, now_s: float) -> Rest:
        """Return the time to the next probe of one that has failed."""
        remaining_s = max(self.breaker.remaining_s(now_s), DEFAULT_REST_S)
        return Rest(remaining_s, 503, f"{self._url}: {failure}")

    def asked_for(self, now_s: float) -> Rest | None:
        """Return what is left of the pause it asked for."""
        if now_s >= self._until_s:
            return None
        return self._rest._replace(remaining_s=self._until_s - now_s)

    def may_be_probed(self, now_s: float) -> bool:
        """Return whether it may be asked now whether it is there."""
        return self.breaker.remaining_s(now_s) <= 0 and now_s >= self._until_s

    def answered(self, response: aiohttp.ClientResponse, now_s: float) -> None:
        """Note an answer, which may ask for a pause."""
        if self.breaker.reason is None:
            self.breaker.succeeded()
        if response.status not in _REFUSALS:
            return
        asked_s = retry_after_s(response.headers.get("Retry-After"), datetime.now(UTC))
        until_s = now_s + (DEFAULT_REST_S if asked_s is None else asked_s)
        if until_s >= self._until_s:
            reason = f"{self._url} answered {response.status}"
            self._until_s, self._rest = until_s, Rest(0.0, response.status, reason)
