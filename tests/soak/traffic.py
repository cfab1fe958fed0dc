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

KEYS = {"plain": "sk-soak-plain", "poor": "sk-soak-poor"}
KEYS_FILE = {
    "keys": [
        {"name": "plain", "key": KEYS["plain"], "first_priority": None},
        {"name": "poor", "key": KEYS["poor"], "requests_per_minute": 60},
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
ANSWERED = frozenset({200, 429})


@dataclass(frozen=True)
class TrafficRequest:
    """The bytes of a request, and the statuses that may answer it."""

    raw: bytes
    statuses: frozenset[int] = ANSWERED


def request_bytes(
    path: str, body: object = None, *, key: str | None = KEYS["plain"], head: str = ""
) -> bytes:
    """Return the bytes of a request, which is a POST if it has a body."""
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
            (CHAT, chat, ANSWERED),
            (CHAT, chat | {"n": 3, "stream_options": None}, ANSWERED),
            (
                CHAT,
                chat | {"tools": [TOOL]},
                ANSWERED | {400},
            ),  # 400 if the chat template supports no tools
            (CHAT, chat | {"response_format": SCHEMA, "max_tokens": 60}, ANSWERED),
            (COMPLETIONS, text, ANSWERED),
            (COMPLETIONS, text | {"n": 2, "logprobs": 3, "seed": 7}, ANSWERED),
            (COMPLETIONS, text | {"prompt": [prompt, "x = ", "y = "]}, ANSWERED),
            (COMPLETIONS, text | {"speculation": {"mode": "ngram", "trace": True}}, ANSWERED),
            (COMPLETIONS, text | {"priority": rng.randint(-2, 2), "stop": ["\n\n"]}, ANSWERED),
            (RESPONSES, {"input": prompt, "max_output_tokens": tokens, "stream": stream}, ANSWERED),
        ]
    )
    head = f"x-slo-ttft-ms: {rng.choice([1, 500, 20_000])}\r\n" if rng.random() < 0.3 else ""
    key = KEYS["poor"] if rng.random() < 0.1 else KEYS["plain"]
    return TrafficRequest(request_bytes(path, body, key=key, head=head), statuses)


def _querying(rng: random.Random) -> TrafficRequest:
    """Return a random request that generates nothing."""
    found = [
        request_bytes("/v1/models"),
        request_bytes("/health", key=None),
        request_bytes("/metrics"),
        request_bytes("/decisions"),
        request_bytes("/version", key=None),
        request_bytes("/openapi.json"),
        request_bytes("/"),
        request_bytes("/tokenize", {"prompt": rng.choice(PROMPTS)}),
        request_bytes("/detokenize", {"tokens": [1, 2, rng.randint(0, 500)]}),
    ]
    return TrafficRequest(rng.choice(found), frozenset({200}))


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
    """What the clients observed.

    Attributes:
        statuses: number of answers by status.
        wrong: number of wrong answers by description.
        visits: number of visits by kind.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    visits: Counter[str] = field(default_factory=Counter)

    def check_answer(self, asked: TrafficRequest, answer: bytes) -> None:
        """Count a whole answer, and check its status and its end."""
        words = answer[:15].split()
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        self.statuses[status] += 1
        about = asked.raw[:300]
        if status not in asked.statuses:
            self.wrong[f"{status} for {about!r}"] += 1
        head, _, body = answer.partition(b"\r\n\r\n")
        if status == 200 and b"text/event-stream" in head and count_endings(body) != 1:
            self.wrong[f"{count_endings(body)} endings for {about!r}"] += 1


def count_endings(body: bytes) -> int:
    """Return the number of ends in a stream."""
    kinds = (b"data: [DONE]", b'data: {"error"', b"event: response.completed",
             b"event: response.incomplete", b"event: response.failed")  # fmt: skip
    return sum(body.count(kind) for kind in kinds)


class TrafficClients:
    """Clients that send one request at a time until stopped."""

    def __init__(self, port: int, seed: int) -> None:
        """Store the port of the node and the seed; `run` sends the traffic."""
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
        await self._whole(_generating(self._rng))

    async def _look(self) -> None:
        await self._whole(_querying(self._rng))

    async def _malformed(self) -> None:
        await self._whole(_malformed(self._rng))

    async def _whole(self, asked: TrafficRequest) -> None:
        """Send a request and read its whole answer."""
        reader, writer = await self._connect()
        try:
            writer.write(asked.raw)
            with suppress(ConnectionError):  # the node does not read a body that is too large
                await writer.drain()
            writer.write_eof() if asked.raw.startswith(b"GET\r\n") else None
            answer = await reader.read(-1)
        finally:
            writer.close()
        if answer:
            self.observed.check_answer(asked, answer)

    async def _leave(self) -> None:
        """Disconnect before the request is complete, before the answer, or in the middle of it."""
        asked = _generating(self._rng)
        head = asked.raw.index(b"\r\n\r\n") + 4
        ends = [0, 10, head, (head + len(asked.raw)) // 2, *[len(asked.raw)] * 4]
        reader, writer = await self._connect()
        try:
            writer.write(asked.raw[: self._rng.choice(ends)])
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rng.choice([0.001, 0.05, 0.5])):
                    await reader.readexactly(self._rng.choice([1, 400, 4000]))
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.transport.abort() if self._rng.random() < 0.5 else writer.close()

    async def _read_slowly(self) -> None:
        """Read a long answer slowly through a small window, then the rest quickly or not at all."""
        loop = asyncio.get_running_loop()
        body = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}
        asked = TrafficRequest(request_bytes(COMPLETIONS, body))
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", self._port))
            await loop.sock_sendall(connection, asked.raw)
            answer = b""
            for _ in range(self._rng.randint(5, 50)):
                await asyncio.sleep(0.2)
                with suppress(BlockingIOError):
                    answer += connection.recv(400)
            if self._rng.random() < 0.5:
                return
            while data := await loop.sock_recv(connection, 65536):
                answer += data
        self.observed.check_answer(asked, answer)

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
