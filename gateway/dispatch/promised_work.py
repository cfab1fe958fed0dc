"""The work of later hops that the flows of a gateway still expect.

These hops are not in the queue yet, and will overtake it, because the deadlines of their flows are
near. Without them, each flow would be admitted as if no other flow had further hops.
"""

from __future__ import annotations

from draftgate.gateway.state.expiries import Expiries
from draftgate.gateway.state.values import FlowKey


class PromisedWork:
    """The expected service time of the later hops of each flow, until it expires."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # by the text of the key
        self._expiries = Expiries()

    def put(self, key: FlowKey, seconds: float, until_s: float) -> None:
        """Set the work of a flow.

        Args:
            seconds: residence of its later hops.
            until_s: time at which they are no longer expected.
        """
        self._seconds[key.text] = seconds
        self._expiries.put(key.text, until_s)

    def shorten(self, key: FlowKey, until_s: float) -> None:
        """Expect the later hops of a known flow only until this time."""
        if key.text in self._seconds:
            self._expiries.put(key.text, until_s)

    def others_s(self, key: FlowKey, now_s: float) -> float:
        """Return the work of all flows but one, in seconds."""
        for text in self._expiries.pop_due(now_s):
            del self._seconds[text]
        return sum(self._seconds.values()) - self._seconds.get(key.text, 0.0)
