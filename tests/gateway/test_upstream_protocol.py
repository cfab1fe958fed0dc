"""Tests of the client of upstreams, which parses responses in any pieces, and of bad ones."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import uvloop
from hypothesis import example, given
from hypothesis import strategies as st

from draftgate.backends.connection_errors import ConnectionFailed
from draftgate.backends.openai.connection import MOST_UNREAD_BYTES, Connection, Response
from draftgate.backends.openai.connections import Connections

HEAD = b"HTTP/1.1 200 OK\r\n"
BODY = b'data: {"choices": []}\n\n' * 40


def in_chunks(body: bytes, size: int) -> bytes:
    """Return a body in the chunked coding, with a trailer."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return chunks + b"0\r\nX-Trailer: ignored\r\n\r\n"


PACKED = gzip.compress(BODY)
RAW = zlib.compressobj(wbits=-zlib.MAX_WBITS)
CODED = {
    "gzip": (b"gzip", PACKED),
    "parts": (b"gzip", gzip.compress(BODY[:100]) + gzip.compress(BODY[100:])),
    "padded": (b"gzip", PACKED + b"\0\0"),
    "deflate": (b"deflate", zlib.compress(BODY)),
    "raw": (b"deflate", RAW.compress(BODY) + RAW.flush()),
}
"""Bodies in the codings of HTTP, with what servers make of them."""

RESPONSES = {
    "length": HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + in_chunks(BODY, 100),
    "interim": b"HTTP/1.1 100 Continue\r\nX-Old: 1\r\n\r\n"
    + (HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)),
    **{
        kind: HEAD
        + b"Content-Encoding: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % coding
        + in_chunks(body, 20)
        for kind, (coding, body) in CODED.items()
    },
    "end": HEAD + b"\r\n" + BODY,
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
}
REUSED = {"length", "chunks", "interim", *CODED}
"""The responses after which the connection can be used again."""


class Wire(asyncio.Transport):
    """A transport without a network."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = self.paused = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Sent(NamedTuple):
    """A request on a connection without a network."""

    pool: Connections
    wire: Wire
    protocol: asyncio.Protocol
    response: asyncio.Task[Response]

    def receive(self, data: bytes) -> None:
        """Let bytes arrive, unless the connection is closed."""
        if not self.wire.closed:
            self.protocol.data_received(data)


async def send(method: str = "POST", pool: Connections | None = None) -> Sent:
    """Send a request on a new connection."""
    pool = pool or Connections("http://server:8000/prefix", {"Authorization": "Bearer k"})
    connection, wire = Connection(pool), Wire()
    connection.connection_made(wire)
    pool.add(connection)
    response = asyncio.create_task(pool.request(method, "/v1/chat/completions", b"{}"))
    await asyncio.sleep(0)
    return Sent(pool, wire, connection, response)


def run(scene: Callable[[], Any]) -> Any:
    """Run a scene on an event loop of its own."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(scene())


@given(st.sampled_from(sorted(RESPONSES)), st.lists(st.integers(1, 400), max_size=30))
def test_response_in_any_pieces_is_the_same(kind: str, sizes: list[int]) -> None:
    """The pieces in which bytes arrive do not change a response or the use of its connection."""

    async def scene() -> None:
        sent = await send()
        rest = RESPONSES[kind]
        for size in sizes:
            sent.receive(rest[:size])
            rest = rest[size:]
        if rest:
            sent.receive(rest)
        if kind == "end":
            sent.protocol.eof_received()
            sent.protocol.connection_lost(None)
        response = await sent.response
        assert response.status == 200
        assert await response.read(1 << 20) == BODY
        assert {*map(str.lower, response.headers)} <= {
            *("content-length", "transfer-encoding", "content-encoding")
        }
        assert sent.wire.closed == (kind not in REUSED | {"end"})
        assert (sent.pool._take_idle(0.0) is not None) == (kind in REUSED)

    run(scene)


@given(
    st.sampled_from(sorted(RESPONSES)),
    st.integers(0, 2000),
    st.binary(max_size=40),
    st.integers(0, 400),
)
@example("deflate", 0, b"", len(RESPONSES["deflate"]))
def test_broken_response_fails_or_is_read(kind: str, place: int, noise: bytes, cut: int) -> None:
    """Any change of the bytes of a response ends in a response or an error, and nothing waits.

    Without any byte, the request is sent again on a new connection, which is refused here.
    """

    async def scene() -> None:
        sent = await send(pool=Connections("http://127.0.0.1:9", {}))
        whole = RESPONSES[kind]
        place_ = place % len(whole)
        sent.receive(whole[:place_] + noise + whole[place_ + cut :])
        sent.protocol.eof_received()
        sent.protocol.connection_lost(None)
        try:
            response = await asyncio.wait_for(sent.response, 1.0)
            await asyncio.wait_for(response.read(1 << 20), 1.0)
        except OSError as error:
            assert str(error)  # noqa: PT017 - an error is one of two results

    run(scene)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "cannot be read"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "read"),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "cannot be read"),
        (HEAD + b"X: " + b"x" * (65 << 10), "its head is too large"),
        (
            HEAD + b"Content-Encoding: zstd\r\nContent-Length: 1\r\n\r\nx",
            "unknown Content-Encoding",
        ),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nxyz", "cannot be read"),
    ],
)
async def test_response_that_is_not_http_fails(answer: bytes, reason: str) -> None:
    """A response that cannot be read is an error without its bytes, and closes the connection."""
    sent = await send()
    sent.receive(answer)
    with pytest.raises(ConnectionFailed, match=reason):
        await (await sent.response).read(100)
    assert sent.wire.closed


async def test_bytes_after_a_response_close_the_connection() -> None:
    """No later request gets the bytes that follow a response."""
    sent = await send()
    sent.receive(RESPONSES["length"] + RESPONSES["length"])
    assert await (await sent.response).read(1 << 20) == BODY
    assert sent.wire.closed
    assert sent.pool._take_idle(0.0) is None


@pytest.mark.parametrize("status", ["103 Early Hints", "204 No Content", "304 Not Modified"])
async def test_only_heads_of_successes_are_known(status: str) -> None:
    """A response without a body whose head has a length is never read with a body."""
    final = RESPONSES["length"]
    for _ in range(2):
        sent = await send()
        head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(final))
        sent.receive(head + final)
        response = await sent.response
        is_interim = status.startswith("1")
        assert await response.read(1 << 20) == (BODY if is_interim else b"")
        assert sent.wire.closed is not is_interim


async def test_equal_heads_have_bodies_of_their_own_lengths() -> None:
    """A known head, with another length, is read as the parser reads it."""
    for body in (b"", b"{}", BODY, b"{}", BODY * 2):
        sent = await send()
        sent.receive(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        response = await sent.response
        assert response.body == body
        assert sent.pool._take_idle(0.0) is not None
        sent = await send()
        sent.receive(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body) + 1, body))
        assert not sent.response.done()
        sent.receive(b"xy")
        assert await (await sent.response).read(1 << 20) == body + b"x"
        assert sent.wire.closed


async def test_bytes_on_an_idle_connection_close_it() -> None:
    """A server that speaks first, for example of a timeout, loses the connection."""
    sent = await send()
    sent.receive(RESPONSES["length"])
    await sent.response
    sent.receive(b"HTTP/1.1 408 Request Timeout\r\n")
    assert sent.wire.closed


async def test_response_to_head_has_no_body() -> None:
    """`HEAD` ends with the head, although the head names the length of a body."""
    sent = await send("HEAD")
    sent.receive(HEAD + b"Content-Length: 1000\r\n\r\n")
    assert await (await sent.response).read(100) == b""


async def test_upstream_waits_for_a_slow_reader() -> None:
    """Reading pauses with too many unread bytes, and goes on once they have been read."""
    sent = await send()
    block = b"x" * MOST_UNREAD_BYTES
    sent.receive(HEAD + b"Content-Length: %d\r\n\r\n" % (3 * len(block)) + block)
    response = await sent.response
    assert not sent.wire.paused
    sent.receive(block)
    assert sent.wire.paused
    assert await response.read_any() == block * 2
    assert not sent.wire.paused


async def test_short_body_arrives_with_its_head() -> None:
    """A request gets its response once the whole of a short body has arrived."""
    sent = await send()
    sent.receive(RESPONSES["length"][:-1])
    await asyncio.sleep(0)
    assert not sent.response.done()
    sent.receive(RESPONSES["length"][-1:])
    assert (await sent.response).body == BODY


async def test_head_of_a_stream_waits_for_the_first_bytes() -> None:
    """A request gets the response to a stream with the first bytes of its body."""
    sent = await send()
    sent.receive(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    await asyncio.sleep(0)
    assert not sent.response.done()
    sent.receive(b"2\r\nab\r\n")
    response = await sent.response
    assert response.body is None
    assert await response.read_any() == b"ab"


@pytest.mark.parametrize("received", [b"", b"a"])
async def test_connection_that_breaks_within_a_short_body(received: bytes) -> None:
    """The upstream has responded, and reading the rest of the body fails."""
    sent = await send()
    sent.receive(HEAD + b"Content-Length: 2\r\n\r\n" + received)
    sent.protocol.connection_lost(None)
    response = await sent.response
    assert (response.status, response.body) == (200, None)
    with pytest.raises(ConnectionFailed, match="the body is incomplete"):
        await response.read(100)


async def test_cancelled_request_closes_its_connection() -> None:
    """The response to a cancelled request cannot reach the next request."""
    sent = await send()
    sent.response.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sent.response
    assert sent.wire.closed


async def test_request_has_the_headers_of_the_connection() -> None:
    """A request names the server, the path below its prefix, the key and the size of the body."""
    sent = await send()
    head, _, body = sent.wire.sent.partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert first == "POST /prefix/v1/chat/completions HTTP/1.1"
    assert {"Host: server:8000", "Authorization: Bearer k", "Content-Length: 2"} < {*headers}
    assert body == b"{}"
    sent.response.cancel()


async def test_line_break_in_a_header_is_refused() -> None:
    """No value of a header can begin another one."""
    pool = Connections("http://server", {})
    with pytest.raises(ValueError, match="line break"):
        await pool.request("GET", "/", headers={"x-request-id": "a\r\nX-Other: b"})


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_work_on_both_event_loops(loop: Callable[[], Any]) -> None:
    """Connections are opened, used again, and closed, which ends waiting requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                count += 1
                if b"/wait" not in head:
                    writer.write(HEAD + b"Content-Length: 1\r\n\r\n%d" % count)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    closed = asyncio.Event()

    async def scene() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = Connections(f"http://127.0.0.1:{port}", {})
        for count in (b"1", b"2"):
            assert await (await pool.request("GET", "/")).read(1) == count
        waiting = asyncio.create_task(pool.request("GET", "/wait"))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(ConnectionFailed, match="this node stops"):
            await waiting
        await closed.wait()
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene())


@pytest.mark.parametrize("kind", sorted(CODED))
async def test_compressed_body_without_its_end_is_incomplete(kind: str) -> None:
    """A compressed body that lacks its end is an error, although the message itself is whole."""
    coding, body = CODED[kind]
    body = body[: len(body) // 2]
    sent = await send()
    head = HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n"
    sent.receive(head % (coding, len(body)) + body)
    response = await sent.response
    assert response.body is None
    with pytest.raises(ConnectionFailed, match=r"incomplete|cannot be read"):
        await response.read(1 << 20)


@pytest.mark.parametrize("coding", [b"gzip", b"deflate"])
async def test_small_body_that_becomes_huge_is_decoded_as_it_is_read(coding: bytes) -> None:
    """A body of 64 KB that stands for 64 MB needs little memory, whether or not it is read, and
    its connection serves the next request meanwhile."""
    huge = 64 << 20
    pack = gzip.compress if coding == b"gzip" else zlib.compress
    body = pack(bytes(huge))
    sent = await send()
    head = HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n"
    sent.receive(head % (coding, len(body)) + body)
    response = await sent.response
    assert sent.pool._take_idle(0.0) is not None
    total = 0
    while block := await response.read_any():
        assert len(block) <= 2 * MOST_UNREAD_BYTES
        total += len(block)
    assert total == huge
    assert not sent.wire.closed
    again = await send()
    again.receive(head % (coding, len(body)) + body)
    response = await again.response
    with pytest.raises(ValueError, match="exceeds"):
        await response.read(1 << 20)
