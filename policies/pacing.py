"""How far a worker goes on for a reader that falls behind.

What a reader has not taken is counted in seconds, as long as it would take it at its own rate,

    drain = (bytes unsent + tokens waiting x bytes of a token) / bytes that it read a second,

so fast readers far away may have much in flight, and slow ones little. A reader gives way only if
its backlog is large, and it reads less than is made for it; memory has a bound of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from draftgate.policies.types import Pace

UNTOUCHED_BYTES: Final = 16 * 1024
"""A backlog up to this size is nobody's fault: a hundred chunks of 160 bytes, less than the send
buffer that Linux gives to any socket at first (tcp_wmem: 16 KB)."""

SPARING_S: Final = 2.0
"""Who is behind by so many seconds gives way: others read at once what is generated for them. A few
round trips of a bad mobile network, with a retransmission. (Chosen.)"""

PAUSED_S: Final = 8.0
"""Who is behind by so many, or stands still for as long, is paused: more would only fill memory.
(Chosen.)"""

PAUSED_BYTES: Final = 256 * 1024
"""So much unread pauses any reader: 2,000 of them hold half a gigabyte. (Chosen.)"""

RESUME_SHARE: Final = 0.25
"""A pace is left again once the backlog is below this share of what led to it: with 1, a reader at
the edge would change its pace with every chunk. (Chosen.)"""


@dataclass(frozen=True, slots=True)
class ReaderView:
    """What is known of a stream's reader.

    Attributes:
        unsent_bytes: that wait in the application's buffer and in the kernel's send queue.
        stall_s: seconds since any of them moved; 0 if nothing waits.
        waiting_tokens: tokens that were generated and are not among these bytes yet.
        read_bytes_s: bytes a second that the reader took, over the last seconds.
        made_bytes_s: bytes a second that were generated for it, over the same.
        token_bytes: bytes of a token on the wire, on average.
    """

    unsent_bytes: int
    stall_s: float = 0.0
    waiting_tokens: int = 0
    read_bytes_s: float = 0.0
    made_bytes_s: float = 0.0
    token_bytes: float = 200.0

    @property
    def unread_bytes(self) -> float:
        """All that it has not taken."""
        return self.unsent_bytes + self.waiting_tokens * self.token_bytes

    @property
    def drain_s(self) -> float:
        """Seconds until it has taken all of it, at the rate at which it read lately."""
        if self.unread_bytes <= 0:
            return 0.0
        return self.unread_bytes / self.read_bytes_s if self.read_bytes_s > 0 else math.inf


def pace(reader: ReaderView, previous: Pace) -> Pace:
    """Return how far to go on for a reader, given how far one went until now.

    One step at a time, both ways: nobody is paused who was not sparing before.
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
