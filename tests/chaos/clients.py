"""Clients that send requests to all gateways and check every response.

A client behaves like a load balancer, as in `tests.cluster.clients`. It also sends a request again
if its gateway or its upstream was killed, once the part that had arrived is checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from draftgate.loadgen.sending.client import OpenAIClient, StreamExchange, start_clock
from draftgate.loadgen.types import Record
from tests.chaos.checker import Death, Outcome, Truths
from tests.chaos.pool import ChaosPool
from tests.chaos.requests import DistinctRequest, schedule
from tests.cluster.clients import MOST_OPEN, PATIENCE, is_refused, resumes_of

RETRY_S = 0.5
"""Pause of a client that every gateway has refused."""

GIVE_UP_S = 240.0
"""Time after which a request that gateways refuse has failed. Restarts end sooner."""


@dataclass
class ChaosClients:
    """The clients of a run.

    Attributes:
        outcomes: number of requests by outcome.
        lost: number of attempts whose gateway or upstream was killed.
        refusals: number of attempts that a gateway refused or did not accept.
        resumes: number of resumes in the same and in another numerics class.
        details: descriptions of the requests that are neither intact nor in another class.
        deaths: kills of gateways and upstreams, which the run adds.
        records: intact records, for latencies.
    """

    session: aiohttp.ClientSession
    pool: ChaosPool
    truths: Truths
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    refusals: int = 0
    resumes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = start_clock()
        self._ids = set[str]()
        self._sent = 0

    async def learn(self, requests: Sequence[DistinctRequest]) -> None:
        """Compute the unknown expected texts, without drafts and on an undisturbed pool."""
        unknown = [one for one in requests if one.key not in self.truths]
        for one in unknown:
            url = self.pool.urls_for(one.model)[0]
            record = await self._attempt(one.without_drafts(), url, self.clock())
            self.truths.add(one.key, record)
        if unknown:
            self.truths.write()

    async def send(
        self, requests: Sequence[DistinctRequest], rate_rps: float, seed: str, over: asyncio.Event
    ) -> None:
        """Send requests at Poisson times until `over` is set, and wait for the responses."""
        begun_s, places = self.clock(), asyncio.Semaphore(MOST_OPEN)
        async with asyncio.TaskGroup() as tasks:
            for at_s, request in schedule(requests, rate_rps, seed):
                pause = asyncio.timeout(max(0.0, begun_s + at_s - self.clock()))
                try:
                    async with pause:
                        await over.wait()
                    return
                except TimeoutError:
                    await places.acquire()
                if over.is_set():
                    return
                task = tasks.create_task(self._send(request))
                task.add_done_callback(lambda _task: places.release())

    async def _send(self, request: DistinctRequest) -> None:
        """Send a request until a gateway responds that survives, and record the outcome."""
        urls, number, begun_s = self.pool.urls_for(request.model), self._sent, self.clock()
        self._sent += 1
        for attempt in range(1 << 30):
            url = urls[(number + attempt) % len(urls)]
            record = await self._attempt(request, url, begun_s)
            if is_refused(record) and self.clock() < begun_s + GIVE_UP_S:
                self.refusals += 1
                if attempt % len(urls) == len(urls) - 1:
                    await asyncio.sleep(RETRY_S)
                continue
            outcome = self.truths.judge(request.key, record, url, request.model, self.deaths)
            if outcome is not Outcome.LOST_WITH_SERVER:
                break
            self.lost += 1
        self._note(request, record, outcome, url)

    async def _attempt(self, request: DistinctRequest, url: str, scheduled_s: float) -> Record:
        client = OpenAIClient(self.session, url, request.model, PATIENCE)
        planned = request.planned(self._sent)
        exchange = StreamExchange(client, planned, self.clock, scheduled_s, self._ids)
        await exchange.run()
        return exchange.record()

    def _note(self, request: DistinctRequest, record: Record, outcome: Outcome, url: str) -> None:
        self.outcomes[outcome.value] += 1
        self.kinds[request.spec.class_name] += 1
        for resume in resumes_of(record):
            same = resume["same_numerics_class"]
            self.resumes["same_class" if same else "other_class"] += 1
        if outcome in {Outcome.INTACT, Outcome.OTHER_CLASS}:
            self.records.append(record)
            return
        gateway = next((node.name for node in self.pool.all_nodes if node.url == url), url)
        self.details.append(
            f"{request.key} at {gateway}, {record.sent_s:.1f} to {record.end_s:.1f} s: {outcome}, "
            f"{record.verdict} ({record.detail}), resumed {resumes_of(record)}"
        )
