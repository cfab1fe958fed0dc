"""A connection to a peer: opening, messages, and detection of its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

import aiohttp
from yarl import URL

from draftgate.backends.errors import BackendFailed
from draftgate.backends.framing import FrameChannel
from draftgate.backends.peer.channel import ALIVE_S, MOST_REPORT_BYTES
from draftgate.backends.peer.proof import SharedSecret
from draftgate.backends.peer.upgrade import CONNECT_S, PeerRefused, upgraded
from draftgate.backends.remote_worker import (
    ALIVE,
    Command,
    FetchTokenizer,
    Ready,
    Report,
    TokenizerFiles,
    Update,
)
from draftgate.backends.types import Phases

TOKENIZER_S: Final = 60.0
"""Timeout of the files of a tokenizer in seconds: 35 MiB at 5 Mbit/s."""

CHECKS: Final = 6
"""Number of consecutive checks that must find silence. However long our own event loop stalls, only
one check is late, and messages that arrived meanwhile are read before the next check."""

DRIFT: Final = 1e-3
"""Maximum relative drift of two clocks. It is ten times that of quartz and of NTP at its usual slew
rate, and only 0.1 ms in the 0.1 s between two reports."""


class PeerChanged(PeerRefused):
    """The peer serves another model, or has another epoch, since its restart."""


class Link:
    """An open connection to a peer, for use on the event loop's thread.

    Attributes:
        ready: first message of the peer, set by `linked`.
    """

    ready: Ready

    def __init__(self) -> None:
        self.channel = FrameChannel[Report](Report, MOST_REPORT_BYTES, self._arrived, self._lost)
        self._ended = asyncio.Event()
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()  # before `run`
        self._on_report: Callable[[Report], None] = self._reports.put_nowait
        self._commands: list[Command] = []

    def send(self, command: Command) -> None:
        """Send a command, which is lost if the connection ends first.

        All commands of one iteration of the event loop are one write, so that they wake the peer
        only once.
        """
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._send_commands)
        self._commands.append(command)

    async def receive(self) -> Report:
        """Return the next report, before `run`.

        Raises:
            BackendFailed: the connection has ended, or the message is invalid.
        """
        report = await self._reports.get()
        if report is None:
            raise self._failure()
        return report

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """Fetch the files of the peer's tokenizer.

        Raises:
            BackendFailed: the connection ended, or the files did not arrive in time.
        """
        async with _time_limit(TOKENIZER_S, "its tokenizer did not arrive in time"):
            self.channel.send(FetchTokenizer())
            while not isinstance(report := await self.receive(), TokenizerFiles):
                pass  # an update
        return report.files

    async def update(self) -> Update:
        """Return the next report, which must be an update.

        Raises:
            BackendFailed: no report arrives in time, or it is not an update.
        """
        async with _time_limit(CONNECT_S, "it sends no updates"):
            report = await self.receive()
        if not isinstance(report, Update):
            raise BackendFailed("it sent an unexpected message")
        return report

    async def run(self, on_report: Callable[[Report], None], silence_s: float) -> BackendFailed:
        """Receive reports until the connection ends, and return the reason.

        Args:
            silence_s: seconds of silence after which the peer is lost.
        """
        while not self._reports.empty():
            report = self._reports.get_nowait()
            if report is not None:
                on_report(report)
        self._on_report = on_report
        parts = [
            asyncio.create_task(self._ended.wait()),
            asyncio.create_task(self.watch_silence(silence_s)),
            asyncio.create_task(self._stay_alive()),
        ]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts)
        return self._failure()

    async def watch_silence(self, silence_s: float) -> None:
        """End the connection after a silence."""
        silent_checks = 0
        while silent_checks < CHECKS:
            self.channel.heard = False
            await asyncio.sleep(silence_s / CHECKS)
            silent_checks = 0 if self.channel.heard else silent_checks + 1
        self.channel.fail(f"it sent nothing for {silence_s:g} s")

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self.channel.send(ALIVE)

    def _send_commands(self) -> None:
        commands, self._commands = self._commands, []
        self.channel.send(*commands)

    def _arrived(self, report: Report) -> None:
        self._on_report(report)

    def _lost(self) -> None:
        self._ended.set()
        self._reports.put_nowait(None)

    def _failure(self) -> BackendFailed:
        return BackendFailed(self.channel.reason)


@asynccontextmanager
async def linked(
    http: aiohttp.ClientSession, url: str, secret: SharedSecret | None
) -> AsyncGenerator[Link, None]:
    """Connect to a peer's worker, and close the link at the end.

    Raises:
        PeerRefused: the peer does not know the secret, or is not a node.
        BackendFailed: the peer does not respond, or cannot serve now.
    """
    link = Link()
    response: aiohttp.ClientResponse | None = None
    try:
        async with _time_limit(CONNECT_S, "it did not respond in time"):
            response, transport = await upgraded(http, URL(url), secret)
            link.channel.take_over(transport)
            link.channel.send(ALIVE)
            link.ready = await _ready(link)
        yield link
    finally:
        link.channel.close()
        if response is not None:
            response.close()


@asynccontextmanager
async def _time_limit(seconds: float, message: str) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BackendFailed(message) from None


async def _ready(link: Link) -> Ready:
    ready = await link.receive()
    if not isinstance(ready, Ready):
        raise BackendFailed("it sent an unexpected message")
    return ready


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


class LinkIds:
    """Ids of the running requests on one connection, each of which is used once."""

    def __init__(self) -> None:
        self._next = count()
        self._id_of: dict[str, str] = {}
        self._request_of: dict[str, str] = {}

    def new_id(self, request_id: str) -> str:
        """Return a new id for a request without an id."""
        link_id = str(next(self._next))
        self._id_of[request_id] = link_id
        self._request_of[link_id] = request_id
        return link_id

    def id_of(self, request_id: str) -> str | None:
        """Return the id of a request, or None if it no longer runs."""
        return self._id_of.get(request_id)

    def request_of(self, link_id: str) -> str | None:
        """Return the request with this id, or None if it no longer runs."""
        return self._request_of.get(link_id)

    def forget(self, request_id: str) -> str | None:
        """Forget a request that no longer runs, and return its id."""
        link_id = self._id_of.pop(request_id, None)
        if link_id is not None:
            del self._request_of[link_id]
        return link_id
