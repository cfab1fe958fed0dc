"""The ways in which a request ends."""

from __future__ import annotations

from enum import StrEnum

from draftgate.policies.types import ServiceLevel


class Ending(StrEnum):
    """The way a request ended, in metrics and logs."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"

    def meets(
        self, service: ServiceLevel, ttft_s: float | None, tpot_s: float | None
    ) -> bool | None:
        """Return whether a request met its targets, or None if it does not count."""
        if self is FAILED:
            return False if service.has_targets else None
        if self is FINISHED:
            return service.are_met(ttft_s, tpot_s)
        return None


# A name of the module is found in a tenth of the time of a member of an enum.
FINISHED, CANCELLED, REJECTED, FAILED = Ending
