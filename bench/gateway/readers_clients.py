"""Stream clients for benchmarks: fast readers in closed loops, and slow or stopping readers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from bench.edge.client import Connection
from draftgate.loadgen.sending.sse import SseParser

SMALL_WINDOW_BYTES: Final = 4096
"""Receive buffer (SO_RCVBUF) of slow readers in bytes. Unread bytes then wait in the server."""

STOP_EVERY: Final = 4
"""Every fourth slow reader reads nothing for `STOP_S` and then catches up."""

STOP_S: Final = 12.0
TICK_S: Final = 1.0
PROMPTS: Final = 100
"""Number of distinct prompts of slow readers, large enough that few sequences share blocks."""

TIMEOUT_S: Final = 300.0
_RECEIVE_BYTES: Final = 65536


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: object = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class StreamContent:
    """The content of a stream so far, independent of the boundaries between reads."""

    parser: SseParser = field(default_factory=SseParser)
    text: hashlib._Hash = field(default_factory=hashlib.sha256)
    finished: int = 0
    done: int = 0
    errors: int = 0
    chunks: int = 0
    after_done: int = 0

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of a response."""
        for event in self.parser.feed(data):
            self.after_done += self.done
            if event.data == b"[DONE]":
                self.done += 1
                continue
            content = _decode(event.data)
            self.chunks += 1
            self.errors += content.error is not None
            for choice in content.choices:
                self.text.update(choice.text.encode())
                self.finished += choice.finish_reason is not None

    def fault(self, digest: str) -> str | None:
        """Return a description of the fault of a complete stream, or None if it is correct."""
        if self.errors:
            return "error"
        if (self.finished, self.done, self.after_done) != (1, 1, 0):
            return f"{self.finished} finished, {self.done} done, {self.after_done} after [DONE]"
        return None if self.text.hexdigest() == digest else "another text"


def request(prompt: str, tokens: int, *, stream: bool, version: str = "1.1") -> bytes:
    """Return the bytes of a completion request."""
    fields = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    body = json.dumps({**fields, "seed": 1}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def slow_prompt(number: int) -> str:
    """Return the prompt of a slow reader."""
    return f"def part_{number % PROMPTS}(path):\n"


async def text_digest(port: int, prompt: str, tokens: int) -> str:
    """Return the SHA-256 of the text of a request without streaming."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(prompt, tokens, stream=False, version="1.0"))
    _, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    text = json.loads(body)["choices"][0]["text"]
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class FastStream:
    """A stream without delays in reading, with times in seconds of `time.perf_counter`."""

    began_s: float
    ended_s: float
    ttft_s: float
    tpot_s: float
    fault: str | None


class _PatientConnection(Connection):
    timeout_s = TIMEOUT_S


async def read_fast(
    port: int, prompt: str, tokens: int, digest: str, found: list[FastStream]
) -> None:
    """Send requests in a closed loop until cancelled."""
    loop = asyncio.get_running_loop()
    request_bytes = request(prompt, tokens, stream=True)
    _, connection = await loop.create_connection(
        lambda: _PatientConnection(request_bytes, stream=True), "127.0.0.1", port
    )
    while True:
        began_s = time.perf_counter()
        latency_s, ttft_s = await connection.send_request()
        content = StreamContent()
        content.feed(bytes(connection.received))
        tpot_s = (latency_s - ttft_s) / (tokens - 1)
        found.append(
            FastStream(began_s, began_s + latency_s, ttft_s, tpot_s, content.fault(digest))
        )


@dataclass(slots=True)
class SlowReader:
    """A client that reads slowly.

    Attributes:
        bytes_s: bytes that the client reads per second.
        content: content of the stream.
        read_bytes: number of bytes that the client has read.
        ended: whether the server has closed the connection.
    """

    number: int
    bytes_s: int
    content: StreamContent = field(default_factory=StreamContent)
    read_bytes: int = 0
    ended: bool = False

    async def run(
        self, port: int, request_bytes: bytes, finish_now: asyncio.Event, spread_s: float
    ) -> None:
        """Send the request, read slowly until `finish_now` is set, and then read to the end.

        Args:
            request_bytes: bytes of the request.
            finish_now: event that ends slow reading.
            spread_s: seconds over which the slow readers arrive, and later finish in this order.
        """
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW_BYTES)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, request_bytes)
            while not finish_now.is_set() and not self.ended:
                stops = self.number % STOP_EVERY == 0
                wait_s = STOP_S if stops else TICK_S
                await _wait_for(finish_now, wait_s)
                self._take(connection, int(self.bytes_s * wait_s))
            await asyncio.sleep(spread_s)
            while not self.ended:
                self._feed(await loop.sock_recv(connection, _RECEIVE_BYTES))

    def _take(self, connection: socket.socket, most_bytes: int) -> None:
        try:
            self._feed(connection.recv(most_bytes))
        except BlockingIOError:
            return

    def _feed(self, data: bytes) -> None:
        self.ended = not data
        self.read_bytes += len(data)
        self.content.feed(data)


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, or until a timeout."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


@dataclass(slots=True)
class Crowd:
    """All slow readers from the first arrival to the last end."""

    port: int
    number: int
    bytes_s: int
    tokens: int
    spread_s: float
    readers: list[SlowReader] = field(default_factory=list)
    finish_now: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: deque[asyncio.Task[None]] = field(default_factory=deque)

    async def start_readers(self) -> None:
        """Start the readers at even intervals."""
        began_s = time.perf_counter()
        for number in range(self.number):
            due_s = began_s + number / self.number * self.spread_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            reader = SlowReader(number, self.bytes_s)
            self.readers.append(reader)
            spread_s = number / self.number * self.spread_s
            prompt = slow_prompt(number)
            request_bytes = request(prompt, self.tokens, stream=True, version="1.0")
            running = reader.run(self.port, request_bytes, self.finish_now, spread_s)
            self.tasks.append(asyncio.create_task(running))

    async def finish(self) -> None:
        """Let all readers read to the end.

        Raises:
            OSError: a connection broke.
        """
        self.finish_now.set()
        await asyncio.gather(*self.tasks)

    def faults(self, digests: Sequence[str]) -> dict[str, int]:
        """Return the number of wrong streams by fault.

        Args:
            digests: SHA-256 of the text of each prompt.
        """
        found: dict[str, int] = {}
        for reader in self.readers:
            fault = reader.content.fault(digests[reader.number % PROMPTS])
            if fault is not None:
                found[fault] = found.get(fault, 0) + 1
        return found
