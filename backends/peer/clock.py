"""Another machine's monotonic clock, read from here. Values in, values out."""

from __future__ import annotations

import math
from typing import Final

from draftgate.backends.types import Phases

DRIFT: Final = 1e-3
"""Seconds in a second by which two clocks may part: ten times what quartz and NTP's slewing at its
usual rates do, and still only 0.1 ms in the 0.1 s between two reports."""


class RemoteClock:
    """Moves instants of a peer to this machine's clock.

    Each report says when it was sent. The difference to its arrival is that of the clocks and the
    way here, so the least one is the best known; an older one counts less, as clocks drift. Moved
    instants are late by the quickest way here, so no request begins before it was sent; and none
    comes to lie behind the arrival of the report that tells of it.
    """

    def __init__(self) -> None:
        """Begin with nothing heard."""
        self._offset_s = math.inf
        self._heard_s = 0.0

    def heard(self, sent_s: float, now_s: float) -> None:
        """Note a report: sent at an instant of theirs, and heard now."""
        drifted_s = self._offset_s + DRIFT * (now_s - self._heard_s)
        self._offset_s = min(now_s - sent_s, drifted_s)
        self._heard_s = now_s

    def ours_s(self, theirs_s: float) -> float:
        """Return an instant of theirs by this machine's clock; something was heard before."""
        return theirs_s + self._offset_s

    def ours(self, phases: Phases) -> Phases:
        """Return a choice's phases by this machine's clock."""
        return phases._replace(
            queued_s=self.ours_s(phases.queued_s),
            scheduled_s=self.ours_s(phases.scheduled_s),
            chunks=tuple((self.ours_s(end_s), tokens) for end_s, tokens in phases.chunks),
            first_token_s=self.ours_s(phases.first_token_s),
        )
