"""A server that streams tokens on a fixed schedule, so that a client measures only its own cost.

`python -m draftgate.loadgen.sending.stub_server` prints its address and streams `max_tokens`
tokens. The first token follows after `--ttft-ms`, the others `--itl-ms` apart on an absolute
schedule, one write each. The server implements only the HTTP/1.1 subset for a client that sends one
request at a time per connection. It therefore uses less CPU than the client under test. `GET /cpu`
reports its CPU time.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Annotated, Final, NamedTuple, cast

import typer
import uvloop
from msgspec import DecodeError, Struct
from msgspec.json import Decoder, encode

from draftgate.loadgen.sending.client import allow_many_connections

MODEL: Final = "stub"

_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_HEAD_END: Final = b"\r\n\r\n"


class TokenPace(NamedTuple):
    """The schedule of tokens: the first after `ttft_s`, each next token `itl_s` later."""

    ttft_s: float
    itl_s: float


class _Body(Struct):
    max_tokens: int


_decoder: Final = Decoder(_Body)


class StubProtocol(asyncio.Protocol):
    """The server side of one connection."""

    _streams = 0

    def __init__(self, pace: TokenPace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A TCP transport, though uvloop's does not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(_HEAD_END)
        if found and len(body) >= _content_length(head):
            self._received = b""
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /v1/models "):
            self._write(_json({"data": [{"id": MODEL}]}))
        elif head.startswith(b"GET /cpu "):
            self._write(_json({"cpu_s": time.process_time()}))
        elif head.startswith(b"POST /v1/"):
            try:
                self._stream(_decoder.decode(body).max_tokens)
            except DecodeError as error:
                self._write(_json({"error": {"message": str(error)}}, b"400 Bad Request"))
        else:
            self._write(_json({"error": {"message": "not found"}}, b"404 Not Found"))

    def _stream(self, tokens: int) -> None:
        StubProtocol._streams += 1
        stream_id = f"{MODEL}-{StubProtocol._streams}"
        text = _event(stream_id, [_choice(None)])
        last = _event(stream_id, [_choice("length")])
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        end = _event(stream_id, [], usage=usage) + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        first_at = self._loop.time() + self._pace.ttft_s

        def send_token(index: int) -> None:
            head = _STREAM_HEAD if index == 0 else b""
            if index == tokens - 1:
                self._write(head + last + end)
            elif self._transport is not None:
                self._write(head + text)
                next_at = first_at + (index + 1) * self._pace.itl_s
                self._loop.call_at(next_at, send_token, index + 1)

        self._loop.call_at(first_at, send_token, 0)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _content_length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0] or b"0")


def _choice(reason: str | None) -> dict[str, object]:
    return {"index": 0, "text": " token", "finish_reason": reason}


def _event(stream_id: str, choices: list[dict[str, object]], **more: object) -> bytes:
    event = {"id": stream_id, "object": "text_completion", "choices": choices, **more}
    return _chunked(b"data: " + encode(event) + b"\n\n")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json(content: object, status: bytes = b"200 OK") -> bytes:
    body = encode(content)
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


async def serve(pace: TokenPace, port: int = 0) -> None:
    """Print the address and serve on the loopback interface until SIGTERM or SIGINT."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: StubProtocol(pace), "127.0.0.1", port, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201
    await stop.wait()
    server.close()


def main(
    ttft_ms: Annotated[float, typer.Option(help="Delay before the first token.")] = 50.0,
    itl_ms: Annotated[float, typer.Option(help="Delay between two tokens.")] = 20.0,
    port: Annotated[int, typer.Option(help="Port, or 0 for a free port.")] = 0,
) -> None:
    """Stream tokens on a fixed schedule."""
    allow_many_connections()
    uvloop.run(serve(TokenPace(ttft_ms / 1e3, itl_ms / 1e3), port))


if __name__ == "__main__":
    typer.run(main)
