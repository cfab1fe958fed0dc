"""One connection to a peer: how it is opened, what goes over it, how its end is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

import aiohttp
from yarl import URL

from draftgate.backends.errors import BackendFailed
from draftgate.backends.peer.channel import MOST_FRAME_BYTES, Channel
from draftgate.backends.peer.messages import (
    MOST_REPORT_BYTES,
    AskTokenizer,
    Command,
    Report,
    TokenizerFiles,
    Update,
    Welcome,
)
from draftgate.backends.peer.proof import Proof, SharedSecret, is_answer
from draftgate.backends.reasons import plain_reason

CONNECT_S: Final = 5.0
"""For a connection and the welcome on it. A node whose event loop is later serves nobody well."""

TOKENIZER_S: Final = 60.0
"""For the files of a tokenizer: 35 MiB at 5 Mbit/s."""

CLOSE_S: Final = 0.25
"""For the other side's goodbye, which one that hangs never says."""

LOOKS: Final = 6
"""A silence is made sure of by so many looks in a row: if our own event loop stalls, however long,
only one of them is late, and what came meanwhile is read before the next."""

_STRANGERS: Final = (401, 404)
"""What a node answers whose secret is another one, and any server that is no node."""

_CLOSINGS: Final[dict[int, str]] = {
    aiohttp.WSCloseCode.GOING_AWAY: "it stops",
    aiohttp.WSCloseCode.MESSAGE_TOO_BIG: "a message was too large",
    aiohttp.WSCloseCode.PROTOCOL_ERROR: "what was sent is no message",
    aiohttp.WSCloseCode.ABNORMAL_CLOSURE: "the connection broke",
}


class PeerRefused(BackendFailed):
    """A peer is not what it should be, or does not know us: to ask again does not help."""


class PeerChanged(PeerRefused):
    """A peer is another one than it was, and will not be that again."""


class Link:
    """A connection that is open and proved. Use on the event loop's thread.

    Attributes:
        welcome: what the peer said of itself.
    """

    welcome: Welcome

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Take a connection on which nothing was said yet."""
        self._socket = socket
        self._channel = Channel[Report](socket, Report, MOST_REPORT_BYTES)
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._heard = False

    def send(self, command: Command) -> None:
        """Send a command, in its turn. One that finds the connection broken is lost with it."""
        self._commands.put_nowait(command)

    async def receive(self) -> Report:
        """Return the next report.

        Raises:
            BackendFailed: the connection has ended, or what came is none.
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
                raise BackendFailed(_CLOSINGS[aiohttp.WSCloseCode.PROTOCOL_ERROR]) from None
        return report

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """Return the files of the peer's tokenizer.

        Raises:
            BackendFailed: the connection ended, or they did not come in time.
        """
        try:
            async with asyncio.timeout(TOKENIZER_S):
                await self._channel.send(AskTokenizer())
                while not isinstance(report := await self.receive(), TokenizerFiles):
                    pass  # it goes on reporting meanwhile
        except TimeoutError:
            raise BackendFailed("its tokenizer did not come in time") from None
        except ConnectionError:
            raise BackendFailed("the connection broke") from None
        return report.files

    async def update(self) -> Update:
        """Return the next update.

        Raises:
            BackendFailed: none comes.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                report = await self.receive()
        except TimeoutError:
            raise BackendFailed("it does not report") from None
        if not isinstance(report, Update):
            raise BackendFailed("it sent what it was not asked for")
        return report

    async def carry(self, heard: Callable[[Report], None], silence_s: float) -> BackendFailed:
        """Send commands and hand reports over until the connection ends; return how it did.

        Args:
            heard: gets each report.
            silence_s: a peer that says nothing for so long is gone.
        """
        parts = [
            asyncio.create_task(self._receive(heard)),
            asyncio.create_task(self._send()),
            asyncio.create_task(self._listen(silence_s)),
        ]
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts)
        return ended.pop().result()

    async def close(self) -> None:
        """Say goodbye, and wait but briefly for an answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)

    async def _receive(self, heard: Callable[[Report], None]) -> BackendFailed:
        while True:
            try:
                report = await self.receive()
            except BackendFailed as error:
                return error
            heard(report)

    async def _send(self) -> BackendFailed:
        try:
            while True:
                await self._channel.send(await self._commands.get())
        except ConnectionError:
            return BackendFailed("the connection broke")

    async def _listen(self, silence_s: float) -> BackendFailed:
        """Return once nothing was heard for so long."""
        quiet = 0
        while quiet < LOOKS:
            self._heard = False
            await asyncio.sleep(silence_s / LOOKS)
            quiet = 0 if self._heard else quiet + 1
        return BackendFailed(f"nothing was heard of it for {silence_s:g} s")

    def _closing(self, message: aiohttp.WSMessage) -> str:
        """Return how the connection ended, in words that name no address."""
        if message.type is aiohttp.WSMsgType.TEXT:
            return _CLOSINGS[aiohttp.WSCloseCode.PROTOCOL_ERROR]
        if message.type is aiohttp.WSMsgType.ERROR:  # found on this side
            code = getattr(message.data, "code", None)
        else:
            code = self._socket.close_code
        return _CLOSINGS.get(code or 0, "it closed the connection")


@asynccontextmanager
async def linked(
    session: aiohttp.ClientSession, url: str, secret: SharedSecret | None
) -> AsyncGenerator[Link, None]:
    """Connect to a peer's worker; the link is closed at the end.

    Raises:
        PeerRefused: it does not know the secret, or is no node.
        BackendFailed: it does not answer, or not now.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            link = await _proved(session, url, secret)
    except TimeoutError:
        raise BackendFailed("it did not answer in time") from None
    try:
        yield link
    finally:
        await link.close()


async def _proved(session: aiohttp.ClientSession, url: str, secret: SharedSecret | None) -> Link:
    proof = None if secret is None else secret.proof(URL(url).path, time.time())
    link = Link(await _connected(session, url, proof))
    try:
        link.welcome = await _welcomed(link, proof)
    except BaseException:
        await link.close()
        raise
    return link


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
        if error.status in _STRANGERS:
            raise PeerRefused("it knows no peers, or has another secret") from None
        raise BackendFailed(f"it answered {error.status}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise BackendFailed(plain_reason(error)) from None


async def _welcomed(link: Link, proof: Proof | None) -> Welcome:
    welcome = await link.receive()
    if not isinstance(welcome, Welcome):
        raise BackendFailed("it sent what is no welcome")
    if not is_answer(proof, welcome.proof):
        raise PeerRefused("it has another secret, or none")
    return welcome
