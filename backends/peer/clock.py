"""Conversion of another machine's monotonic clock to this machine's clock, without I/O."""

from __future__ import annotations

import math
from typing import Final

from draftgate.backends.types import Phases

DRIFT: Final = 1e-3
"""Maximum relative drift of two clocks. It is ten times that of quartz and of NTP at its usual slew
rate, and only 0.1 ms in the 0.1 s between two reports."""


class RemoteClock:
    """Converts times of a peer to this machine's clock.

    Each report contains the time at which it was sent. Its age on arrival is the offset of the
    clocks plus the transfer time. So the smallest age is the best estimate of the offset. Older
    ages count less, because clocks drift. Converted times are late by the fastest transfer.
    Therefore no request begins before it was sent, and no event is later than the arrival of its
    report.
    """

    def __init__(self) -> None:
        self._offset_s = math.inf
        self._heard_s = 0.0

    def add_report(self, sent_s: float, now_s: float) -> None:
        """Record a report.

        Args:
            sent_s: time of sending, by the peer's clock in seconds.
            now_s: time of arrival, by this machine's clock in seconds.
        """
        drifted_s = self._offset_s + DRIFT * (now_s - self._heard_s)
        self._offset_s = min(now_s - sent_s, drifted_s)
        self._heard_s = now_s

    def to_local_s(self, peer_s: float) -> float:
        """Return a peer's time on this machine's clock, if a report has arrived."""
        return peer_s + self._offset_s

    def to_local_phases(self, phases: Phases) -> Phases:
        """Return the phases of a choice on this machine's clock."""
        return phases._replace(
            queued_s=self.to_local_s(phases.queued_s),
            scheduled_s=self.to_local_s(phases.scheduled_s),
            chunks=tuple((self.to_local_s(end_s), tokens) for end_s, tokens in phases.chunks),
            first_token_s=self.to_local_s(phases.first_token_s),
        )
