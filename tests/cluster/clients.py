"""Clients of a cluster: Poisson load through all gateways, with an audit of every stream.

A client behaves like a load balancer. It tries the next gateway if a gateway refuses because of a
stop or cannot be reached. No part of a response has arrived in either case. Any other failure
counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.checking.lossless import first_difference
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.sending.client import (
    ClientTimeouts,
    OpenAIClient,
    StreamExchange,
    first_model,
    open_session,
    start_clock,
)
from draftgate.loadgen.sending.driver import send_on_schedule
from draftgate.loadgen.types import PlannedRequest, Record

REFUSED = ('"draining"', '"model_loading"')
"""Error codes after which a client tries the next gateway."""

MOST_OPEN = 16
"""Maximum number of open requests."""

PATIENCE = ClientTimeouts(total_s=300.0, stall_s=120.0)


def planned_requests(rate_rps: float, seed: int, max_tokens: int) -> Iterator[PlannedRequest]:
    """Yield code-completion requests at Poisson times, alternately greedy and sampled."""
    load = Load(
        workload="code",
        rate_rps=rate_rps,
        duration_s=24 * 3600.0,
        max_tokens=max_tokens,
        seed=seed,
    )
    for planned in make_plan(load, max_model_len=2 * max_tokens, lazily=True).requests:
        spec = planned.request
        extra = (("temperature", float(planned.index % 2)), ("ignore_eos", True))
        # Three of four requests are long enough to be interrupted, and the fourth is short.
        tokens = max_tokens if planned.index % 4 else max_tokens // 8
        yield replace(planned, request=replace(spec, extra=extra, max_tokens=tokens))


@dataclass
class Clients:
    """The clients of a cluster.

    Attributes:
        records: the record of the last attempt of each finished request, in order of completion.
        refusals: number of times that a gateway refused or could not be reached.
    """

    session: aiohttp.ClientSession
    gateways: Sequence[str]
    model: str
    records: list[Record] = field(default_factory=list)
    refusals: int = 0

    def __post_init__(self) -> None:
        self.clock = start_clock()
        self._ids = set[str]()

    @property
    def resumes(self) -> int:
        """Number of resumes of all finished requests."""
        return sum(len(resumes_of(record)) for record in self.records)

    @property
    def failed(self) -> list[str]:
        """The verdicts of responses that were not intact."""
        return [
            f"request {r.planned.index}, {r.scheduled_s:.1f} to {r.end_s:.1f} s: "
            f"{r.verdict} ({r.detail})"
            for r in self.records
            if r.verdict != Verdict.OK
        ]

    async def send(self, requests: Iterator[PlannedRequest], over: asyncio.Event) -> None:
        """Send requests at their times until `over` is set, and wait for the responses.

        At most `MOST_OPEN` requests are open, so that a slow machine refuses none.
        """
        begun_s, places = self.clock(), asyncio.Semaphore(MOST_OPEN)

        async def send(planned: PlannedRequest, at_s: float) -> None:
            async with places:
                if not over.is_set():
                    await self.send_request(planned, begun_s + at_s)

        async with asyncio.TaskGroup() as tasks:
            await send_on_schedule(
                _until(requests, over),
                lambda planned, at_s: tasks.create_task(send(planned, at_s)),
                lambda: self.clock() - begun_s,
            )

    async def send_request(
        self, planned: PlannedRequest, scheduled_s: float, first: int | None = None
    ) -> Record:
        """Send a request to each gateway in turn until a gateway accepts, and return its record."""
        first = planned.index if first is None else first
        for attempt in range(2 * len(self.gateways)):
            url = self.gateways[(first + attempt) % len(self.gateways)]
            client = OpenAIClient(self.session, url, self.model, PATIENCE)
            exchange = StreamExchange(client, planned, self.clock, scheduled_s, self._ids)
            await exchange.run()
            record = exchange.record()
            if not is_refused(record):
                break
            self.refusals += 1
        self.records.append(record)
        return record

    async def changed_responses(self, concurrency: int) -> list[str]:
        """Repeat all completed requests, and return descriptions of the responses that differ.

        The cluster must be undisturbed meanwhile. Texts and endings are compared within a numerics
        class.

        Args:
            concurrency: number of concurrent requests.
        """
        before, self.records = self.records, []
        waiting = [record for record in before if record.verdict == Verdict.OK]
        changed_responses = list[str]()

        async def client() -> None:
            while waiting:
                old = waiting.pop()
                new = await self.send_request(old.planned, self.clock())
                assert new.verdict == Verdict.OK, new.detail
                assert _class_of(new) == _class_of(old)
                if difference := first_difference(old, new):
                    changed_responses.append(f"{difference}; resumed: {resumes_of(old)}")

        await asyncio.gather(*(client() for _ in range(concurrency)))
        self.records = before
        return changed_responses


@asynccontextmanager
async def clients_of(*gateways: str) -> AsyncIterator[Clients]:
    """Yield clients of these gateways, and close their connections at the end."""
    async with open_session() as session:
        yield Clients(session, gateways, await first_model(session, gateways[0]))


def resumes_of(record: Record) -> list[object]:
    """Return the resumes that a response reports."""
    return (record.metrics or {}).get("resumes") or []


def _class_of(record: Record) -> object:
    return (record.metrics or {}).get("numerics_class")


def is_refused(record: Record) -> bool:
    """Return whether a gateway refused because of a stop, or could not be reached."""
    if record.verdict == Verdict.NO_CONNECTION:
        return True
    return record.status == 503 and any(code in record.detail for code in REFUSED)


def _until(requests: Iterator[PlannedRequest], over: asyncio.Event) -> Iterator[PlannedRequest]:
    for planned in requests:
        if over.is_set():
            return
        yield planned
