"""Tests of compressed bodies: which bodies are decoded, when, and how many bytes at a time."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.compressed import (
    ENCODINGS,
    MOST_MEMBERS,
    SLICE_BYTES,
    BodyDecoder,
    CompressionError,
)
from draftgate.gateway.app import Listening
from tests.gateway.harness import PATIENCE_S, client, port_of, running

TEXT = "/v1/completions"
BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n"
AUTHORIZED = "Authorization: Bearer sk-one\r\n"
GZIP = "Content-Encoding: gzip\r\n"
BOMB = gzip.compress(bytes(64 << 20), mtime=0)
"""64 MiB in 64 kB, which aiohttp would decode in 256 calls."""


def raw_deflate(data: bytes) -> bytes:
    """Compress as some clients do, without zlib's header."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


class Decoded:
    """A count of decoded bytes by turn of the event loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.by_turn: dict[int, int] = {}

    @property
    def total(self) -> int:
        return sum(self.by_turn.values())

    def note(self, count: int) -> None:
        self.by_turn[self.turn] = self.by_turn.get(self.turn, 0) + count

    @contextmanager
    def counting_turns(self) -> Iterator[None]:
        """Count the turns of the running event loop until the block ends."""
        loop = asyncio.get_running_loop()

        def next_turn() -> None:
            self.turn += 1
            self.handle = loop.call_soon(next_turn)

        next_turn()
        try:
            yield
        finally:
            self.handle.cancel()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    """Return the count of bytes that anything in this process decodes with zlib."""
    count, original = Decoded(), zlib.decompressobj

    class Counting:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._stream = original(*args, **options)

        def decompress(self, data: bytes, max_length: int = 0) -> bytes:
            found = self._stream.decompress(data, max_length)
            count.note(len(found))
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    monkeypatch.setattr(zlib, "decompressobj", Counting)
    return count


def framed(data: bytes, *, chunked: bool) -> tuple[str, bytes]:
    """Return the header that frames a body, and the framed body."""
    if not chunked:
        return f"Content-Length: {len(data)}\r\n", data
    parts = [data[at : at + 5000] for at in range(0, len(data), 5000)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return "Transfer-Encoding: chunked\r\n", chunks + b"0\r\n\r\n"


async def send(gateway: Listening, data: bytes) -> bytes:
    """Send bytes over a new connection, and return all that arrives before its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
    writer.write(data)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    return answer


REFUSED = {
    "no key": (HEAD, 401),
    "wrong key": (HEAD + "Authorization: Bearer sk-two\r\n", 401),
    "unknown path": ("POST /nowhere HTTP/1.1\r\nHost: localhost\r\n" + AUTHORIZED, 404),
    "wrong method": (f"PUT {TEXT} HTTP/1.1\r\nHost: localhost\r\n" + AUTHORIZED, 405),
    "foreign page": (HEAD + AUTHORIZED + "Origin: http://evil.example\r\n", 403),
    "expectation": (HEAD + AUTHORIZED + "Expect: tea\r\n", 417),
    "bad header": (HEAD + AUTHORIZED + "x-slo-ttft-ms: soon\r\n", 400),
    "stacked": (HEAD + AUTHORIZED + GZIP, 415),
    "peer": ("GET /peer/v1/workers/0 HTTP/1.1\r\nHost: localhost\r\n", 401),
    "open path": ("GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("case", REFUSED)
async def test_nothing_of_a_refused_body_is_decoded(
    case: str, chunked: bool, decoded: Decoded
) -> None:
    """A request that is refused, or whose body no handler reads, ends its connection without
    decoding a byte. The same holds for requests that the client has sent after it."""
    head, status = REFUSED[case]
    framing, body = framed(BOMB, chunked=chunked)
    request = f"{head}{GZIP}{framing}\r\n".encode() + body
    async with running(api_keys=("sk-one",)) as gateway:
        answer = await send(gateway, request * 3)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nConnection: close\r\n" in answer
    assert decoded.total == 0


async def test_body_above_the_limit_is_refused_before_it_is_decoded(decoded: Decoded) -> None:
    """The length of an encoded body counts, too, so nothing of a longer one is decoded."""
    async with running(max_body_bytes=len(BOMB) - 1) as gateway:
        answer = await send(gateway, f"{HEAD}{GZIP}{framed(BOMB, chunked=False)[0]}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert decoded.total == 0


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_bombs_of_known_clients_are_decoded_in_slices_up_to_the_limit(
    chunked: bool, decoded: Decoded
) -> None:
    """A turn of the event loop decodes one slice of all bodies together, and a request at most a
    byte more than a body may have."""
    framing, body = framed(BOMB, chunked=chunked)
    request = f"{HEAD}{GZIP}{framing}\r\n".encode() + body
    async with running(max_body_bytes=1 << 20) as gateway:
        with decoded.counting_turns():
            answers = await asyncio.gather(*(send(gateway, request) for _ in range(4)))
    assert all(answer.startswith(b"HTTP/1.1 413 ") for answer in answers)
    assert max(decoded.by_turn.values()) <= SLICE_BYTES
    assert decoded.total <= 4 * ((1 << 20) + 1)


ACCEPTED = {
    "gzip": ("gzip", gzip.compress(BODY)),
    "upper case": ("GZIP", gzip.compress(BODY)),
    "old name": ("x-gzip", gzip.compress(BODY)),
    "identity too": ("identity, gzip", gzip.compress(BODY)),
    "members": ("gzip", gzip.compress(BODY[:9]) + gzip.compress(b"") + gzip.compress(BODY[9:])),
    "deflate": ("deflate", zlib.compress(BODY)),
    "raw deflate": ("deflate", raw_deflate(BODY)),
    "identity": ("identity", BODY),
    "empty": ("", BODY),
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_encodings_that_the_server_decodes(http: httpx.AsyncClient, case: str) -> None:
    """A body in a supported encoding equals its text, and leaves the connection open."""
    encoding, content = ACCEPTED[case]
    response = await http.post(TEXT, content=content, headers={"content-encoding": encoding})
    assert response.status_code == 200, response.text
    assert "connection" not in response.headers


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "compress", "gzip, gzip", "deflate, gzip", "gzip;q=1", "gzıp", "*"]
)
async def test_other_encodings_are_415(http: httpx.AsyncClient, encoding: str) -> None:
    """The response to an unknown or stacked encoding names the supported ones."""
    headers = {"content-encoding": encoding.encode()}
    response = await http.post(TEXT, content=b"x", headers=headers)
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert response.json()["error"]["code"] == "unsupported_encoding"
    assert response.headers["connection"] == "close"


async def test_several_headers_are_a_stacked_encoding() -> None:
    """Two headers with an encoding mean the same as one with both."""
    async with running() as gateway, client(gateway) as http:
        headers = [("content-encoding", "gzip"), ("content-encoding", "gzip")]
        body = gzip.compress(gzip.compress(BODY))
        assert (await http.post(TEXT, content=body, headers=headers)).status_code == 415


BROKEN = {
    "text": b"hello",
    "cut": gzip.compress(BODY)[:-1],
    "garbage after the end": gzip.compress(BODY) + b"garbage",
    "too many members": gzip.compress(b"") * (MOST_MEMBERS + 1),
    "wrong checksum": gzip.compress(BODY)[:-8] + bytes(8),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_broken_gzip_is_400(http: httpx.AsyncClient, case: str) -> None:
    """A body that is not a complete gzip file is an error of the client."""
    headers = {"content-encoding": "gzip"}
    response = await http.post(TEXT, content=BROKEN[case], headers=headers)
    assert (response.status_code, response.headers["connection"]) == (400, "close")
    assert "the body" in response.json()["error"]["message"]


def decoded_body(encoding: str, data: bytes, size: int) -> bytes:
    """Decode a body that arrives in parts, and check the bound of each slice."""
    decoder, found = BodyDecoder(encoding), b""
    for at in range(0, len(data), size):
        decoder.add(data[at : at + size])
        while decoder.pending:
            piece = decoder.decode(1 << 30)
            assert len(piece) <= SLICE_BYTES
            found += piece
    decoder.finish()
    return found


TEXTS = st.builds(lambda part, times: part * times, st.binary(max_size=300), st.integers(0, 2000))


@given(st.lists(TEXTS, max_size=4), st.integers(1, 100_000))
def test_decoder_returns_what_was_encoded(texts: list[bytes], size: int) -> None:
    """Text, slices and arriving parts do not depend on each other."""
    members = b"".join(gzip.compress(text, mtime=0) for text in texts)
    assert decoded_body("gzip", members, size) == b"".join(texts)
    text = b"".join(texts)
    assert decoded_body("deflate", zlib.compress(text), size) == text


@given(st.sampled_from(ENCODINGS), st.binary(max_size=2000), st.data())
def test_cut_body_is_an_error(encoding: str, text: bytes, data: st.DataObject) -> None:
    """No proper part of a body passes for the whole, except the empty one."""
    body = gzip.compress(text, mtime=0) if encoding == "gzip" else zlib.compress(text)
    cut = data.draw(st.integers(1, len(body) - 1))
    with pytest.raises(CompressionError):
        decoded_body(encoding, body[:cut], 500)
