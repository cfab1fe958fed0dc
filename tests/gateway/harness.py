"""A node on a free port of this machine, and a backend whose every step a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from backends.base import WorkerConfig
from backends.errors import BackendFailed, RequestRejected
from backends.registry import create_backend
from backends.shipped import SHIPPED_MODEL
from backends.streams import DeltaStreams
from backends.tokenizer import Tokenizer
from backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    ModelCard,
    SpeculationOutcome,
)
from gateway.app import Listening, listening, start_worker
from gateway.config import ServeConfig
from gateway.node import Node
from gateway.state.memory import MemoryStore
from gateway.telemetry.tracing import NoTracing, Tracing
from policies.types import WorkerLoad

PATIENCE_S = 10.0


class ScriptedBackend:
    """Implements `Backend`; the test plays the worker."""

    def __init__(self, config: WorkerConfig | None = None) -> None:
        self.submitted: asyncio.Queue[GenerationRequest] = asyncio.Queue()
        self.abandoned: asyncio.Queue[str] = asyncio.Queue()
        self.streams = DeltaStreams(self.abandoned.put_nowait)
        self.gate = asyncio.Event()  # start() waits for it
        self.gate.set()
        self.card = ModelCard("scripted", "scripted", 1000, "test", 1)
        self.tokenizer = Tokenizer(SHIPPED_MODEL)
        self.failure: str | None = None
        self.kv_tokens = 500

    async def start(self) -> None:
        await self.gate.wait()

    async def stop(self) -> None:
        self.streams.fail("stopped")

    def check(self, request: GenerationRequest) -> None:
        asked = len(request.prompt_ids) + request.sampling.max_tokens
        for limit in (self.card.max_model_len, self.kv_tokens):
            if asked > limit:
                raise RequestRejected(f"{limit} fit, not {asked}", "max_tokens", limit)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        if self.failure is not None:
            raise BackendFailed(self.failure)
        stream = self.streams.open(request)
        self.submitted.put_nowait(request)
        return stream

    def load(self) -> WorkerLoad:
        return WorkerLoad(len(self.streams), 0, 8, 8, 0.0, 0.5, ("ngram",))

    def emit(self, request: GenerationRequest, text: str, *, last: bool = False, choice: int = 0):
        """Deliver a text as one step; one token per word stands for its tokens."""
        ids = tuple(range(max(1, len(text.split()))))
        reason = FinishReason.STOP if last else None
        outcome = SpeculationOutcome() if last else None
        delta = Delta(choice, ids, text, (), reason, outcome)
        self.streams.deliver([(request.request_id, delta)])

    def crash(self, reason: str) -> None:
        """Break for good."""
        self.failure = reason
        self.streams.fail(reason)


@asynccontextmanager
async def running(
    *,
    backend: Any = None,
    backend_name: str = "sim",
    tracing: Tracing | None = None,
    start: bool = True,
    **settings: Any,
) -> AsyncIterator[Listening]:
    """Serve the simulator, or the given backend, on a free port."""
    config = ServeConfig(**{"port": 0, "backend": backend_name, "log_level": "error", **settings})
    if backend is None:
        backend = create_backend(config.backend, config.worker_config())
    node = Node(config, backend, MemoryStore(), tracing or NoTracing())
    async with listening(node) as where:
        if start:
            await start_worker(node)
        try:
            yield where
        finally:
            await node.backend.stop()


@asynccontextmanager
async def client(where: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of a node."""
    async with httpx.AsyncClient(base_url=where.url, timeout=PATIENCE_S) as http:
        yield http


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; fails after `PATIENCE_S`."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


def port_of(where: Listening) -> int:
    return int(where.url.rpartition(":")[2])


async def post_raw(
    where: Listening, path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a bare socket; the caller reads, or leaves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(where))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


def events(text: str) -> list[Any]:
    """Return the data of every event, `[DONE]` as text; comments are left out."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]
