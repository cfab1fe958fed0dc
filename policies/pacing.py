"""Back-pressure: how a worker treats a request whose reader falls behind.

The unread output is counted in seconds, as the time in which the reader would take it,

    drain = (bytes unsent + waiting tokens x bytes of a token) / bytes that it reads per second,

so fast readers far away may have much in flight, and slow ones little. A request gives way only if
its backlog is large and its reader takes less than is generated. Memory has a bound of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from draftgate.policies.types import Pace

UNTOUCHED_BYTES: Final = 16 * 1024
"""Backlog that is always allowed: a hundred chunks of 160 bytes, less than the initial send buffer
of a Linux socket (tcp_wmem: 16 KB)."""

SPARING_S: Final = 2.0
"""Backlog in seconds from which a request gives way to those that are read at once: a few round
trips of a bad mobile network, with a retransmission. (Chosen.)"""

PAUSED_S: Final = 8.0
"""Backlog, or time without any progress, from which a request is paused: more output would only
fill memory. (Chosen.)"""

PAUSED_BYTES: Final = 256 * 1024
"""Unread bytes that pause any request: 2,000 of them hold half a gigabyte. (Chosen.)"""

RESUME_SHARE: Final = 0.25
"""A pace ends once the backlog is below this share of what led to it: with 1, a reader at the edge
would change its pace with every chunk. (Chosen.)"""


@dataclass(frozen=True, slots=True)
class ReaderView:
    """What is known about the reader of a stream.

    Attributes:
        unsent_bytes: bytes in the application's buffer and in the kernel's send queue.
        stall_s: seconds since any of them moved; 0 if nothing waits.
        waiting_tokens: generated tokens that are not among these bytes yet.
        read_bytes_s: bytes per second that the reader took, over the last seconds.
        made_bytes_s: bytes per second that were generated, over the same time.
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
        """Seconds in which the reader would take them at its recent rate."""
        if self.unread_bytes <= 0:
            return 0.0
        return self.unread_bytes / self.read_bytes_s if self.read_bytes_s > 0 else math.inf


def pace(reader: ReaderView, previous: Pace) -> Pace:
    """Return the pace of a request, given its previous one.

    It changes by one step at a time: a request is never paused that was not sparing before.
    """
    fallen, risen = _pace_at(reader, 1.0), _pace_at(reader, RESUME_SHARE)
    too_much = reader.unread_bytes > PAUSED_BYTES
    if fallen > previous and (too_much or reader.read_bytes_s < reader.made_bytes_s):
        return Pace(previous + 1)
    return Pace(previous - 1) if risen < previous else previous


def _pace_at(reader: ReaderView, share: float) -> Pace:
    """Return the pace to which a backlog leads at a share of the thresholds."""
    if reader.unread_bytes <= UNTOUCHED_BYTES:
        return Pace.FULL
    if reader.unread_bytes > share * PAUSED_BYTES or reader.stall_s > PAUSED_S:
        return Pace.PAUSED
    if reader.drain_s > share * PAUSED_S:
        return Pace.PAUSED
    return Pace.SPARING if reader.drain_s > share * SPARING_S else Pace.FULL
