"""How far a worker goes on for a reader that falls behind."""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import Pace


@dataclass(frozen=True, slots=True)
class ReaderView:
    """What is known of a stream's reader.

    Attributes:
        unsent_bytes: that wait in the application's buffer and in the kernel's send queue.
        stall_s: seconds since the oldest of them should have moved; 0 if nothing waits.
        waiting_tokens: tokens that were generated and are not on their way yet.
        read_bytes_s: bytes a second that the reader took lately.
        made_bytes_s: bytes a second that were generated lately.
    """

    unsent_bytes: int
    stall_s: float = 0.0
    waiting_tokens: int = 0
    read_bytes_s: float = 0.0
    made_bytes_s: float = 0.0


def pace(reader: ReaderView, previous: Pace) -> Pace:
    """Return how far to go on for a reader, given how far one went until now."""
    raise NotImplementedError
