"""Streams over slow, long, stalled and hidden paths to their clients.

The paths are emulated in network namespaces, with the kernel's TCP on both sides, or by a relay
with small buffers. Clients read as soon as bytes arrive.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftgate.gateway.app import Listening
from draftgate.gateway.http.tcp_info import tcp_info
from draftgate.policies.pacing import PAUSED_S, Pacing, ReaderView, path_reason
from draftgate.policies.types import Pace
from tests.gateway.certificates import make_certificate
from tests.gateway.emulated_network import (
    SERVER,
    EmulatedNetwork,
    PathConditions,
    TokenBucketLink,
)
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    events,
    load_of,
    port_of,
    running,
    until,
)
from tests.gateway.tcp_proxy import TcpProxy, proxied

TOKENS = 1500
"""Most of them follow the first checks of a client, in which a busy machine sends many chunks."""

BODY = {"prompt": "def f(", "max_tokens": TOKENS, "ignore_eos": True, "seed": 7, "stream": True}
SLOW_BYTES_S = 6000
"""A quarter of what the simulator generates as chunks of one token, in bytes per second."""


@dataclass
class Stream:
    """A stream that a client has read.

    Attributes:
        chunks_s: arrival time of each chunk with text.
    """

    text: str = ""
    reason: str = ""
    chunks_s: list[float] = field(default_factory=list)

    def add(self, event: Any, at_s: float) -> None:
        """Add an event."""
        if event == "[DONE]":
            return
        text = "".join(choice["text"] for choice in event["choices"])
        self.text += text
        if text:
            self.chunks_s.append(at_s)
        if metrics := event.get("metrics"):
            self.reason = metrics["speculative_decoding"]["reason"]


async def read(
    connection: socket.socket,
    body: dict[str, Any],
    headers: str = "",
    tls: ssl.SSLContext | None = None,
) -> Stream:
    """Send a request over a connection, and read the stream to its end."""
    name = None if tls is None else "localhost"
    reader, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname=name)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n{headers}"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    stream = Stream()
    while line := await reader.readline():
        for event in events(line.decode().strip()):
            stream.add(event, time.monotonic())
    writer.close()
    return stream


async def connected(port: int) -> socket.socket:
    """Return a connection over the loopback device."""
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


@contextmanager
def permitted() -> Iterator[None]:
    """Skip the test if the system does not permit emulated networks."""
    try:
        yield
    except OSError as error:
        pytest.skip(f"needs network namespaces: {error}")


@asynccontextmanager
async def node_on(network: EmulatedNetwork | TokenBucketLink) -> AsyncIterator[Listening]:
    """Run a node in the namespace of a network's server."""
    with network.server.entered():
        async with running(host=SERVER, speculation="off") as gateway:
            yield gateway


@asynccontextmanager
async def emulated(path: PathConditions) -> AsyncIterator[Callable[[int], Any]]:
    """Emulate a path, and yield a function that connects a client to a port."""
    with permitted():
        network = EmulatedNetwork({1: path})
    with network.running():
        async with node_on(network) as gateway:
            yield gateway, partial(network.connect, 1, port_of(gateway))


@asynccontextmanager
async def token_bucket(bytes_s: int) -> AsyncIterator[Any]:
    """Emulate a slow path by a token bucket, and yield a function that connects a client."""
    with permitted():
        link = TokenBucketLink(bytes_s)
    try:
        async with node_on(link) as gateway:
            yield gateway, partial(link.connect, port_of(gateway))
    finally:
        link.close()


@pytest.fixture(scope="module")
def whole_text() -> str:
    """Return the text of the requests, from a client with a healthy path."""

    async def main() -> Stream:
        async with running(speculation="off") as gateway:
            return await read(await connected(port_of(gateway)), BODY)

    stream = asyncio.run(main())
    assert len(stream.chunks_s) > 0.95 * TOKENS  # a few tokens are parts of a character
    assert "client" not in stream.reason
    return stream.text


def slow_path() -> Any:
    return emulated(PathConditions(SLOW_BYTES_S, 0.05))


@pytest.mark.parametrize("network", [slow_path, partial(token_bucket, SLOW_BYTES_S)])
async def test_slow_path_gets_every_token_in_larger_chunks(network: Any, whole_text: str) -> None:
    """A client on a slow path gets the whole text in fewer than half as many chunks, sooner than
    the path carries chunks of one token, and the decision names the path."""
    async with network() as (_, connect):
        began_s = time.monotonic()
        stream = await read(await connect(), BODY)
        seconds = time.monotonic() - began_s
    assert stream.text == whole_text
    assert len(stream.chunks_s) < 0.5 * TOKENS
    assert seconds < 0.75 * TOKENS * 230 / SLOW_BYTES_S
    assert "the path to the client carries" in stream.reason


async def test_stalled_path_pauses_the_request_and_resumes(whole_text: str) -> None:
    """A request whose path loses all packets is paused sooner than by its backlog, and completes
    after the path has recovered."""
    path = PathConditions(delay_s=0.02)
    async with emulated(path) as (gateway, connect):
        reading = asyncio.create_task(read(await connect(), BODY))
        await until(lambda: path.packets > 20)
        path.passes, stalled_s = False, time.monotonic()
        await until(lambda: load_of(gateway.node).paused == 1)
        assert time.monotonic() - stalled_s < PAUSED_S / 2
        path.passes = True
        assert (await reading).text == whole_text


async def test_long_path_coalesces_a_few_tokens_at_full_pace(whole_text: str) -> None:
    """At a long round trip, tokens are coalesced for a small part of it, and the request runs at
    full pace."""
    rtt_s = 0.4
    async with emulated(PathConditions(delay_s=rtt_s / 2)) as (_, connect):
        stream = await read(await connect(), BODY)
    assert stream.text == whole_text
    assert "the round trip to the client takes 40" in stream.reason
    assert "drafts" not in stream.reason
    assert TOKENS / 10 < len(stream.chunks_s) < TOKENS / 2  # a token takes about 5 ms


async def test_relay_with_a_low_rate_is_a_slow_path(
    whole_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that reads slowly gets fewer and larger chunks, and every token."""
    reasons: list[str] = []

    def noted(reader: ReaderView, pacing: Pacing) -> str:
        reasons.append(path_reason(reader, pacing))
        return reasons[-1]

    monkeypatch.setattr("draftgate.gateway.http.readers.path_reason", noted)
    async with running(speculation="off") as gateway, proxied(gateway.url) as relay:
        relay.bytes_s = SLOW_BYTES_S
        stream = await read(await connected(_port(relay)), BODY)
    assert stream.text == whole_text
    assert len(stream.chunks_s) < 0.6 * TOKENS
    assert "tokens are coalesced" in stream.reason
    assert any("the client reads slowly" in reason for reason in reasons)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_encrypted_path_has_the_same_statistics(whole_text: str, tmp_path: Path) -> None:
    """A slow path with TLS is judged by the bytes of the encryption."""
    own = make_certificate(tmp_path, "own")
    files = {"tls_certfile": str(own.cert), "tls_keyfile": str(own.key)}
    async with running(speculation="off", **files) as gateway, proxied(gateway.url) as relay:
        relay.bytes_s = SLOW_BYTES_S
        stream = await read(await connected(_port(relay)), BODY, tls=own.trusting_context())
    assert stream.text == whole_text
    assert len(stream.chunks_s) < 0.6 * TOKENS
    assert "the path to the client carries" in stream.reason


async def test_relay_that_stops_pauses_the_request(whole_text: str) -> None:
    """A relay that stops reading pauses the request, which runs again when the relay does."""
    body = {**BODY, "logprobs": 5}  # more bytes than the buffers hold
    async with running(speculation="off") as gateway, proxied(gateway.url) as relay:
        relay.bytes_s = 1e6
        reading = asyncio.create_task(read(await connected(_port(relay)), body))
        await until(lambda: relay.passed_bytes > 4096)
        relay.freeze()
        await until(lambda: load_of(gateway.node).paused == 1)
        relay.thaw()
        assert (await reading).text == whole_text


async def test_proxy_hides_the_path(whole_text: str) -> None:
    """A request with the headers of a proxy is not judged by the proxy's connection, and the
    decision and the metrics say so."""
    async with running(speculation="off") as gateway:
        headers = "X-Forwarded-For: 203.0.113.9\r\n"
        reading = asyncio.create_task(read(await connected(port_of(gateway)), BODY, headers))
        await until(lambda: load_of(gateway.node).running == 1)
        async with client(gateway) as http:
            page = await _page_with(http, 'state="hidden"', 1.0)
        stream = await reading
        assert stream.text == whole_text
        assert stream.reason.endswith("; a proxy hides the path to the client")
        assert 'draftgate_slow_readers{model_name="draftgate-demo"} 0.0' in page


async def test_stated_rate_limits_the_request(scripted: ScriptedBackend) -> None:
    """After its first token, a request with a stated rate decodes at this rate, divided by its
    choices, without drafts."""
    async with running(backends=[scripted]) as gateway:
        headers = "x-client-rate-tps: 10\r\n"
        body = {**BODY, "max_tokens": 100, "n": 2}
        reading = asyncio.create_task(read(await connected(port_of(gateway)), body, headers))
        request = await scripted.submitted.get()
        scripted.emit(request, "word ")
        await until(lambda: scripted.paces != [])
        assert scripted.paces == [(request.request_id, Pace.SPARING)]
        assert scripted.tpots_s == [pytest.approx(0.2)]
        for choice in range(2):
            scripted.emit(request, "end", last=True, choice=choice)
        assert "the client takes at most 10 tokens/s, as it states" in (await reading).reason


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast", ""])
async def test_invalid_rate_is_rejected(rate: str) -> None:
    """A stated rate that is not a positive number is an error that names the header, also without a
    stream."""
    async with running() as gateway, client(gateway) as http:
        for stream in (True, False):
            response = await http.post(
                "/v1/completions",
                json={**BODY, "stream": stream},
                headers={"x-client-rate-tps": rate},
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "x-client-rate-tps"


def test_tcp_statistics_count_acknowledged_bytes() -> None:
    """The statistics of a TCP connection follow its traffic, and a Unix socket has none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        before = tcp_info(sender)
        sender.sendall(b"x" * 1000)
        assert len(receiver.recv(2000)) == 1000
        after = tcp_info(sender)
        sender.close()
        receiver.close()
    one, other = socket.socketpair()
    assert tcp_info(one) is None
    one.close()
    other.close()
    if before is None or after is None:
        pytest.skip("the system has no TCP statistics")
    assert after.acked_bytes - before.acked_bytes == 1000
    assert 0.0 < after.min_rtt_s < 1.0


def _port(relay: TcpProxy) -> int:
    return int(relay.url.rpartition(":")[2])


async def _page_with(http: Any, label: str, value: float) -> str:
    """Return the page of metrics once a series of the paths has a value."""
    async with asyncio.timeout(60):
        while True:
            page = str((await http.get("/metrics")).text)
            lines = [line for line in page.splitlines() if label in line]
            if any(line.endswith(f" {value}") for line in lines):
                return page
