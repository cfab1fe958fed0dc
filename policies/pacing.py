"""Back-pressure: the pace of a request and of its chunks, by the path to its client.

The backlog is the unread output in seconds, the time in which the client would take it:

    drain = (unread bytes + waiting tokens x bytes per token) / bytes that it takes per second

So fast clients on long connections may have much output in flight, and slow clients little. A
request slows down only if its backlog is large and its client takes less than the worker generates.
Memory has a separate bound.

With TCP statistics, the round trip that any output takes does not count as backlog. So a path that
falls behind becomes known in a few round trips. Without TCP statistics (behind a proxy, or on
systems other than Linux), the thresholds are larger.

On a slow path, tokens are first coalesced, because most bytes of a chunk with one token are its
frame. A path of r bytes per second, with a frame of f bytes every h seconds and t bytes of text per
token, carries

    tokens per second = max((r - f / h) / t, r / (f + t))

If that is less than the worker generates, the request decodes at this rate, and leaves its draft
slots and the time of the steps to others. The rate is divided by clamp(backlog / target, 1/2, 2),
where the target is half the backlog of a slow path. So a small backlog stays, which keeps the path
busy and its rate measurable.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from draftgate.policies.types import Pace
from draftgate.policies.values import immutable, replace

UNTOUCHED_BYTES: Final = 16 * 1024
"""Backlog in bytes that is always allowed without TCP statistics. A hundred chunks of 160 bytes are
less than the initial send buffer of a Linux socket (tcp_wmem: 16 KB)."""

UNTOUCHED_TCP_BYTES: Final = 2 * 1024
"""Backlog in bytes that is always allowed with TCP statistics: about ten chunks, as many as the
initial window of a connection has packets (RFC 6928)."""

SPARING_S: Final = 2.0
"""Backlog in seconds from which a request runs after all others. A few round trips of a bad mobile
network with a retransmission take less. (Chosen, not tuned.)"""

SPARING_TCP_S: Final = 0.5
"""The same with TCP statistics, in addition to a round trip. Retransmissions of a healthy path
usually take less. (Chosen, not tuned, 2026-11-27.)"""

PAUSED_S: Final = 8.0
"""Backlog in seconds, or time without progress, from which a request is paused, because more output
would only fill memory. (Chosen, not tuned.)"""

STALLED_TCP_S: Final = 1.0
STALLED_TCP_RTTS: Final = 4.0
"""Time without progress, in seconds and in addition in round trips, from which a request is paused
with TCP statistics. It is longer than the first two timeouts of a lost packet, which
are at least 0.2 s and 0.4 s. (Chosen by that reasoning, not tuned, 2026-11-27.)"""

PAUSED_BYTES: Final = 256 * 1024
"""Unread bytes that pause any request. 2,000 such requests hold half a gigabyte. (Chosen, not
tuned.)"""

RESUME_SHARE: Final = 0.25
"""Share of a threshold below which its pace ends. With 1, a reader near a threshold would change
its pace with every chunk. (Chosen, not tuned.)"""

CHUNK_BYTES: Final = 230
"""Approximate size of a chunk with one token. All but a few bytes are its frame."""

CHECK_INTERVAL_S: Final = 0.25
"""Shortest time between two checks, in which a worker generates a few dozen tokens."""

BUSY_SHARE: Final = 0.9
"""Share of an interval with data under way, below which everything has arrived meanwhile, so the
path has not held anything back."""

_LEAST_TEXT_BYTES: Final = 4.0
"""Bytes of a token's text, at least. English text has about four per token."""

LONG_RTT_S: Final = 0.1
LONG_SHARE: Final = 0.05
"""Round trip from which tokens are coalesced even on a healthy path, and the share of a round trip
for which they are. Tokens of 20 ms are never held at a round trip of 400 ms. (Chosen, not tuned,
2026-11-27.)"""

FRAME_SHARE: Final = 0.5
"""Share of a slow path that frames of chunks may take. (Chosen, not tuned, 2026-11-27.)"""

LONGEST_HOLD_S: Final = 0.5
"""Longest time for which tokens are coalesced. Text that appears twice a second still reads as a
stream. (Chosen, not tuned, 2026-11-27.)"""

PROBE_PER_S: Final = 1.1
"""Growth per second of the assumed rate of a path without a backlog, which may have become faster.
A path that carries a quarter is tried at full rate every 15 s. (Chosen, not tuned, 2026-11-27.)"""

LONGEST_TPOT_S: Final = 2.0
"""Longest time between the tokens of a sparing request, as long as that between its turns
(`backends.core.queues.SPARING_STEPS`)."""


class PathState(StrEnum):
    """What is known about the path to a client."""

    HEALTHY = "healthy"
    """The path carries all tokens."""
    LONG = "long"
    """The path carries all tokens, and its round trip is long."""
    SLOW = "slow"
    """The path carries less than the worker generates."""
    STALLED = "stalled"
    """Nothing has passed for a while."""
    HIDDEN = "hidden"
    """The request came through a proxy, and only the path to the proxy is visible."""
    UNKNOWN = "unknown"
    """The system has no TCP statistics for the connection."""


@immutable
class ReaderView:
    """The state of a stream's reader.

    Attributes:
        unsent_bytes: bytes in the application's buffer and in the kernel's send queue, including
            bytes under way.
        stall_s: seconds since any of these bytes moved, or 0 if none are waiting.
        waiting_tokens: generated tokens that are not among these bytes yet.
        read_bytes_s: bytes per second that the reader took since the last check.
        made_bytes_s: bytes per second that the worker generated during the same time.
        token_bytes: mean bytes of a token on the wire.
        chunk_tokens: mean tokens of a chunk.
        before_bytes: `unsent_bytes` at the last check.
        hold_s: seconds for which tokens are coalesced at present.
        interval_s: seconds since the last check.
        full_tps: tokens per second that the worker would generate at full pace, or 0 if unknown.
        stated_tps: tokens per second that the client says it can take, or None.
        hidden: whether the request came through a proxy.
        rtt_s: shortest round trip of the connection, or None without TCP statistics.
        busy_share: share of the interval in which data was under way.
        sndbuf_share: share of it in which the send buffer of this node was the limit.
        rwnd_share: share of it in which the receive window of the client was the limit.
        retransmits: segments that were sent again in the interval.
    """

    unsent_bytes: int
    stall_s: float = 0.0
    waiting_tokens: int = 0
    read_bytes_s: float = 0.0
    made_bytes_s: float = 0.0
    token_bytes: float = 200.0
    chunk_tokens: float = 1.0
    before_bytes: int = 0
    hold_s: float = 0.0
    interval_s: float = 0.25
    full_tps: float = 0.0
    stated_tps: float | None = None
    hidden: bool = False
    rtt_s: float | None = None
    busy_share: float = 1.0
    sndbuf_share: float = 0.0
    rwnd_share: float = 0.0
    retransmits: int = 0

    @property
    def unread_bytes(self) -> float:
        """All bytes that the reader has not taken."""
        return self.unsent_bytes + self.waiting_tokens * self.token_bytes

    @property
    def drain_s(self) -> float:
        """The backlog: seconds in which the reader would take these bytes, more than usual."""
        return self._beyond_usual_s(self.unread_bytes)

    def _beyond_usual_s(self, count_bytes: float) -> float:
        """Return the seconds in which the reader would take these bytes, more than usual.

        Any output takes a round trip, and tokens wait while they are coalesced.
        """
        if count_bytes <= 0:
            return 0.0
        if self.read_bytes_s <= 0:
            return math.inf
        return max(count_bytes / self.read_bytes_s - (self.rtt_s or 0.0) - self.hold_s, 0.0)

    @property
    def sparing_s(self) -> float:
        """Backlog in seconds from which the reader is slow."""
        return SPARING_S if self.rtt_s is None else SPARING_TCP_S + self.rtt_s

    @property
    def stalled(self) -> bool:
        """Whether nothing has moved for so long that the request is paused."""
        if self.rtt_s is None:
            return self.stall_s > PAUSED_S
        return self.stall_s > STALLED_TCP_S + STALLED_TCP_RTTS * self.rtt_s

    @property
    def full_bytes_s(self) -> float:
        """Bytes per second of all tokens without coalescing, or 0 if unknown."""
        return self.full_tps * (CHUNK_BYTES + self.text_bytes)

    @property
    def text_bytes(self) -> float:
        """Bytes of a token without the frame of its chunk."""
        return max(self.token_bytes - CHUNK_BYTES / self.chunk_tokens, _LEAST_TEXT_BYTES)

    @property
    def is_held_back(self) -> bool:
        """Whether the path or the client may have held output back during the whole interval."""
        return self.busy_share >= BUSY_SHARE and self.sndbuf_share < 0.5

    @property
    def is_late(self) -> bool:
        """Whether the backlog is large because the reader takes too little."""
        return _falls_behind(self, _pace_at(self, 1.0))

    @property
    def keeps_path_busy(self) -> bool:
        """Whether bytes were under way all the time, so that the reader's rate is the path's."""
        least_bytes = min(self.before_bytes, self.unsent_bytes)
        return self._beyond_usual_s(least_bytes) > RESUME_SHARE * self.sparing_s


@immutable
class Pacing:
    """How a request runs and how its tokens are sent, after a check of its reader.

    Attributes:
        pace: pace of its sequences.
        tpot_s: seconds between two tokens that a sparing request should have, or 0 if it may have
            as many as others leave.
        hold_s: seconds after a write for which tokens are coalesced.
        path_bytes_s: bytes per second that a slow path carries, or None for any other path.
        state: what is known about the path.
        suspected: whether the last check, but not the one before, found the reader late.
    """

    pace: Pace = Pace.FULL
    tpot_s: float = 0.0
    hold_s: float = 0.0
    path_bytes_s: float | None = None
    state: PathState = PathState.HEALTHY
    suspected: bool = False


def next_pacing(reader: ReaderView, previous: Pacing) -> Pacing:
    """Return how a request continues after a check of its reader."""
    late = reader.is_late
    if late and not (previous.suspected or previous.pace or previous.path_bytes_s):
        # One retransmission may be the reason.
        return replace(previous, hold_s=hold_s(reader.rtt_s, None), suspected=True)
    path_bytes_s = _path_bytes_s(reader, previous, late=late)
    held_s = hold_s(reader.rtt_s, path_bytes_s)
    tpot_s = _tpot_s(reader, path_bytes_s, held_s)
    chosen = pace(reader, previous.pace)
    if tpot_s and chosen is Pace.FULL:
        chosen = Pace.SPARING
    state = _state(reader, path_bytes_s)
    return Pacing(chosen, tpot_s if chosen is Pace.SPARING else 0.0, held_s, path_bytes_s, state)


def check_interval_s(rtt_s: float | None, held_s: float) -> float:
    """Return the seconds between two checks of a reader, so that output moves in each interval.

    Args:
        rtt_s: shortest round trip of the connection, or None if unknown.
        held_s: seconds for which tokens are coalesced.
    """
    return max(CHECK_INTERVAL_S, 2.0 * (rtt_s or 0.0), 2.0 * held_s)


def hold_s(rtt_s: float | None, path_bytes_s: float | None) -> float:
    """Return the seconds after a write for which tokens are coalesced, 0 on most paths.

    Args:
        rtt_s: shortest round trip of the connection, or None if unknown.
        path_bytes_s: bytes per second that a slow path carries, or None for any other path.
    """
    long_s = LONG_SHARE * rtt_s if rtt_s is not None and rtt_s >= LONG_RTT_S else 0.0
    slow_s = 0.0 if path_bytes_s is None else CHUNK_BYTES / (FRAME_SHARE * max(path_bytes_s, 1.0))
    return min(max(long_s, slow_s), LONGEST_HOLD_S)


def pace(reader: ReaderView, previous: Pace) -> Pace:
    """Return the pace that the backlog of a request allows, given its previous pace.

    The pace changes by one step per call, so a request is sparing before it is paused.
    """
    fallen, risen = _pace_at(reader, 1.0), _pace_at(reader, RESUME_SHARE)
    if fallen > previous and _falls_behind(reader, fallen):
        return Pace(previous + 1)
    return Pace(previous - 1) if risen < previous else previous


def _falls_behind(reader: ReaderView, backlog_pace: Pace) -> bool:
    """Return whether a backlog counts: it is too large, or the reader takes too little."""
    if backlog_pace is Pace.FULL:
        return False
    takes_less = reader.read_bytes_s < reader.made_bytes_s
    takes_nothing = reader.stalled and not reader.read_bytes_s
    held_back = reader.is_held_back and (takes_less or takes_nothing)
    return held_back or reader.unread_bytes > PAUSED_BYTES


def _pace_at(reader: ReaderView, share: float) -> Pace:
    """Return the pace of a backlog at a share of the thresholds."""
    untouched_bytes = UNTOUCHED_BYTES if reader.rtt_s is None else UNTOUCHED_TCP_BYTES
    if reader.unread_bytes <= untouched_bytes:
        return Pace.FULL
    if reader.unread_bytes > share * PAUSED_BYTES or reader.stalled:
        return Pace.PAUSED
    if reader.drain_s > share * PAUSED_S:
        return Pace.PAUSED
    return Pace.SPARING if reader.drain_s > share * reader.sparing_s else Pace.FULL


def _path_bytes_s(reader: ReaderView, previous: Pacing, *, late: bool) -> float | None:
    """Return the rate of a slow path, or None for any other path."""
    known = previous.path_bytes_s
    if late:
        return reader.read_bytes_s or known or 1.0
    if known is None:
        return None
    if reader.keeps_path_busy:
        found = reader.read_bytes_s or known
    else:
        found = max(known * PROBE_PER_S**reader.interval_s, reader.read_bytes_s)
    return None if found >= (reader.full_bytes_s or 2 * reader.made_bytes_s) else found


def _tpot_s(reader: ReaderView, path_bytes_s: float | None, held_s: float) -> float:
    """Return the TPOT that the client can take, or 0 if it can take all tokens."""
    rates = [] if reader.stated_tps is None else [reader.stated_tps]
    if path_bytes_s is not None:
        gain = min(max(2.0 * reader.drain_s / reader.sparing_s, 0.5), 2.0)
        rates.append(_carried_tps(reader.text_bytes, path_bytes_s, held_s) / gain)
    if not rates or (reader.full_tps and min(rates) >= reader.full_tps):
        return 0.0
    return 1.0 / max(min(rates), 1.0 / LONGEST_TPOT_S)  # a rate may be 0


def _carried_tps(text_bytes: float, path_bytes_s: float, held_s: float) -> float:
    """Return the tokens per second that a slow path carries in coalesced chunks."""
    coalesced = (path_bytes_s - CHUNK_BYTES / held_s) / text_bytes
    return max(coalesced, path_bytes_s / (CHUNK_BYTES + text_bytes))


def _state(reader: ReaderView, path_bytes_s: float | None) -> PathState:
    if reader.stalled and reader.unread_bytes:
        return PathState.STALLED
    if path_bytes_s is not None:
        return PathState.SLOW
    if reader.hidden:
        return PathState.HIDDEN
    if reader.rtt_s is None:
        return PathState.UNKNOWN
    return PathState.LONG if reader.rtt_s >= LONG_RTT_S else PathState.HEALTHY


def path_reason(reader: ReaderView, pacing: Pacing) -> str:
    """Return what is known about the path to a client and how its request runs for that reason.

    The result is empty for a path that changes nothing.
    """
    parts = []
    if reader.stated_tps is not None:
        parts.append(f"the client takes at most {reader.stated_tps:.3g} tokens/s, as it states")
    if reader.hidden:
        parts.append("a proxy hides the path to the client")
    if pacing.state is PathState.STALLED:
        parts.append(f"nothing has reached the client for {reader.stall_s:.1f} s")
    elif pacing.path_bytes_s is not None:
        parts.append(_slow_path(reader, pacing.path_bytes_s))
    elif pacing.state is PathState.LONG and reader.rtt_s is not None:
        parts.append(f"the round trip to the client takes {reader.rtt_s * 1e3:.0f} ms")
    effects = _effects(pacing)
    return ", ".join(parts) + (f": {effects}" if parts and effects else "")


def _slow_path(reader: ReaderView, path_bytes_s: float) -> str:
    """Return what a slow path carries, and what limits it as far as it is known."""
    found = f"the path to the client carries {path_bytes_s / 1e3:.3g} kB/s"
    if reader.full_bytes_s:
        found += f" of {reader.full_bytes_s / 1e3:.3g} kB/s"
    details = []
    if reader.rtt_s is not None:
        details.append(f"round trip {reader.rtt_s * 1e3:.3g} ms")
    if reader.retransmits:
        details.append(f"{reader.retransmits} retransmissions")
    if reader.rwnd_share >= 0.5:
        details.append("the client reads slowly")
    return f"{found} ({', '.join(details)})" if details else found


def _effects(pacing: Pacing) -> str:
    effects = []
    if pacing.hold_s:
        effects.append(f"tokens are coalesced for {pacing.hold_s * 1e3:.0f} ms")
    if pacing.pace is Pace.PAUSED:
        effects.append("paused")
    elif pacing.tpot_s:
        effects.append(f"a token every {pacing.tpot_s * 1e3:.3g} ms without drafts")
    elif pacing.pace is Pace.SPARING:
        effects.append("after all others without drafts")
    return ", ".join(effects)
