"""Tests of forwarded requests whose upstreams fail, refuse and answer at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from types import SimpleNamespace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftgate.backends.base import TokenUsage, UpstreamCall, UpstreamPause
from draftgate.backends.errors import BackendFailed, UpstreamFailed, UpstreamUnreachable
from draftgate.backends.openai.kv_transfer_params import prefill_body
from draftgate.gateway.dispatch.admission import DEFAULT_BOUNDS, AdmissionController, Entry
from draftgate.gateway.dispatch.claims import Claims
from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.dispatch.routing import TOGETHER, Router
from draftgate.gateway.dispatch.upstreams.forwarder import MOST_ATTEMPTS, Forwarder
from draftgate.gateway.dispatch.upstreams.forwarding import (
    ANSWERED,
    ENDED,
    LOST,
    ForwardedRequest,
)
from draftgate.gateway.dispatch.upstreams.prefill import MOST_PREFILLS
from draftgate.gateway.dispatch.upstreams.prefixes import UpstreamPrefixes
from draftgate.gateway.dispatch.upstreams.rules import ForwardingRules
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.state.memory.quotas import MemoryQuotas
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.phases.apart import UpstreamRoles
from draftgate.policies.protocols import PhasesPolicy
from draftgate.policies.quotas import Quota
from draftgate.policies.registry import admission_policy, ordering_policy, routing_policy
from draftgate.policies.resilience.failover import MOST_RESUMES
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.types import RequestView, Role, WorkerLoad

TENANT = "tenant"
REQUESTED, OTHER = "requested", "other"
BODY = b'{"prompt":"x","max_tokens":20}'
PROMPT_TOKENS, MAX_TOKENS = 10, 20
QUEUE_S = 1000.0
"""The longest wait in the queue, which no request reaches."""


class Reply(Enum):
    """What an upstream does with a call."""

    WHOLE = auto()
    STREAM = auto()
    CUT = auto()
    """A stream that breaks off after its first bytes."""
    EMPTY = auto()
    """A head without any bytes of the body."""
    BUSY = auto()
    UNAVAILABLE = auto()
    REJECTED = auto()
    BROKEN = auto()
    UNREACHABLE = auto()


BLOCK = b'data: {"id":"c","choices":[{"index":0,"text":"a"}]}\n\n'

STATUSES = {Reply.BUSY: 429, Reply.UNAVAILABLE: 503, Reply.REJECTED: 400, Reply.BROKEN: 500}


@dataclass
class Exchange:
    """A response, which counts its ends."""

    reply: Reply
    delay_s: float
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    outputs: int = 0
    error_sent: bool = False
    translation: None = None
    ends: int = 0
    left: int = 2

    def __post_init__(self) -> None:
        self.status = STATUSES.get(self.reply, 200)
        self.streaming = self.reply in {Reply.STREAM, Reply.CUT, Reply.EMPTY}
        if not self.streaming:
            self.body = b"{}"

    async def read(self) -> bytes:
        assert not self.ends
        await asyncio.sleep(self.delay_s)
        if self.reply is Reply.EMPTY or (self.reply is Reply.CUT and self.outputs):
            raise UpstreamFailed("cut")
        self.left -= 1
        self.outputs += 1
        return BLOCK if self.left >= 0 else b""

    def usage(self) -> TokenUsage:
        return TokenUsage(0, 0, self.outputs)

    def drafts(self) -> None:
        return None

    async def finish(self) -> None:
        await asyncio.sleep(self.delay_s)
        self.close()

    def close(self) -> None:
        self.ends += 1


class Upstream:
    """An upstream for a limited number of sequences, with prepared replies."""

    card = SimpleNamespace(numerics_class=None, root="http://upstream")
    failure, progress, recovers = None, 1.0, True

    def __init__(
        self,
        replies: Sequence[tuple[Reply, float]],
        most: int,
        model: str,
        role: Role = Role.ANY,
    ) -> None:
        self.role = role
        self.replies = list(replies)
        self.model = model
        self.most = most
        self.pause: UpstreamPause | None = None
        self.running = self.calls = 0
        self.worker = FleetWorker("u", self)
        self.exchanges: list[Exchange] = []

    def serves(self, model: str) -> bool:
        return model == self.model

    def load(self) -> WorkerLoad:
        return WorkerLoad(self.running, 0, 0, 0, 0.0, 0.0, (), max_sequences=self.most)

    async def forward(self, call: UpstreamCall) -> Exchange:
        reply, delay_s = self.replies.pop(0) if self.replies else (Reply.WHOLE, 0.0)
        call.headers["calls"] += _kind(call)
        self.calls += 1
        assert self.worker.usage.sequences >= self.calls, "each call has reserved capacity"
        try:
            await asyncio.sleep(delay_s)
        finally:
            self.calls -= 1
        if reply is Reply.UNREACHABLE:
            raise UpstreamUnreachable("gone")
        self.exchanges.append(Exchange(reply, delay_s))
        return self.exchanges[-1]


def _kind(call: UpstreamCall) -> str:
    """Return `t` for a count of tokens, `p` for a prompt, and `x` for any other call."""
    if call.path == "/tokenize":
        return "t"
    return "p" if call.rewrite is prefill_body else "x"


class Client:
    """A client that reads its response to the end, unless it is cancelled or the request fails."""

    def __init__(self, forwarder: Forwarder, number: int) -> None:
        need = CapacityNeed(1, PROMPT_TOKENS, PROMPT_TOKENS + MAX_TOKENS, offer=REQUESTED)
        self.entry = Entry(f"r-{number}", (need,), MAX_TOKENS, tenant=TENANT)
        self.headers = {"calls": ""}
        call = UpstreamCall("POST", "/v1/completions", self.headers, BODY, model=REQUESTED)
        view = RequestView(PROMPT_TOKENS, MAX_TOKENS, 1.0)
        self.request = ForwardedRequest(forwarder, call, self.entry, view)

    async def run(self, begin_s: float) -> None:
        await asyncio.sleep(begin_s)
        request = self.request
        with suppress(GatewayError, BackendFailed):
            await request.start()
            assert request.state is ANSWERED
            try:
                while request.body is None:
                    calls = self.headers["calls"]
                    block = await request.read()
                    assert self.headers["calls"] == calls, "only `resume` calls another upstream"
                    if request.state is LOST:
                        await request.resume()
                        assert request.state is ANSWERED
                    elif not block:
                        break
            except BaseException as error:
                await request.end(error)
                raise
            await request.end()
            await request.end()  # has no effect


def forwarder_of(
    upstreams: Sequence[Upstream], phases: PhasesPolicy = TOGETHER
) -> tuple[Forwarder, Quotas]:
    """Return a forwarder to some upstreams, with a quota."""
    clock = asyncio.get_running_loop().time
    fleet = Fleet(lambda: None, ())
    fleet.workers = tuple(one.worker for one in upstreams)
    for number, worker in enumerate(fleet.workers):
        worker.worker_id = f"u-{number}"
    router = Router(routing_policy("least_loaded"), Random(0).random, KvPulls(clock), phases)
    claims = Claims(fleet, MemoryStore(clock))
    queue = CentralQueue(fleet, ordering_policy("fair"), router, claims, clock, QUEUE_S)
    quotas = Quotas(MemoryQuotas(clock), {TENANT: Quota(tokens_per_minute=10**6)}, clock)
    policy = admission_policy("deadline")
    admission = AdmissionController(fleet, queue, policy, quotas, DEFAULT_BOUNDS, clock)
    pools = SimpleNamespace(
        choose=lambda *_: None, record_other=lambda *_: None, record_move=lambda *_, **__: None
    )
    watchdog, rules = Watchdog(), ForwardingRules(fallbacks={REQUESTED: (OTHER,)})
    budget, prefixes = RetryBudget(), UpstreamPrefixes(clock, lambda _: None, router.promises)
    forwarder = Forwarder(
        fleet,
        queue,
        admission,
        pools,
        budget,
        prefixes=prefixes,
        on_retry=lambda *_: None,
        watchdog=watchdog,
        rules=rules,
    )
    return forwarder, quotas


DELAYS = st.sampled_from([0.0, 1.0, 2.0, 3.0])
REPLIES = st.lists(
    st.tuples(st.sampled_from([*Reply, Reply.CUT, Reply.STREAM]), DELAYS), max_size=6
)


@given(
    st.lists(
        st.tuples(REPLIES, st.integers(1, 2), st.sampled_from([REQUESTED, REQUESTED, OTHER])),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.tuples(DELAYS, st.none() | st.sampled_from([0.5, 1.5, 2.5, 4.5])), max_size=6),
)
@example([([(Reply.CUT, 1.0)], 1, REQUESTED)], [(0.0, None), (0.0, 2.5)])
@example([([(Reply.CUT, 1.0)], 1, REQUESTED)] * 3, [(0.0, None), (0.0, 2.5)])
@settings(deadline=None)
def test_nothing_is_lost_or_released_twice(
    upstreams: list[tuple[list[tuple[Reply, float]], int, str]],
    clients: list[tuple[float, float | None]],
) -> None:
    """Capacity, quota and responses are given back once, whatever upstreams and clients do."""
    servers = [Upstream(replies, most, model) for replies, most, model in upstreams]
    check(servers, TOGETHER, clients)


ROLES = st.sampled_from([Role.PREFILL, Role.DECODE, Role.DECODE, Role.ANY])


@given(
    st.lists(st.tuples(REPLIES, st.integers(1, 2), ROLES), min_size=1, max_size=5),
    st.lists(st.tuples(DELAYS, st.none() | st.sampled_from([0.5, 1.5, 2.5, 4.5])), max_size=6),
)
@settings(deadline=None)
def test_nothing_is_lost_between_prompt_and_output(
    upstreams: list[tuple[list[tuple[Reply, float]], int, Role]],
    clients: list[tuple[float, float | None]],
) -> None:
    """The same holds for upstreams with roles, which compute the prompt and the output."""
    servers = [Upstream(replies, most, REQUESTED, role) for replies, most, role in upstreams]
    check(servers, UpstreamRoles(1), clients)


def check(
    servers: Sequence[Upstream],
    phases: PhasesPolicy,
    clients: Sequence[tuple[float, float | None]],
) -> None:
    """Run clients, each with the times of its request and of its cancellation, and check the end.

    Raises:
        AssertionError: something is lost or released twice.
    """

    async def scenario() -> None:
        forwarder, quotas = forwarder_of(servers, phases)
        waiting = [Client(forwarder, number) for number in range(len(clients))]
        tasks = [
            asyncio.create_task(client.run(begin_s))
            for client, (begin_s, _) in zip(waiting, clients, strict=True)
        ]
        loop = asyncio.get_running_loop()
        for task, (_, cancelled_s) in zip(tasks, clients, strict=True):
            if cancelled_s is not None:
                loop.call_later(cancelled_s, task.cancel)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        for worker in forwarder.fleet.workers:
            usage = worker.usage
            assert (usage.sequences, usage.started, usage.unstarted_prompt_tokens) == (0, 0, 0)
            assert worker.reserved_tokens == 0
        assert len(forwarder.queue) == 0
        assert loop.time() < QUEUE_S
        assert quotas.open == 0
        assert all(one.ends == 1 for server in servers for one in server.exchanges)
        for client in waiting:
            state = client.request.state
            assert state is ENDED or not client.headers["calls"]
            assert client.headers["calls"].count("x") <= MOST_ATTEMPTS * (2 + MOST_RESUMES)
            assert client.headers["calls"].count("p") <= MOST_PREFILLS
            assert client.entry.prompt_tokens <= PROMPT_TOKENS
            assert client.entry.output_tokens <= MAX_TOKENS

    run_virtual(scenario())
