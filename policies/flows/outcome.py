"""The outcome of a flow."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from draftgate.policies.flows.types import HopRecord


class FlowOutcome(StrEnum):
    """The way a flow ended, in metrics."""

    MET = "met"
    """Its last response ended by the deadline."""
    MISSED = "missed"
    """A response ended after the deadline, or the last request has no end."""
    REFUSED = "refused"
    """Its first request was refused, so the flow has not begun."""


def judge_flow(hops: Sequence[HopRecord], deadline_s: float) -> FlowOutcome:
    """Return whether an admitted flow met its deadline.

    A hop without an end failed, was refused or still runs. The client has coped with it if a later
    hop arrived.

    Args:
        hops: its hops in the order of their arrival, at least one.
        deadline_s: deadline after the begin of the flow.
    """
    in_time = all(hop.ended_s is None or hop.ended_s <= deadline_s for hop in hops)
    met = in_time and hops[-1].ended_s is not None
    return FlowOutcome.MET if met else FlowOutcome.MISSED
