"""The requests that were given up because they may break workers, so that their retries are known.

Clients repeat a request that has failed. Without a memory, each retry would start without losses,
and could take the last worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

REMEMBERED_S: Final = 60.0
"""Time for which a suspect is remembered, because clients retry within a minute. A longer time
would refuse equal requests of other clients for longer. (Chosen, not tuned, 2026-11-27.)"""

MOST_SUSPECTS: Final = 1024
"""Maximum number of remembered suspects."""


class Suspects:
    """The fingerprints of suspects (`Job.fingerprint`), for use on the event loop's thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Start empty.

        Args:
            now_s: a monotonic clock, in seconds.
        """
        self._now_s = now_s
        self._until_s: OrderedDict[int, float] = OrderedDict()  # by fingerprint, oldest first

    def __contains__(self, fingerprint: int) -> bool:
        until_s = self._until_s.get(fingerprint)
        return until_s is not None and until_s > self._now_s()

    def add(self, fingerprint: int) -> None:
        """Remember a request, unless its fingerprint is unknown (0)."""
        if not fingerprint:
            return
        self._until_s[fingerprint] = self._now_s() + REMEMBERED_S
        self._until_s.move_to_end(fingerprint)
        while len(self._until_s) > MOST_SUSPECTS:
            self._until_s.popitem(last=False)
