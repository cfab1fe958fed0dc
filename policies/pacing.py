"""Back-pressure: the pace of a request with a slow reader.

The backlog of unread output is measured in seconds, as the time that the reader would take:

    drain = (unsent bytes + waiting tokens x bytes per token) / bytes that it reads per second

So fast readers on long connections may have much output in flight, and slow readers little. A
request slows down only if its backlog is large and its reader takes less than the worker generates.
Memory has a separate bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from draftgate.policies.types import Pace

UNTOUCHED_BYTES: Final = 16 * 1024
"""Backlog in bytes that is always allowed. A hundred chunks of 160 bytes are less than the initial
send buffer of a Linux socket (tcp_wmem: 16 KB)."""

SPARING_S: Final = 2.0
"""Backlog in seconds from which a request runs after all others. A few round trips of a bad mobile
network with a retransmission take less. (Chosen, not tuned.)"""

PAUSED_S: Final = 8.0
"""Backlog in seconds, or time without progress, from which a request is paused, because more output
would only fill memory. (Chosen, not tuned.)"""

PAUSED_BYTES: Final = 256 * 1024
"""Unread bytes that pause any request. 2,000 such requests hold half a gigabyte. (Chosen, not
tuned.)"""

RESUME_SHARE: Final = 0.25
"""Share of a threshold below which its pace ends. With 1, a reader near a threshold would change
its pace with every chunk. (Chosen, not tuned.)"""


@dataclass(frozen=True, slots=True)
class ReaderView:
    """The state of a stream's reader.

    Attributes:
        unsent_bytes: bytes in the application's buffer and in the kernel's send queue.
        stall_s: seconds since any of these bytes moved, or 0 if none are waiting.
        waiting_tokens: generated tokens that are not among these bytes yet.
        read_bytes_s: bytes per second that the reader took during the last seconds.
        made_bytes_s: bytes per second that the worker generated during the same time.
        token_bytes: mean bytes of a token on the wire.
    """

    unsent_bytes: int
    stall_s: float = 0.0
    waiting_tokens: int = 0
    read_bytes_s: float = 0.0
    made_bytes_s: float = 0.0
    token_bytes: float = 200.0

    @property
    def unread_bytes(self) -> float:
        """All bytes that the reader has not taken."""
        return self.unsent_bytes + self.waiting_tokens * self.token_bytes

    @property
    def drain_s(self) -> float:
        """Seconds in which the reader would take these bytes at its recent rate."""
        if self.unread_bytes <= 0:
            return 0.0
        return self.unread_bytes / self.read_bytes_s if self.read_bytes_s > 0 else math.inf


def pace(reader: ReaderView, previous: Pace) -> Pace:
    """Return the pace of a request, given its previous pace.

    The pace changes by one step per call, so a request is sparing before it is paused.
    """
    fallen, risen = _pace_at(reader, 1.0), _pace_at(reader, RESUME_SHARE)
    too_much = reader.unread_bytes > PAUSED_BYTES
    if fallen > previous and (too_much or reader.read_bytes_s < reader.made_bytes_s):
        return Pace(previous + 1)
    return Pace(previous - 1) if risen < previous else previous


def _pace_at(reader: ReaderView, share: float) -> Pace:
    """Return the pace of a backlog at a share of the thresholds."""
    if reader.unread_bytes <= UNTOUCHED_BYTES:
        return Pace.FULL
    if reader.unread_bytes > share * PAUSED_BYTES or reader.stall_s > PAUSED_S:
        return Pace.PAUSED
    if reader.drain_s > share * PAUSED_S:
        return Pace.PAUSED
    return Pace.SPARING if reader.drain_s > share * SPARING_S else Pace.FULL
