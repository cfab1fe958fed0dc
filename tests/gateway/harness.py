"""A node on a free local port, and a backend whose steps a test decides."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from aiohttp import web_app

from draftgate.backends.base import DeltaSink
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import BackendFailed, RequestRejected
from draftgate.backends.sim.tokens import shipped_tokenizer
from draftgate.backends.streams import DeltaSinks
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    ModelCard,
    Pace,
    Phases,
    SpeculationOutcome,
)
from draftgate.gateway.app import Listening, build_fleets, listening, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.http.peers.stream import PeerStream
from draftgate.gateway.node import Node
from draftgate.gateway.state.commands import ListWorkers
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.store import Store
from draftgate.gateway.tracing import Tracing
from draftgate.policies.scaling import DemandView, ScalingAdvice
from draftgate.policies.types import WorkerLoad

JOIN = "redis://127.0.0.1:6379"
"""An address that nodes ignore, because they use the store of the test."""

PATIENCE_S = 60.0
"""Timeout of a wait in seconds, which only failures reach."""

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or not (SHIPPED_MODEL / "model.safetensors").is_file(),
    reason="needs torch and the shipped model",
)


class ScriptedBackend:
    """A `Backend` whose worker the test controls."""

    recovers = False

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[GenerationRequest] = asyncio.Queue()
        self.abandoned: asyncio.Queue[str] = asyncio.Queue()
        self.paces: list[tuple[str, Pace]] = []  # (request id, pace) of each call, in order
        self.tpots_s: list[float] = []  # of each call
        self.sinks = DeltaSinks(self._end)
        self.gate = asyncio.Event()  # start() waits for this event
        self.gate.set()
        self.card = ModelCard("scripted", "scripted", 1000, "test", 1)
        self.tokenizer = shipped_tokenizer()
        self.failure: str | None = None
        self.progress = 1.0
        self.kv_tokens = 500
        self.max_sequences = 0  # unknown
        self.proposers: tuple[str, ...] = ("ngram",)
        self.waiting = 0
        self.steps: int | None = None  # unknown

    async def start(self) -> None:
        await self.gate.wait()

    async def stop(self) -> None:
        self.crash(self.failure or "stopped")

    def check(self, request: GenerationRequest) -> None:
        needed = len(request.prompt_ids) + request.sampling.max_tokens
        for limit in (self.card.max_model_len, self.kv_tokens):
            if needed > limit:
                param = "prompt" if len(request.prompt_ids) >= limit else "max_tokens"
                raise RequestRejected(f"{limit} fit, not {needed}", param, limit)

    def submit(self, request: GenerationRequest, sink: DeltaSink) -> None:
        if self.failure is not None:
            raise BackendFailed(self.failure)
        self.sinks.open(request, sink)
        self.submitted.put_nowait(request)

    def cancel(self, request_id: str) -> None:
        self.sinks.cancel(request_id)

    def _end(self, request_id: str, cancelled: bool) -> None:
        if cancelled:
            self.abandoned.put_nowait(request_id)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        self.paces.append((request_id, pace))
        self.tpots_s.append(tpot_s)

    def load(self) -> WorkerLoad:
        running = len(self.sinks) - self.waiting
        known = {"max_sequences": self.max_sequences, "steps": self.steps}
        return WorkerLoad(running, self.waiting, 8, 8, 0.0, 0.5, self.proposers, **known)

    def unread_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens of a request wait for its client, or for the other node."""
        sink = self.sinks._open.get(request.request_id)
        if isinstance(sink, PeerStream):
            return sink._unread.tokens
        return sink.run.unread_tokens if isinstance(sink, Hold) else 0

    def emit(
        self,
        request: GenerationRequest,
        text: str,
        *,
        last: bool = False,
        choice: int = 0,
        cached_tokens: int = 0,
        phases: Phases | None = None,
    ) -> None:
        """Deliver a text as one step with one token for each word."""
        ids = tuple(range(max(1, len(text.split()))))
        reason = FinishReason.STOP if last else None
        outcome = SpeculationOutcome() if last else None
        delta = Delta(choice, ids, text, (), reason, outcome, cached_tokens, phases=phases)
        self.sinks.deliver([(request.request_id, delta)])

    def crash(self, reason: str, kind: type[BackendFailed] = BackendFailed) -> None:
        """Fail the worker permanently, with an error of this kind for its streams."""
        self.failure = reason
        self.sinks.fail(reason, kind)


class FixedAdvisor:
    """A scaling advisor with a given advice, which keeps the last view."""

    def __init__(self, advice: ScalingAdvice) -> None:
        self.advice = advice

    def update(self, view: DemandView, now_s: float) -> ScalingAdvice:
        self.view = view
        return self.advice


@asynccontextmanager
async def running(
    *,
    backends: Sequence[ScriptedBackend] = (),
    further: Mapping[str, ScriptedBackend] = MappingProxyType({}),
    tracing: Tracing | None = None,
    start: bool = True,
    store: Store | None = None,
    **settings: Any,
) -> AsyncIterator[Listening]:
    """Run a node on a free port with the simulator, or with one worker per given backend.

    Args:
        further: the worker of each further model, by name.
    """
    settings = {"port": 0, "backend": "sim", "log_level": "error", **settings}
    if backends:
        settings["devices"] = tuple(range(len(backends)))
        settings["models"] = tuple(f"{name}=unused" for name in further)
    config = ServeConfig(**settings)
    fleets = build_fleets(config)
    if backends:
        scripted = {None: backends, **{name: [one] for name, one in further.items()}}
        fleets = [
            (
                plan,
                fleet if plan.config.upstream else scripted_fleet(plan.config, scripted[plan.name]),
            )
            for plan, fleet in fleets
        ]
    node = Node(config, fleets, store or MemoryStore(), tracing or Tracing())
    async with listening(node) as gateway:
        try:
            if start:
                await start_workers(node)
            yield gateway
        finally:
            await node.stop()
            # aiohttp caches up to 1,024 handlers, which would keep every closed node in memory.
            web_app._cached_build_middleware.cache_clear()


def scripted_fleet(config: ServeConfig, backends: Sequence[ScriptedBackend]) -> Fleet:
    """Return a fleet whose workers use the given backends by device index."""
    return Fleet(lambda: lambda worker: backends[worker.device_index], config.worker_configs())


def load_of(node: Node, worker: int = 0) -> WorkerLoad:
    """Return the load of a worker of the node."""
    return node.fleet.workers[worker].backend.load()


async def leased(node: Node, worker: int = 0) -> int:
    """Return the leased tokens of a worker of the node. The store must know the worker."""
    worker_id = node.fleet.workers[worker].worker_id
    views = (await node.store.call(ListWorkers())).workers
    return next(view.leased_tokens for view in views if view.worker_id == worker_id)


def is_idle(node: Node) -> bool:
    """Return whether the node holds no resources of any request."""
    loads = [worker.backend.load() for worker in node.fleet.workers]
    busy = [w for w in loads if w.running + w.waiting or w.kv_blocks_free < w.kv_blocks_total]
    reserved = sum(worker.reserved_tokens for worker in node.fleet.workers)
    return not busy and reserved == node.in_flight == len(node.dispatcher.queue) == 0


async def placed(node: Node, job: Job) -> list[Hold]:
    """Return the holds of a job's prompts on scripted workers."""
    async with node.dispatcher.run(job) as run:
        reading = asyncio.ensure_future(anext(run.deltas))
        await until(lambda: len(run.holds) == len(job.prompts) or reading.done())
        if reading.done():
            reading.result()
        reading.cancel()
        await asyncio.wait({reading})
        return [hold for _, hold in sorted(run.holds.items())]


@asynccontextmanager
async def client(gateway: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """Open a plain HTTP client of a node."""
    async with httpx.AsyncClient(base_url=gateway.url, verify=False, timeout=PATIENCE_S) as http:
        yield http


@asynccontextmanager
async def open_stream(
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[httpx.Response]:
    """Open a stream, read its first line, and keep the stream open for the block."""
    async with http.stream("POST", path, json=body, headers=headers) as response:
        lines = response.aiter_lines()  # httpx closes the stream when nothing refers to this
        await anext(lines)
        yield response


async def accepted_request(
    backend: ScriptedBackend, response: asyncio.Task[httpx.Response]
) -> GenerationRequest:
    """Return what the worker gets from a request, or fail with a response that comes before."""
    submitted = asyncio.create_task(backend.submitted.get())
    await asyncio.wait({response, submitted}, return_when=asyncio.FIRST_COMPLETED)
    if not submitted.done():
        submitted.cancel()
        pytest.fail((await response).text)
    return submitted.result()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, and raise `TimeoutError` after `PATIENCE_S`."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the condition sets no event
            await asyncio.sleep(0.001)


async def eventually(
    condition: Callable[[], Awaitable[bool]], patience_s: float = PATIENCE_S
) -> None:
    """Wait until an awaitable condition holds, and raise `TimeoutError` after `patience_s`."""
    async with asyncio.timeout(patience_s):
        while not await condition():  # noqa: ASYNC110 - the condition sets no event
            await asyncio.sleep(0.005)


def port_of(gateway: Listening) -> int:
    return int(gateway.url.rpartition(":")[2])


async def post_raw(
    gateway: Listening, path: str, body: dict[str, Any], headers: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a bare socket, which the caller must read or close."""
    connection = socket.socket()
    # Segments of Ethernet. One of loopback's 64 kB fills the server's send queue, and then waits
    # 40 ms for a delayed acknowledgement.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port_of(gateway)))
    reader, writer = await asyncio.open_connection(sock=connection)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


def events(text: str) -> list[Any]:
    """Return the decoded data of every event, with `[DONE]` as text."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]
