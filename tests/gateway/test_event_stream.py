"""Tests of framing and back-pressure of event streams."""

from __future__ import annotations

import asyncio

from draftgate.backends.types import Delta, FinishReason, SpeculationOutcome
from draftgate.gateway.app import Listening
from tests.gateway.harness import ScriptedBackend, events, port_of, post_raw, running

DELTAS, CHARACTERS = 128, 1 << 18
"""Text of 32 MB, which exceeds the socket buffers of both ends several times."""


async def test_http_1_0_client_gets_events_without_chunks(sim: Listening) -> None:
    """The server sends an HTTP/1.0 client events without chunks and closes the connection at the
    end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(sim))
    body = b'{"prompt": "a", "max_tokens": 3, "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head, _, sent = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.0 200")
    assert b"chunked" not in head.lower()
    assert sent.startswith(b"data: {")
    assert sent.endswith(b"data: [DONE]\n\n")


async def test_stopped_reader_loses_nothing() -> None:
    """The server merges deltas while a client stops reading and sends all of them later."""
    backend = ScriptedBackend()
    async with running(backends=[backend]) as gateway:
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        reader, writer = await post_raw(gateway, "/v1/completions", body)
        request = await backend.submitted.get()
        for number in range(DELTAS):
            last = number == DELTAS - 1
            delta = Delta(
                0,
                (1,),
                _text(number),
                (),
                FinishReason.STOP if last else None,
                SpeculationOutcome() if last else None,
            )
            backend.sinks.deliver([(request.request_id, delta)])
            for _ in range(5):
                await asyncio.sleep(0)
        data = await _read_to_end(reader)
        writer.close()
    assert data.count(b"data: ") < DELTAS  # the server merged the deltas that waited for the client
    chunks = [event for event in events(_decode_chunks(data)) if event != "[DONE]"]
    texts = (choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert "".join(texts) == "".join(map(_text, range(DELTAS)))


def _text(number: int) -> str:
    return chr(ord("a") + number % 26) * CHARACTERS


def _decode_chunks(data: bytes) -> str:
    left, body = data.partition(b"\r\n\r\n")[2], b""
    while left:
        size, _, left = left.partition(b"\r\n")
        length = int(size, 16)
        body, left = body + left[:length], left[length + 2 :]
    return body.decode()


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += await reader.read(1 << 20)
    return bytes(data)
