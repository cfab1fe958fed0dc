"""Mixed traffic over plain sockets: valid, malformed, slow and abandoned requests."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

KEYS = {"plain": "sk-soak-plain", "poor": "sk-soak-poor", "operator": "sk-soak-operator"}
KEYS_FILE = {
    "keys": [
        {"name": "plain", "key": KEYS["plain"], "first_priority": None},
        {"name": "poor", "key": KEYS["poor"], "requests_per_minute": 60},
        {"name": "operator", "key": KEYS["operator"], "role": "operator"},
    ]
}
MAX_BODY_BYTES = 256 << 10

PROMPTS = [
    "def read_lines(path):\n",
    "import asyncio\n\nclass Server:\n",
    "for i in range(",
    "class Point:\n    def __init__(self, x, y):\n",
    "\n".join(f"x{n} = {n}" for n in range(60)),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "point",
        "schema": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        },
    },
}

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
OK_OR_BUSY = frozenset({200, 429})


@dataclass(frozen=True)
class TrafficRequest:
    """The bytes of a request and the allowed statuses of its response."""

    raw: bytes
    statuses: frozenset[int] = OK_OR_BUSY


def request_bytes(
    path: str, body: object = None, *, key: str | None = KEYS["plain"], head: str = ""
) -> bytes:
    """Return the bytes of a request, which is a POST if a body is given."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head += "" if key is None else f"Authorization: Bearer {key}\r\n"
    head += "" if body is None else f"Content-Length: {len(data)}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n".encode() + data


def _generating(rng: random.Random) -> TrafficRequest:
    """Return a random request that generates tokens."""
    prompt, tokens = rng.choice(PROMPTS), rng.randint(1, 48)
    stream = rng.random() < 0.6
    shared: dict[str, Any] = {"stream": stream, "temperature": rng.choice([0, 0, 1.0])}
    messages = [{"role": "user", "content": prompt}]
    chat = {"messages": messages, "max_tokens": tokens, **shared}
    text = {"prompt": prompt, "max_tokens": tokens, **shared}
    path, body, statuses = rng.choice(
        [
            (CHAT, chat, OK_OR_BUSY),
            (CHAT, chat | {"n": 3, "stream_options": None}, OK_OR_BUSY),
            (MESSAGES, chat | {"stop_sequences": ["\n\n"]}, OK_OR_BUSY),
            # A chat template without tools gives a 400.
            (CHAT, chat | {"tools": [TOOL]}, OK_OR_BUSY | {400}),
            (CHAT, chat | {"response_format": SCHEMA, "max_tokens": 60}, OK_OR_BUSY),
            (COMPLETIONS, text, OK_OR_BUSY),
            (COMPLETIONS, text | {"n": 2, "logprobs": 3, "seed": 7}, OK_OR_BUSY),
            (COMPLETIONS, text | {"prompt": [prompt, "x = ", "y = "]}, OK_OR_BUSY),
            (
                COMPLETIONS,
                text | {"speculation": {"mode": "ngram", "trace": True}},
                OK_OR_BUSY,
            ),
            (
                COMPLETIONS,
                text | {"priority": rng.randint(-2, 2), "stop": ["\n\n"]},
                OK_OR_BUSY,
            ),
            (
                RESPONSES,
                {"input": prompt, "max_output_tokens": tokens, "stream": stream},
                OK_OR_BUSY,
            ),
        ]
    )
    head = f"x-slo-ttft-ms: {rng.choice([1, 500, 20_000])}\r\n" if rng.random() < 0.3 else ""
    key = KEYS["poor"] if rng.random() < 0.1 else KEYS["plain"]
    return TrafficRequest(request_bytes(path, body, key=key, head=head), statuses)


def _querying(rng: random.Random) -> TrafficRequest:
    """Return a random request that generates no tokens."""
    requests = [
        request_bytes("/v1/models"),
        request_bytes("/health", key=None),
        request_bytes("/metrics", key=KEYS["operator"]),
        request_bytes("/decisions"),
        request_bytes("/decisions", key=KEYS["operator"]),
        request_bytes("/version", key=None),
        request_bytes("/openapi.json"),
        request_bytes("/"),
        request_bytes("/tokenize", {"prompt": rng.choice(PROMPTS)}),
        request_bytes("/detokenize", {"tokens": [1, 2, rng.randint(0, 500)]}),
    ]
    return TrafficRequest(rng.choice(requests), frozenset({200}))


def _malformed(rng: random.Random) -> TrafficRequest:
    """Return a random invalid request."""
    good = {"prompt": "x", "max_tokens": 4}
    huge = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    name = "".join(rng.choices("abcdefghij", k=8))
    bodies = [
        b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": 1}',
        b'{"prompt": "x", "max_tokens": "many"}',
        b'{"prompt": "x", "n": -1}', b'{"prompt": "\\ud800"}', b"[" * 100_000,
        json.dumps({"prompt": "x" * 200_000}).encode(), json.dumps(good | {name: 1}).encode(),
        json.dumps(good | {"model": name}).encode(), json.dumps(good | {"stop": [""]}).encode(),
        json.dumps({"messages": [{"role": name, "content": "x"}]}).encode(), huge,
    ]  # fmt: skip
    path = rng.choice([CHAT, COMPLETIONS, RESPONSES, "/tokenize"])
    odd = [
        request_bytes(f"/{name}"),
        request_bytes(CHAT),
        request_bytes(COMPLETIONS, good, key=None),
        request_bytes(COMPLETIONS, good, key=name),
        request_bytes(COMPLETIONS, good, head="x-slo-ttft-ms: soon\r\n"),
        request_bytes(COMPLETIONS, good, head="Content-Encoding: gzip\r\n"),
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ]
    request = request_bytes(path, rng.choice(bodies)) if rng.random() < 0.6 else rng.choice(odd)
    return TrafficRequest(request, frozenset({200, 400, 401, 404, 405, 413, 414, 429}))


@dataclass
class Observations:
    """The observations of the clients.

    Attributes:
        statuses: number of responses by status.
        wrong: number of wrong responses by description.
        visits: number of visits by kind.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    visits: Counter[str] = field(default_factory=Counter)

    def check_response(self, request: TrafficRequest, response: bytes) -> None:
        """Count a whole response and check its status and its end."""
        words = response[:15].split()
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        self.statuses[status] += 1
        about = request.raw[:300]
        if status not in request.statuses:
            self.wrong[f"{status} for {about!r}"] += 1
        head, _, body = response.partition(b"\r\n\r\n")
        if status == 200 and b"text/event-stream" in head and count_endings(body) != 1:
            self.wrong[f"{count_endings(body)} endings for {about!r}"] += 1


def count_endings(body: bytes) -> int:
    """Return the number of end events in a stream."""
    # Streams of responses end with [DONE], too.
    kinds = (b"data: [DONE]", b'data: {"error"', b"event: message_stop", b"event: error")
    return sum(body.count(kind) for kind in kinds)


class TrafficClients:
    """Clients that each send a request at a time until stopped."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._stopped = asyncio.Event()
        self.observed = Observations()

    def stop(self) -> None:
        """Let every client finish its visit and stop."""
        self._stopped.set()

    async def run(self, clients: int) -> None:
        """Send traffic from this number of clients until stopped."""
        await asyncio.gather(*(self._visits() for _ in range(clients)))

    async def _visits(self) -> None:
        ways: Sequence[tuple[Callable[[], Any], int]] = (
            (self._generate, 40),
            (self._look, 15),
            (self._malformed, 20),
            (self._leave, 20),
            (self._read_slowly, 5),
            (self._watch, 2),
        )
        visits, weights = [way for way, _ in ways], [weight for _, weight in ways]
        while not self._stopped.is_set():
            (visit,) = self._rng.choices(visits, weights)
            self.observed.visits[visit.__name__.removeprefix("_")] += 1
            with suppress(ConnectionError):
                async with asyncio.timeout(120):
                    await visit()

    async def _generate(self) -> None:
        await self._send(_generating(self._rng))

    async def _look(self) -> None:
        await self._send(_querying(self._rng))

    async def _malformed(self) -> None:
        await self._send(_malformed(self._rng))

    async def _send(self, request: TrafficRequest) -> None:
        """Send a request and read the whole response."""
        reader, writer = await self._connect()
        try:
            writer.write(request.raw)
            with suppress(ConnectionError):  # The node does not read an oversized body.
                await writer.drain()
            writer.write_eof() if request.raw.startswith(b"GET\r\n") else None
            response = await reader.read(-1)
        finally:
            writer.close()
        if response:
            self.observed.check_response(request, response)

    async def _leave(self) -> None:
        """Disconnect before the request is complete, before the response, or within the
        response."""
        request = _generating(self._rng)
        head = request.raw.index(b"\r\n\r\n") + 4
        ends = [0, 10, head, (head + len(request.raw)) // 2, *[len(request.raw)] * 4]
        reader, writer = await self._connect()
        try:
            writer.write(request.raw[: self._rng.choice(ends)])
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rng.choice([0.001, 0.05, 0.5])):
                    await reader.readexactly(self._rng.choice([1, 400, 4000]))
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.transport.abort() if self._rng.random() < 0.5 else writer.close()

    async def _read_slowly(self) -> None:
        """Read a long response slowly through a small window, then read or drop the rest."""
        loop = asyncio.get_running_loop()
        body = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}
        request = TrafficRequest(request_bytes(COMPLETIONS, body))
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", self._port))
            await loop.sock_sendall(connection, request.raw)
            response = b""
            for _ in range(self._rng.randint(5, 50)):
                await asyncio.sleep(0.2)
                with suppress(BlockingIOError):
                    response += connection.recv(400)
            if self._rng.random() < 0.5:
                return
            while data := await loop.sock_recv(connection, 65536):
                response += data
        self.observed.check_response(request, response)

    async def _watch(self) -> None:
        """Read the live samples for a while, as the page does."""
        reader, writer = await self._connect()
        try:
            writer.write(request_bytes("/live"))
            for _ in range(self._rng.randint(1, 20)):
                await reader.readline()
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
