"""Clients of streams: how fast each one takes its output, and the pace of its sequences.

Unread output waits in the send queue of the socket, in the buffer of the connection, and as tokens
in the backend's stream. The backend merges its waiting tokens into one delta. The queue and the
buffer are small, and the gateway does not read the backend's stream while they are full, nor while
it coalesces tokens. The gateway checks each client regularly, mostly by the size of its queue, and
sets the pace of its sequences (`policies/pacing`).
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import socket
import termios
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from aiohttp.abc import AbstractStreamWriter

from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.http.direct import DirectResponse, Request, of_headers
from draftgate.gateway.http.requests.headers import read_stated
from draftgate.gateway.http.tcp_info import TcpInfo, tcp_info
from draftgate.gateway.logs import log
from draftgate.policies.pacing import (
    CHECK_INTERVAL_S,
    CHUNK_BYTES,
    UNTOUCHED_TCP_BYTES,
    Pacing,
    PathState,
    ReaderView,
    check_interval_s,
    next_pacing,
    path_reason,
)
from draftgate.policies.values import replace

BUFFER_BYTES: Final = 16 << 10
"""Buffer of a stream's connection, for about 70 chunks of one token."""

SEND_QUEUE_BYTES: Final = 32 << 10
"""Send queue of a stream's socket, which Linux doubles for its own bookkeeping. The queue allows
320 kB/s, or a thousand tokens per second, at a round-trip time of 100 ms."""

HEALTHY_INTERVAL_S: Final = 0.5
"""Interval of the checks while a client has little unread output."""

CHECKS_AT_ONCE: Final = 100
"""Readers checked in one callback of the event loop. A check takes 1.3 us, or 19 us if the client
has unread output (one core, AMD EPYC, uvloop, 2026-11-27)."""

LEAST_CHANGE: Final = 0.1
"""Relative change of the time between tokens from which the worker gets a message."""

PROXY_HEADERS: Final = ("Forwarded", "Via", "X-Forwarded-For")
"""Headers of a request that came through a proxy. If a client sends them itself, the gateway only
ignores the statistics of its path."""


class Readers:
    """The readers of a node.

    Use the object only on the thread of the event loop.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Start without readers.

        Args:
            now_s: the clock, in seconds.
        """
        self.now_s = now_s
        self._due_s: dict[Reader, float] = {}  # time of the next check
        self._checking = False

    def __len__(self) -> int:
        """Return the number of readers."""
        return len(self._due_s)

    @property
    def num_slow(self) -> int:
        """Number of readers that take less than their workers generate."""
        return sum(reader.is_slow for reader in self._due_s)

    def count(self, state: PathState) -> int:
        """Return the number of readers whose path is in a state."""
        return sum(reader.pacing.state is state for reader in self._due_s)

    def add(self, reader: Reader) -> None:
        """Check a reader soon, and regularly until it is discarded."""
        self._due_s[reader] = self.now_s()
        if not self._checking:
            self._checking = True
            asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_next, ())

    def hasten(self, reader: Reader) -> None:
        """Check a reader soon, if it is checked at all."""
        if reader in self._due_s:
            self._due_s[reader] = self.now_s()

    def discard(self, reader: Reader) -> None:
        """Stop checking a reader."""
        self._due_s.pop(reader, None)

    def _check_next(self, left: tuple[Reader, ...]) -> None:
        """Check some remaining readers of this round, or begin a round."""
        now_s = self.now_s()
        turn = left or tuple(reader for reader, due_s in self._due_s.items() if due_s <= now_s)
        for reader in turn[:CHECKS_AT_ONCE]:
            if reader in self._due_s:
                self._due_s[reader] = now_s + _checked(reader, now_s)
        loop, rest = asyncio.get_running_loop(), turn[CHECKS_AT_ONCE:]
        if rest:
            loop.call_soon(self._check_next, rest)
        elif self._due_s:
            loop.call_later(CHECK_INTERVAL_S, self._check_next, ())
        else:
            self._checking = False


class _Sample(NamedTuple):
    """The totals of a stream at a check.

    Attributes:
        taken_bytes: bytes that the client has taken.
        unsent_bytes: bytes that it has not taken.
        made_bytes: bytes of all generated tokens.
        tokens, writes: tokens and chunks that were sent.
        tcp: TCP statistics, or None if they are unknown.
    """

    at_s: float
    taken_bytes: int
    unsent_bytes: int
    made_bytes: float
    tokens: int
    writes: int
    tcp: TcpInfo | None


class Reader:
    """The client that reads a stream.

    Attributes:
        run: the run whose output the client reads, or None before the request runs.
        sent_tokens: returns how many tokens the stream has sent, including coalesced tokens.
        written_bytes, writes: bytes and chunks written to the connection.
        pacing: the present pace, and the time for which tokens are coalesced.
    """

    def __init__(self, request: Request, readers: Readers) -> None:
        """Read the headers of a request.

        Raises:
            InvalidRequest: the rate that the client states is invalid.
        """
        self.run: RunningJob | None = None
        self.sent_tokens: Callable[[], int] = lambda: 0
        self.written_bytes = self.writes = 0
        self.stated_tps = of_headers(request, read_stated).rate_tps
        self.hidden = of_headers(request, comes_through_proxy)
        self._transport: Any = request.transport
        self._readers = readers
        self._before: _Sample | None = None
        self._moved_s = readers.now_s()  # when the client last took something
        self._sizes = float(CHUNK_BYTES), 1.0  # bytes of a token, and tokens of a chunk
        self.pacing = Pacing(state=PathState.HIDDEN if self.hidden else PathState.UNKNOWN)

    def count_write(self, num_bytes: int) -> None:
        """Count a write of events to the connection."""
        self.written_bytes += num_bytes
        self.writes += 1

    async def drained(self, writer: AbstractStreamWriter | DirectResponse) -> None:
        """Wait until the buffers have space again.

        Raises:
            ConnectionResetError: the client has disconnected.
        """
        self._readers.hasten(self)
        await writer.drain()

    def limit_buffers(self) -> None:
        """Limit the buffers of the connection, so that little is sent ahead of the reader."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        connection = _open_socket(self._transport)
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_QUEUE_BYTES)

    def watch(self, run: RunningJob | None, sent_tokens: Callable[[], int]) -> None:
        """Check the reader from now on until `left`.

        The round trip is known from the handshake of the connection.

        Args:
            run: the run whose pace follows, or None if an upstream generates.
            sent_tokens: returns how many tokens the stream has sent.
        """
        self.run, self.sent_tokens = run, sent_tokens
        self._apply(self._with_tcp(ReaderView(0), None, self._tcp_info()))
        self._readers.add(self)

    def left(self) -> None:
        """Stop checking the reader, because its stream has ended."""
        self._readers.discard(self)

    @property
    def is_slow(self) -> bool:
        """Whether the request is slowed down, or its tokens are coalesced, for a slow client."""
        return bool(self.pacing.pace or self.pacing.path_bytes_s)

    def check(self, now_s: float) -> float:
        """Set the pace of the reader's sequences, and return the seconds until the next check."""
        unsent_bytes, waiting = self.unsent_bytes, self._waiting_tokens
        quiet = unsent_bytes <= UNTOUCHED_TCP_BYTES and not waiting
        if quiet and not (self.is_slow or self.stated_tps or self.hidden):
            self._before, self._moved_s = None, now_s
            self.pacing = replace(self.pacing, suspected=False)
            return HEALTHY_INTERVAL_S
        sample = self._sample(now_s, unsent_bytes, waiting)
        before, self._before = self._before, sample
        if before is not None and sample.at_s > before.at_s:
            self._apply(self._view(before, sample, waiting))
        rtt_s = None if sample.tcp is None else sample.tcp.min_rtt_s
        return check_interval_s(rtt_s, self.pacing.hold_s)

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the connection's buffer and in the kernel's send queue."""
        if self._transport is None:
            return 0
        return int(self._transport.get_write_buffer_size()) + _queued_bytes(self._transport)

    @property
    def _waiting_tokens(self) -> int:
        return 0 if self.run is None else self.run.unread_tokens

    def _tcp_info(self) -> TcpInfo | None:
        """Return the TCP statistics, or None if the path is hidden or the system has none."""
        if self.hidden or self._transport is None:
            return None
        connection = _open_socket(self._transport)
        return None if connection is None else tcp_info(connection)

    def _sample(self, now_s: float, unsent_bytes: int, waiting: int) -> _Sample:
        """Return the totals of the stream, in encrypted bytes if it has TLS."""
        tcp, tokens = self._tcp_info(), self.sent_tokens()
        taken_bytes = self.written_bytes - unsent_bytes if tcp is None else tcp.acked_bytes
        made_bytes = taken_bytes + unsent_bytes + waiting * self._sizes[0]
        return _Sample(now_s, taken_bytes, unsent_bytes, made_bytes, tokens, self.writes, tcp)

    def _view(self, before: _Sample, now: _Sample, waiting: int) -> ReaderView:
        """Return what happened between two checks."""
        seconds, tokens = now.at_s - before.at_s, now.tokens - before.tokens
        taken_bytes = now.taken_bytes - before.taken_bytes
        if taken_bytes > 0 or not now.unsent_bytes:
            self._moved_s = now.at_s
        view = ReaderView(
            now.unsent_bytes,
            now.at_s - self._moved_s,
            waiting,
            max(taken_bytes, 0) / seconds,
            max(now.made_bytes - before.made_bytes, 0.0) / seconds,
            *self._sizes,
            before.unsent_bytes,
            self.pacing.hold_s,
            seconds,
        )
        if tokens > 0 and now.writes > before.writes:
            sent_bytes = taken_bytes + now.unsent_bytes - before.unsent_bytes
            self._sizes = sent_bytes / tokens, tokens / (now.writes - before.writes)
        return self._with_tcp(view, before.tcp, now.tcp)

    def _with_tcp(
        self, view: ReaderView, before: TcpInfo | None, now: TcpInfo | None
    ) -> ReaderView:
        """Add the worker's speed, the stated rate and the TCP statistics to a view."""
        full_tps = 0.0 if self.run is None else self.run.full_tps
        # The rate of the client must not delay its first token.
        stated_tps = self.stated_tps if self.sent_tokens() else None
        view = replace(view, full_tps=full_tps, stated_tps=stated_tps, hidden=self.hidden)
        if now is None:
            return view
        before = before or now
        return replace(
            view,
            rtt_s=now.min_rtt_s,
            busy_share=(now.busy_s - before.busy_s) / view.interval_s,
            sndbuf_share=(now.sndbuf_s - before.sndbuf_s) / view.interval_s,
            rwnd_share=(now.rwnd_s - before.rwnd_s) / view.interval_s,
            retransmits=now.retransmits - before.retransmits,
        )

    def _apply(self, view: ReaderView) -> None:
        """Choose the pacing for a view, and apply it."""
        before, chosen = self.pacing, next_pacing(view, self.pacing)
        drift = abs(chosen.tpot_s - before.tpot_s)
        changed = chosen.pace is not before.pace or drift > LEAST_CHANGE * before.tpot_s
        self.pacing = chosen if changed else replace(chosen, tpot_s=before.tpot_s)
        if self.run is None or (chosen == before and self.run.path_reason):
            return
        if changed:
            self.run.set_pace(chosen.pace, chosen.tpot_s * self.run.sequences)
        if reason := path_reason(view, chosen):
            self.run.note_path(reason)


def comes_through_proxy(headers: Mapping[str, str]) -> bool:
    """Return whether a request came through a proxy, by its headers."""
    return any(name in headers for name in PROXY_HEADERS)


def _checked(reader: Reader, now_s: float) -> float:
    """Check a reader, and return the seconds until the next check."""
    try:
        return reader.check(now_s)
    except Exception as error:  # noqa: BLE001 - the other readers must still be checked
        log(logging.ERROR, "the reader of a stream cannot be checked", error=error)
        return HEALTHY_INTERVAL_S


def _open_socket(transport: Any) -> Any:
    """Return the socket of a transport, or None if it is closed or the transport has none."""
    connection = transport.get_extra_info("socket")
    # uvloop keeps the object of a closed socket. Most of its methods raise ValueError.
    return None if connection is None or connection.fileno() < 0 else connection


def _queued_bytes(transport: Any) -> int:
    """Return the unacknowledged bytes in the kernel's send queue, or 0 if unknown."""
    connection = _open_socket(transport)
    if connection is None:
        return 0
    count = array.array("i", [0])
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return 0
    return count[0]
