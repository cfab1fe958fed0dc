"""Tests of requests of lower classes that give their places at upstreams to others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftgate.backends.base import TokenUsage, UpstreamCall
from draftgate.backends.errors import UpstreamFailed, UpstreamUnreachable
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.admission import DEFAULT_BOUNDS, AdmissionController, Entry
from draftgate.gateway.dispatch.claims import Claims
from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.dispatch.upstreams.forward_state import LOST
from draftgate.gateway.dispatch.upstreams.forwarder import Forwarder
from draftgate.gateway.dispatch.upstreams.forwarding import ForwardedRequest
from draftgate.gateway.dispatch.upstreams.preemption import PreemptibleRequest
from draftgate.gateway.dispatch.upstreams.prefixes import UpstreamPrefixes
from draftgate.gateway.dispatch.upstreams.rules import ForwardingRules
from draftgate.gateway.dispatch.waiting import Waiting
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.state.memory.quotas import MemoryQuotas
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.ordering.fair import STARVATION_S
from draftgate.policies.registry import admission_policy, ordering_policy, routing_policy
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.types import RequestView, ServiceLevel, WorkerLoad
from tests.gateway.continued_engines import TEXT, Engine, Fault, events_of
from tests.gateway.harness import client, events, is_idle, until
from tests.gateway.test_continued_streams import (
    CHAT,
    TEXTS,
    USAGE,
    body_of,
    check_stream,
    cut_after,
    names,
    shown_text,
)
from tests.gateway.upstreams import WHOLE, ScriptedUpstream, forwarding, upstream

MOST = 2
LOW, HIGH = 5, 0
WHOLE_BODY = {"model": "theirs", "prompt": "x", "max_tokens": 5}

# Models of upstreams in virtual time.


class TimedExchange:
    """A response whose events arrive one after another."""

    status, headers, error_sent, translation = 200, {}, False, None

    def drafts(self) -> None:
        """vLLM reports none unless it is told to."""

    def __init__(self, upstream: TimedUpstream, blocks: Sequence[bytes], streams: bool) -> None:
        self.streaming = streams
        self.body = None
        self.outputs = self.ends = 0
        self._upstream = upstream
        self._blocks = list(blocks)
        self._closed = asyncio.Event()

    async def read(self) -> bytes:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._upstream.event_s):
                await self._closed.wait()
        if self._closed.is_set():
            raise UpstreamFailed("closed")
        if not self._blocks:
            return b""
        self.outputs += 1
        return self._blocks.pop(0)

    def usage(self) -> TokenUsage:
        return TokenUsage(0, 0, self.outputs)

    async def finish(self) -> None:
        self.close()

    def close(self) -> None:
        self.ends += 1
        if self.ends == 1:
            self._closed.set()
            self._upstream.running -= 1


class TimedUpstream:
    """An upstream that generates the text of `continued_engines` for `most` requests at a time."""

    card = SimpleNamespace(numerics_class=None, root="http://upstream")
    failure, pause, progress, recovers, aliases = None, None, 1.0, True, {}

    def __init__(self, name: str, most: int, event_s: float, preemptible: bool) -> None:
        self.most = most
        self.event_s = event_s
        self.running = 0
        self.worker = FleetWorker(name, self)
        self.exchanges: list[TimedExchange] = []
        self._preemptible = preemptible

    def serves(self, model: str) -> bool:
        return True

    def may_abort(self, call: UpstreamCall) -> bool:
        return self._preemptible

    def load(self) -> WorkerLoad:
        return WorkerLoad(self.running, 0, 0, 0, 0.0, 0.0, (), max_sequences=self.most)

    async def forward(self, call: UpstreamCall) -> TimedExchange:
        if call.path == "/tokenize":
            raise UpstreamUnreachable("it counts no tokens")
        self.running += 1
        assert self.running <= self.most, "an upstream never gets more requests than it can run"
        try:
            await asyncio.sleep(self.event_s)
        except BaseException:
            self.running -= 1
            raise
        blocks = events_of(call.path, json.loads(call.body), "a")
        exchange = TimedExchange(self, blocks if call.stream else [b"".join(blocks)], call.stream)
        self.exchanges.append(exchange)
        return exchange


class Client:
    """A client that reads its response to the end.

    Attributes:
        received: what it has got, or None if it left earlier.
    """

    def __init__(
        self, forwarder: Forwarder, number: int, priority: int, kind: str, begin_s: float
    ) -> None:
        need = CapacityNeed(1, 10, 30)
        service = ServiceLevel(priority=priority)
        self.entry = Entry(f"r-{number}", (need,), 20, service)
        self.streams, self.begin_s = kind != "whole", begin_s
        body = body_of(TEXTS, **({"stop": ["never"]} if kind == "final" else {}))
        call = UpstreamCall("POST", TEXTS, {}, json.dumps(body).encode(), stream=self.streams)
        self.request = ForwardedRequest(forwarder, call, self.entry, RequestView(10, 20, 1.0))
        self.received = b""

    async def run(self) -> None:
        await asyncio.sleep(self.begin_s)
        request = self.request
        try:
            await request.start()
            while True:
                self.received += (block := await request.read())
                if request.state is LOST:
                    await request.resume()
                elif not block:
                    break
        except BaseException as error:
            await request.end(error)
            raise
        await request.end()


def forwarder_of(upstreams: Sequence[TimedUpstream]) -> Forwarder:
    """Return a forwarder to some upstreams, which may lose requests to others."""
    clock = asyncio.get_running_loop().time
    fleet = Fleet(lambda: None, ())
    fleet.workers = tuple(one.worker for one in upstreams)
    router = Router(routing_policy("least_loaded"), Random(0).random, KvPulls(clock))
    claims = Claims(fleet, MemoryStore(clock))
    queue = CentralQueue(fleet, ordering_policy("fair"), router, claims, clock, 10_000.0)
    quotas = Quotas(MemoryQuotas(clock), {}, clock)
    admission = AdmissionController(
        fleet, queue, admission_policy("none"), quotas, DEFAULT_BOUNDS, clock
    )
    pools: Any = SimpleNamespace(
        choose=lambda *_: None, record_other=lambda *_: None, record_move=lambda *_, **__: None
    )
    return Forwarder(
        fleet,
        queue,
        admission,
        pools,
        RetryBudget(0.0, 0.0),  # no retry is allowed, and none is needed
        prefixes=UpstreamPrefixes(clock, lambda _: None, router.promises),
        on_retry=lambda *_: pytest.fail("a preempted request needs no retry"),
        watchdog=Watchdog(),
        rules=ForwardingRules(most_preemptions=MOST),
    )


CLIENTS = st.tuples(
    st.integers(0, 2), st.sampled_from(["whole", "stream", "final"]), st.integers(0, 24)
)


@given(
    st.lists(st.tuples(st.integers(1, 2), st.booleans()), min_size=1, max_size=3),
    st.lists(CLIENTS, max_size=10),
    st.dictionaries(st.integers(0, 9), st.integers(1, 40), max_size=2),
)
@example([(1, True)], [(2, "stream", 0), (1, "stream", 5), (0, "stream", 10)], {})
@example([(1, True)], [(1, "whole", 0), (0, "whole", 3), (0, "whole", 6), (0, "whole", 9)], {})
@example([(2, True)], [(0, "whole", 18), (0, "stream", 5), (1, "stream", 5)], {})
@settings(deadline=None)
def test_preempted_requests_are_answered_once_by_order_of_class(
    sizes: list[tuple[int, bool]],
    clients: list[tuple[int, str, int]],
    leaving_s: dict[int, int],
) -> None:
    """Every client gets its whole response once. A request takes one place at most, of a strictly
    lower class, at an upstream that allows it, and only while no upstream has capacity. None loses
    more than its number of places, and none that another request could not continue."""
    taken: list[tuple[Waiting, PreemptibleRequest]] = []
    preempt = PreemptibleRequest.preempt

    async def scenario() -> None:
        servers = [
            TimedUpstream(f"u-{number}", most, 1.0 + number, allowed)
            for number, (most, allowed) in enumerate(sizes)
        ]
        forwarder = forwarder_of(servers)

        def recorded(victim: PreemptibleRequest, taker: Waiting) -> None:
            usages = [worker.usage for worker in forwarder.fleet.workers]
            assert not any(has_capacity(usage, taker.need) for usage in usages)
            assert victim.waiting.priority > taker.priority
            assert victim.worker is not None
            assert sizes[int(victim.worker.worker_id[2:])][1]
            if clients[int(victim.waiting.request_id[2:])][1] == "final":
                assert victim._limit is not None, "its client has nothing yet"
            taken.append((taker, victim))
            preempt(victim, taker)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PreemptibleRequest, "preempt", recorded)
            await run(forwarder, servers)

    async def run(forwarder: Forwarder, servers: Sequence[TimedUpstream]) -> None:
        waiting = [
            Client(forwarder, number, priority, kind, begin_s)
            for number, (priority, kind, begin_s) in enumerate(clients)
        ]
        tasks = [asyncio.create_task(client.run()) for client in waiting]
        loop = asyncio.get_running_loop()
        for number, seconds in leaving_s.items():
            if number < len(tasks):
                loop.call_later(seconds, tasks[number].cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, (one, result) in enumerate(zip(waiting, results, strict=True)):
            if isinstance(result, asyncio.CancelledError) and number in leaving_s:
                continue
            assert result is None, result
            *chunks, done = events(one.received.decode())
            assert done == "[DONE]"
            assert shown_text(chunks) == TEXT
        assert len({taker.key for taker, _ in taken}) == len(taken)
        for _, victim in taken:
            assert victim.preemptions <= MOST
        assert len(forwarder.queue) == 0
        assert forwarder.preemption is not None
        assert not forwarder.preemption._running
        assert not forwarder.preemption._searches
        for server in servers:
            usage = server.worker.usage
            assert (usage.sequences, usage.unstarted_prompt_tokens, server.running) == (0, 0, 0)
            assert all(one.ends for one in server.exchanges)

    run_virtual(scenario())


def test_the_youngest_request_of_the_lowest_class_loses_its_place() -> None:
    """Requests of a higher class, and older ones of the same class, keep their places. The victim
    waits ahead of later requests of its class."""

    async def scenario() -> list[str]:
        servers = [TimedUpstream("u-0", 3, 1.0, True)]
        forwarder = forwarder_of(servers)
        ended: list[str] = []
        begins = {
            "middle": (1, 0.0), "old": (2, 0.1), "young": (2, 0.2), "later": (2, 0.3),
            "urgent": (0, 3.5),
        }  # fmt: skip

        async def run(name: str, one: Client) -> None:
            await one.run()
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            for number, (name, (priority, begin_s)) in enumerate(begins.items()):
                one = Client(forwarder, number, priority, "stream", begin_s)
                group.create_task(run(name, one))
        return ended

    assert run_virtual(scenario()) == ["middle", "old", "urgent", "young", "later"]


def test_a_request_that_has_waited_for_long_keeps_its_place() -> None:
    """A request is not aborted once it has waited for 30 s in total, so that it does not starve."""

    async def scenario() -> int:
        servers = [TimedUpstream("u-0", 1, 1.0, True)]
        forwarder = forwarder_of(servers)
        first = Client(forwarder, 0, 1, "whole", 0.0)
        low = Client(forwarder, 1, 1, "whole", 0.0)
        servers[0].event_s = STARVATION_S
        async with asyncio.TaskGroup() as group:
            group.create_task(first.run())
            group.create_task(low.run())
            await asyncio.sleep(2 * STARVATION_S + 1.0)
            group.create_task(Client(forwarder, 2, 0, "whole", 0.0).run())
        assert low.request._place is not None
        return low.request._place.preemptions

    assert run_virtual(scenario()) == 0


# Upstreams on sockets.


@asynccontextmanager
async def one_place(
    engine: Any, **node_settings: Any
) -> AsyncIterator[tuple[ScriptedUpstream, Listening, httpx.AsyncClient]]:
    """Run a node with an upstream for one request at a time, which may lose it."""
    async with upstream(engine) as server:
        server.settings = {"name": "one", "preemptible": True}
        node_settings = {"upstream_preemptible": True, **node_settings}
        async with (
            forwarding(server, max_sequences=1, **node_settings) as gateway,
            client(gateway) as http,
        ):
            yield server, gateway, http


class Served:
    """A server that responds to the n-th request once the test lets it."""

    def __init__(self) -> None:
        self.may_end = [asyncio.Event() for _ in range(8)]
        self.count = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.count += 1
        await self.may_end[self.count - 1].wait()
        return web.Response(body=WHOLE, content_type="application/json")


@pytest.mark.parametrize("path", [CHAT, TEXTS], ids=["chat", "text"])
async def test_preempted_stream_continues_later(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection of a stream of a lower class is closed for a request of a higher one. The
    stream continues after it, on the same upstream, and its client sees one stream."""
    body = body_of(path, stream_options=USAGE, priority=LOW)
    engine = Engine("a", Fault.STALL, cut_after(path, body, 5))
    async with one_place(engine, log_level="info") as (server, gateway, http):
        logging.getLogger("draftgate").propagate = True
        with caplog.at_level(logging.INFO, "draftgate"):
            low = asyncio.create_task(http.post(path, json=body))
            await engine.stalled.wait()
            high = await http.post(path, json=body_of(path))
            low_reply = await low
        check_stream(high.text, path, usage=False)
        last = check_stream(low_reply.text, path, usage=True)
        assert await server.disconnected.get() == path
        kept = 4 if path == CHAT else 5
        (resume,) = last["metrics"]["resumes"]
        (name,) = names(gateway)
        assert (resume["from_worker_id"], resume["to_worker_id"]) == (name, name)
        assert resume["kept_tokens"] == kept
        first, second, rest = engine.bodies
        assert "priority" not in second
        assert rest != first
        metrics = (await http.get("/metrics")).text
        labels = 'model_name="theirs",outcome="continued"'
        assert f"draftgate_upstream_preemptions_total{{{labels}}} 1.0" in metrics
        labels = 'cause="preempted",model_name="theirs",outcome="other_class"'
        assert f"draftgate_resumes_total{{{labels}}} 1.0" in metrics
        assert 'upstream_retries_total{cause="lost"' not in metrics
        decisions = (await http.get("/decisions")).json()["decisions"]
        moves = [move for one in decisions for move in one["moves"]]
        assert [(one["reason"], one["source"], one["sink"]) for one in moves] == [
            ("preempted", name, name)
        ]
        assert (await http.get("/ready")).status_code == 200
        assert is_idle(gateway.node)
    lines = [(one.getMessage(), one.draftgate_fields) for one in caplog.records]
    (fields,) = [fields for message, fields in lines if message == "preempted"]
    assert (fields["priority"], fields["by_priority"], fields["continues"]) == (LOW, HIGH, True)
    found = [fields.get("preemptions") for message, fields in lines if message == "request"]
    assert sorted(found, key=bool) == [None, 1]


async def test_preempted_request_without_a_response_is_sent_again() -> None:
    """A request whose client has nothing yet is aborted and sent again after the other one. It
    precedes a later request of its class."""
    served = Served()
    async with one_place(served) as (server, gateway, http):
        low = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "priority": LOW}))
        await server.arrived.get()
        later = asyncio.create_task(
            http.post(TEXTS, json={**WHOLE_BODY, "priority": LOW, "user": "later"})
        )
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        high = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "user": "high"}))
        assert await server.disconnected.get() == TEXTS
        await server.arrived.get()
        for event in served.may_end:
            event.set()
        for reply in await asyncio.gather(low, later, high):
            assert reply.status_code == 200
            assert reply.content == WHOLE
        users = [json.loads(body).get("user") for body in server.bodies]
        assert users == [None, "high", None, "later"]
        metrics = (await http.get("/metrics")).text
        labels = 'model_name="theirs",outcome="restarted"'
        assert f"draftgate_upstream_preemptions_total{{{labels}}} 1.0" in metrics
        decisions = (await http.get("/decisions")).json()["decisions"]
        assert [move["reason"] for one in decisions for move in one["moves"]] == ["preempted"]
        assert is_idle(gateway.node)


@pytest.mark.parametrize(
    ("upstream_settings", "node_settings", "owner", "fields", "aborts"),
    [
        ({}, {}, "vllm", {}, True),
        ({"preemptible": False}, {}, "vllm", {}, False),
        ({}, {"max_preemptions": 0}, "vllm", {}, False),
        ({}, {}, "vllm", {"priority": HIGH}, False),
        ({}, {}, "llamacpp", {}, False),
        ({}, {}, "llamacpp", {"stream": True}, True),
        ({}, {}, "vllm", {"stream": True, "stop": ["x"]}, True),
    ],
    ids=["allowed", "denied", "never", "same_class", "llama_cpp", "llama_cpp_stream", "no_byte"],
)
async def test_only_requests_whose_abort_frees_a_place_are_aborted(
    upstream_settings: dict[str, Any],
    node_settings: dict[str, Any],
    owner: str,
    fields: dict[str, Any],
    aborts: bool,
) -> None:
    """A request loses its place if the upstream allows it and stops when its client leaves.
    llama.cpp's server completes a response that is not streamed."""
    served = Served()
    async with upstream(served) as server:
        server.owner = owner
        server.settings = {"preemptible": True, **upstream_settings}
        node_settings = {"upstream_preemptible": True, **node_settings}
        async with (
            forwarding(server, max_sequences=1, **node_settings) as gateway,
            client(gateway) as http,
        ):
            body = {**WHOLE_BODY, "priority": LOW, **fields}
            low = asyncio.create_task(http.post(TEXTS, json=body))
            await server.arrived.get()
            high = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "user": "high"}))
            if aborts:
                await server.disconnected.get()
            else:
                await until(lambda: len(gateway.node.dispatcher.queue) == 1)
                served.may_end[0].set()
            await server.arrived.get()
            assert [json.loads(one).get("user") for one in server.bodies] == [None, "high"]
            for event in served.may_end:
                event.set()
            await asyncio.gather(low, high)
            assert len(server.bodies) == (3 if aborts else 2)
            assert server.disconnected.empty()


@pytest.mark.parametrize("field", ["stop", "tools"])
async def test_stream_that_nothing_can_continue_keeps_its_place(field: str) -> None:
    """A request of a higher class waits for the end of a stream whose rest cannot be requested."""
    values = {"stop": ["x"], "tools": [{"type": "function", "function": {"name": "f"}}]}
    may_end = asyncio.Event()
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, *rest = events_of(request.path, body)
        await response.write(first)
        await may_end.wait()
        await response.write(b"".join(rest))
        await response.write_eof()
        return response

    async with one_place(handler) as (server, gateway, http):
        body = body_of(CHAT, priority=LOW, **{field: values[field]})
        async with http.stream("POST", CHAT, json=body) as low:
            blocks = low.aiter_bytes()
            begin = await anext(blocks)
            high = asyncio.create_task(http.post(CHAT, json=body_of(CHAT)))
            await until(lambda: len(gateway.node.dispatcher.queue) == 1)
            assert gateway.node.models[0].forwarder.preemption is not None
            await until(lambda: not gateway.node.models[0].forwarder.preemption._searches)
            may_end.set()
            rest = b"".join([block async for block in blocks])
        check_stream((begin + rest).decode(), CHAT, usage=False)
        check_stream((await high).text, CHAT, usage=False)
        assert server.disconnected.empty()
        assert len(bodies) == 2


async def test_a_request_loses_its_place_a_limited_number_of_times() -> None:
    """After `--max-preemptions`, a request keeps its place."""
    served = Served()
    async with one_place(served, max_preemptions=1) as (server, gateway, http):
        low = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "priority": LOW}))
        await server.arrived.get()
        high = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "user": "high"}))
        await server.disconnected.get()
        await server.arrived.get()
        served.may_end[1].set()
        assert (await high).status_code == 200
        await server.arrived.get()  # the first request again
        other = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "user": "other"}))
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        served.may_end[2].set()
        assert (await low).status_code == 200
        served.may_end[3].set()
        assert (await other).status_code == 200
        users = [json.loads(body).get("user") for body in server.bodies]
        assert users == [None, "high", None, "other"]


async def test_preempted_stream_outlasts_the_queue_timeout() -> None:
    """A stream that its client has seen a part of waits for its rest as long as its client does."""
    body = body_of(TEXTS, priority=LOW)
    engine = Engine("a", Fault.STALL, cut_after(TEXTS, body, 5))
    served = Served()

    async def handler(request: web.Request) -> web.StreamResponse:
        return await (served if "user" in await request.json() else engine)(request)

    async with one_place(handler, queue_timeout_s=0.05) as (server, gateway, http):
        low = asyncio.create_task(http.post(TEXTS, json=body))
        await engine.stalled.wait()
        high = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "user": "high"}))
        await server.disconnected.get()
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        late = await http.post(TEXTS, json={**WHOLE_BODY, "user": "late"})
        assert late.status_code == 429
        served.may_end[0].set()
        assert (await high).status_code == 200
        check_stream((await low).text, TEXTS, usage=False)


async def test_client_that_leaves_while_preempted_frees_all() -> None:
    """A stream whose client leaves while it waits for its rest is forgotten."""
    body = body_of(TEXTS, priority=LOW)
    engine = Engine("a", Fault.STALL, cut_after(TEXTS, body, 5))
    served = Served()

    async def handler(request: web.Request) -> web.StreamResponse:
        return await (served if "user" in await request.json() else engine)(request)

    async with one_place(handler) as (server, gateway, http):
        async with http.stream("POST", TEXTS, json=body) as low:
            blocks = low.aiter_bytes()
            await anext(blocks)
            high = asyncio.create_task(http.post(TEXTS, json={**WHOLE_BODY, "user": "high"}))
            await server.disconnected.get()
            await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        await until(lambda: len(gateway.node.dispatcher.queue) == 0)
        served.may_end[0].set()
        assert (await high).status_code == 200
        await until(lambda: is_idle(gateway.node))
