"""A connection to a peer: opening, messages, and detection of its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

import aiohttp
from yarl import URL

from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import BackendFailed
from draftgate.backends.peer.channel import MOST_FRAME_BYTES, MOST_REPORT_BYTES, PeerChannel
from draftgate.backends.peer.proof import Proof, SharedSecret, is_answer
from draftgate.backends.remote_worker import (
    Command,
    FetchTokenizer,
    Ready,
    Report,
    TokenizerFiles,
    Update,
)

CONNECT_S: Final = 5.0
"""Timeout of a connection and its first message, in seconds. A node with a slower event loop is
overloaded."""

TOKENIZER_S: Final = 60.0
"""Timeout of the files of a tokenizer in seconds: 35 MiB at 5 Mbit/s."""

CLOSE_S: Final = 0.25
"""Timeout of the peer's response to a close frame in seconds, because a hung peer never responds.
"""

CHECKS: Final = 6
"""Number of consecutive checks that must find silence. However long our own event loop stalls, only
one check is late, and messages that arrived meanwhile are read before the next check."""

_REFUSAL_STATUSES: Final = (401, 404)
"""Statuses of a node with another secret, and of a server that is not a node."""

_INVALID: Final = "a message was invalid"
_BROKEN: Final = "the connection broke"

_CLOSINGS: Final[dict[int, str]] = {
    aiohttp.WSCloseCode.GOING_AWAY: "it is shutting down",
    aiohttp.WSCloseCode.MESSAGE_TOO_BIG: "a message was too large",
    aiohttp.WSCloseCode.PROTOCOL_ERROR: _INVALID,
    aiohttp.WSCloseCode.ABNORMAL_CLOSURE: _BROKEN,
}


class PeerRefused(BackendFailed):
    """The peer is not the expected peer, or refuses this node, so further attempts do not help."""


class PeerChanged(PeerRefused):
    """The peer serves another model, or has another epoch, since its restart."""


class Link:
    """An open connection to a peer, for use on the event loop's thread.

    Attributes:
        ready: first message of the peer, set by `linked`.
    """

    ready: Ready

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Use a new connection."""
        self._socket = socket
        self._channel = PeerChannel[Report](socket, Report, MOST_REPORT_BYTES)
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._heard = False

    def send(self, command: Command) -> None:
        """Queue a command, which is lost if the connection ends first."""
        self._commands.put_nowait(command)

    async def receive(self) -> Report:
        """Return the next report.

        Raises:
            BackendFailed: the connection has ended, or the message is invalid.
        """
        report = None
        while report is None:
            message = await self._socket.receive()
            self._heard = True
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise BackendFailed(self._closing(message))
            try:
                report = self._channel.read(message.data)
            except ValueError:
                raise BackendFailed(_INVALID) from None
        return report

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """Fetch the files of the peer's tokenizer.

        Raises:
            BackendFailed: the connection ended, or the files did not arrive in time.
        """
        async with _time_limit(TOKENIZER_S, "its tokenizer did not arrive in time"):
            try:
                await self._channel.send(FetchTokenizer())
            except ConnectionError:
                raise BackendFailed(_BROKEN) from None
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
        """Send commands and receive reports until the connection ends, and return the reason.

        Args:
            silence_s: seconds of silence after which the peer is lost.
        """
        parts = [
            asyncio.create_task(self._receive(on_report)),
            asyncio.create_task(self._send()),
            asyncio.create_task(self._watch_silence(silence_s)),
        ]
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts)
        return ended.pop().result()

    async def close(self) -> None:
        """Close the connection, and wait only briefly for the peer's response."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)

    async def _receive(self, on_report: Callable[[Report], None]) -> BackendFailed:
        while True:
            try:
                report = await self.receive()
            except BackendFailed as error:
                return error
            on_report(report)

    async def _send(self) -> BackendFailed:
        try:
            while True:
                await self._channel.send(await self._commands.get())
        except ConnectionError:
            return BackendFailed(_BROKEN)

    async def _watch_silence(self, silence_s: float) -> BackendFailed:
        silent_checks = 0
        while silent_checks < CHECKS:
            self._heard = False
            await asyncio.sleep(silence_s / CHECKS)
            silent_checks = 0 if self._heard else silent_checks + 1
        return BackendFailed(f"it sent nothing for {silence_s:g} s")

    def _closing(self, message: aiohttp.WSMessage) -> str:
        """Return how the connection ended, without an address."""
        if message.type is aiohttp.WSMsgType.TEXT:
            return _INVALID
        if message.type is aiohttp.WSMsgType.ERROR:  # detected on this side
            code = getattr(message.data, "code", None)
        else:
            code = self._socket.close_code
        return _CLOSINGS.get(code or 0, "it closed the connection")


@asynccontextmanager
async def linked(
    session: aiohttp.ClientSession, url: str, secret: SharedSecret | None
) -> AsyncGenerator[Link, None]:
    """Connect to a peer's worker, and close the link at the end.

    Raises:
        PeerRefused: the peer does not know the secret, or is not a node.
        BackendFailed: the peer does not respond, or cannot serve now.
    """
    proof = None if secret is None else secret.proof(URL(url).path, time.time())
    link: Link | None = None
    try:
        async with _time_limit(CONNECT_S, "it did not respond in time"):
            link = Link(await _connected(session, url, proof))
            link.ready = await _ready(link, proof)
        yield link
    finally:
        if link is not None:
            await link.close()


@asynccontextmanager
async def _time_limit(seconds: float, message: str) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BackendFailed(message) from None


async def _connected(
    session: aiohttp.ClientSession, url: str, proof: Proof | None
) -> aiohttp.ClientWebSocketResponse:
    headers = {} if proof is None else {"Authorization": proof.header}
    try:
        return await session.ws_connect(
            url,
            headers=headers,
            max_msg_size=MOST_FRAME_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
        )
    except aiohttp.WSServerHandshakeError as error:
        if error.status in _REFUSAL_STATUSES:
            raise PeerRefused("it does not accept peers, or has another secret") from None
        raise BackendFailed(f"it responded with status {error.status}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise BackendFailed(public_reason(error)) from None


async def _ready(link: Link, proof: Proof | None) -> Ready:
    ready = await link.receive()
    if not isinstance(ready, Ready):
        raise BackendFailed("it sent an unexpected message")
    if not is_answer(proof, ready.proof):
        raise PeerRefused("it has another secret, or none")
    return ready
