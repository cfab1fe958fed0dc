"""Conversion of another machine's monotonic clock to this machine's. Pure computation."""

from __future__ import annotations

import math
from typing import Final

from draftgate.backends.types import Phases

DRIFT: Final = 1e-3
"""Bound on the relative drift of two clocks: ten times that of quartz and of NTP at its usual slew
rate, and only 0.1 ms in the 0.1 s between two reports."""


class RemoteClock:
    """Converts times of a peer to this machine's clock.

    Each report has its time of sending. Its age on arrival is the offset of the clocks plus the
    transfer time, so the smallest one is the best estimate of the offset; older ones count less,
    since clocks drift. Converted times are late by the fastest transfer. Therefore no request
    begins before it was sent, and no event is later than the arrival of its report.
    """

    def __init__(self) -> None:
        """Start without reports."""
        self._offset_s = math.inf
        self._heard_s = 0.0

    def heard(self, sent_s: float, now_s: float) -> None:
        """Note a report.

        Args:
            sent_s: when it was sent, by the peer's clock.
            now_s: when it arrived, by this machine's clock.
        """
        drifted_s = self._offset_s + DRIFT * (now_s - self._heard_s)
        self._offset_s = min(now_s - sent_s, drifted_s)
        self._heard_s = now_s

    def ours_s(self, theirs_s: float) -> float:
        """Convert a time of the peer. Valid after the first report."""
        return theirs_s + self._offset_s

    def ours(self, phases: Phases) -> Phases:
        """Convert the times of a choice's phases."""
        return phases._replace(
            queued_s=self.ours_s(phases.queued_s),
            scheduled_s=self.ours_s(phases.scheduled_s),
            chunks=tuple((self.ours_s(end_s), tokens) for end_s, tokens in phases.chunks),
            first_token_s=self.ours_s(phases.first_token_s),
        )
