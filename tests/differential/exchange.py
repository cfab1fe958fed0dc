"""What clients send in a differential test, and what they observe."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import h11
import msgspec

from tests.memory_network import MemoryLoop, MemoryTransport

PATIENCE_S = 400.0
"""Virtual time after which a response counts as missing. The longest timeout of a node is 75 s."""

TURNS = 20
"""Turns of the event loop between the pieces of a request. No time passes, because a version may
count the time of a request from its first byte or from its last one."""


class Exchange(msgspec.Struct):
    """Bytes that a client sends, with one request or several in a pipeline.

    Attributes:
        methods: the methods of the requests, which decide how their responses end.
        cuts: places at which the client interrupts its bytes.
        new: whether the client opens a new connection, even if the last one is still open.
        leave_after: number of bytes of the response after which the client disconnects, or None.
        closes: whether the client disconnects when it has sent its bytes.
    """

    data: bytes
    methods: list[str]
    cuts: list[int] = []
    new: bool = False
    leave_after: int | None = None
    closes: bool = False


class Case(msgspec.Struct):
    """Exchanges at the same time, usually one."""

    name: str
    scenario: str
    exchanges: list[Exchange]


class Part(msgspec.Struct):
    """A part of a body, which is an event if the response is a stream of events."""

    at_s: float
    data: bytes


class Answer(msgspec.Struct):
    """A response."""

    status: int
    headers: list[tuple[str, str]]
    parts: list[Part]
    complete: bool


class Observed(msgspec.Struct):
    """What happened to an exchange.

    Attributes:
        statuses: of informational responses.
        broken: what is not valid HTTP in the responses, or empty.
        missing: number of responses that did not arrive although the connection was open.
    """

    answers: list[Answer] = []
    statuses: list[int] = []
    closed: bool = False
    broken: str = ""
    missing: int = 0


class Responses:
    """A parser of the responses on a connection."""

    def __init__(self, methods: list[str], begun_s: float) -> None:
        self.observed = Observed()
        self._methods = list(methods)
        self._begun_s = begun_s
        self._parser: h11.Connection | None = None

    @property
    def missing(self) -> int:
        """Number of responses that have not ended."""
        return len(self._methods)

    @property
    def keeps_open(self) -> bool:
        """Whether the last response lets the connection open."""
        if self.observed.broken or self.missing or not self.observed.answers:
            return False
        headers = {name.lower(): value for name, value in self.observed.answers[-1].headers}
        return headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes, now_s: float) -> None:
        """Read bytes, or the end of the connection if there are none."""
        while self._methods and not self.observed.broken:
            parser = self._parser or self._next()
            self._parser = parser
            try:
                parser.receive_data(data)
                if not self._read(parser, now_s - self._begun_s):
                    return
            except h11.RemoteProtocolError as error:
                if data or self._answer_has_begun():
                    self.observed.broken = str(error)
                return
            data = parser.trailing_data[0]
            self._parser = None
            if not data:
                return
        if data:
            self.observed.broken = self.observed.broken or f"{len(data)} bytes after the responses"

    def _answer_has_begun(self) -> bool:
        answers = self.observed.answers
        return bool(answers) and not answers[-1].complete

    def _next(self) -> h11.Connection:
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        method = "HEAD" if self._methods[0] == "HEAD" else "GET"
        parser.send(h11.Request(method=method, target="/", headers=[("Host", "localhost")]))
        parser.send(h11.EndOfMessage())
        return parser

    def _read(self, parser: h11.Connection, at_s: float) -> bool:
        """Read the events of a response, and return whether it has ended."""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return False
            if isinstance(event, h11.InformationalResponse):
                self.observed.statuses.append(event.status_code)
            elif isinstance(event, h11.Response):
                headers = [(n.decode(), v.decode("latin-1")) for n, v in event.headers.raw_items()]
                self.observed.answers.append(Answer(event.status_code, headers, [], complete=False))
            elif isinstance(event, h11.Data):
                _add_part(self.observed.answers[-1], bytes(event.data), at_s)
            elif isinstance(event, h11.EndOfMessage):
                self.observed.answers[-1].complete = True
                self._methods.pop(0)
                return True


def _add_part(answer: Answer, data: bytes, at_s: float) -> None:
    """Add bytes to a body, whose parts are the events of a stream, or one part in all."""
    types = [value for name, value in answer.headers if name.lower() == "content-type"]
    parts = answer.parts
    if not any(value.startswith("text/event-stream") for value in types):
        parts[:] = [Part(at_s, b"".join(part.data for part in parts) + data)]
        return
    if parts and not parts[-1].data.endswith(b"\n\n"):
        data = parts.pop().data + data
    pieces = data.split(b"\n\n")
    parts += [Part(at_s, piece + b"\n\n") for piece in pieces[:-1]]
    if pieces[-1]:
        parts.append(Part(at_s, pieces[-1]))


class Client(asyncio.Protocol):
    """A connection of a client."""

    transport: MemoryTransport

    def __init__(self, loop: MemoryLoop) -> None:
        self.closed = False
        self._loop = loop
        self._responses: Responses | None = None
        self._received = 0
        self._changed = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._responses is not None:
            self._responses.feed(data, self._loop.time())
        self._changed.set()

    def eof_received(self) -> bool:
        self.connection_lost(None)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            if self._responses is not None:
                self._responses.feed(b"", self._loop.time())
            self._changed.set()

    async def perform(self, exchange: Exchange) -> Observed:
        """Send the bytes of an exchange, and read the responses."""
        begun_s = self._loop.time()
        self._responses = responses = Responses(exchange.methods, begun_s)
        self._received = 0
        await self._send(exchange)
        while responses.missing and not (self.closed or responses.observed.broken):
            if exchange.closes:
                break
            if exchange.leave_after is not None and self._received >= exchange.leave_after:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), PATIENCE_S)
            except TimeoutError:
                responses.observed.missing = responses.missing
                break
        leaves = exchange.closes or exchange.leave_after is not None
        if leaves or not responses.keeps_open:
            await asyncio.sleep(0 if leaves else 0.03)
            responses.observed.closed = self.closed
            self.transport.close()
            self.closed = True
        self._responses = None
        return responses.observed

    async def _send(self, exchange: Exchange) -> None:
        places = [0, *sorted(exchange.cuts), len(exchange.data)]
        for begin, end in pairwise(places):
            if begin:
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            if self.closed:
                return
            self.transport.write(exchange.data[begin:end])
