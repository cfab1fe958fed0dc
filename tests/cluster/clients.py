"""Clients of a cluster: Poisson load through all gateways, every stream audited.

A client does what a load balancer does, or a user: where a gateway refuses because it stops, or
cannot be reached, it goes to the next one. Nothing of an answer has come by then. What fails in any
other way has failed.
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
    HttpExchange,
    OpenAIClient,
    first_model,
    open_session,
)
from draftgate.loadgen.sending.clock import start_clock
from draftgate.loadgen.sending.driver import send_on_schedule
from draftgate.loadgen.types import PlannedRequest, Record

REFUSED = ('"draining"', '"model_loading"')
"""Codes by which a node says that it is another one's turn."""

PATIENCE = ClientTimeouts(total_s=300.0, stall_s=120.0)


def questions(rate_rps: float, seed: int, max_tokens: int) -> Iterator[PlannedRequest]:
    """Yield code to continue at Poisson instants, without end; greedy and sampled by turns."""
    load = Load(
        workload="code",
        rate_rps=rate_rps,
        duration_s=24 * 3600.0,
        max_tokens=max_tokens,
        seed=seed,
    )
    for planned in make_plan(load, max_model_len=2 * max_tokens, lazily=True).requests:
        question = planned.request
        extra = (("temperature", float(planned.index % 2)), ("ignore_eos", True))
        # Some are short: what is ordinary beside what is long enough to be hit.
        tokens = max_tokens if planned.index % 4 else max_tokens // 8
        yield replace(planned, request=replace(question, extra=extra, max_tokens=tokens))


@dataclass
class Clients:
    """Who asks a cluster.

    Attributes:
        records: of what has ended, in turn; of a question that another gateway answered, the last.
        refusals: how often a gateway refused, or could not be reached.
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
        """How often requests that have ended had gone on with another worker."""
        return sum(len(resumes_of(record)) for record in self.records)

    @property
    def failed(self) -> list[str]:
        """What became of those whose answer was not intact."""
        return [
            f"request {r.planned.index}, {r.scheduled_s:.1f} to {r.end_s:.1f} s: "
            f"{r.verdict} ({r.detail})"
            for r in self.records
            if r.verdict != Verdict.OK
        ]

    async def send(self, asked: Iterator[PlannedRequest], over: asyncio.Event) -> None:
        """Send questions at their instants, from now, until it is over; wait for the answers."""
        begun_s = self.clock()
        async with asyncio.TaskGroup() as tasks:
            await send_on_schedule(
                _until(asked, over),
                lambda planned, at_s: tasks.create_task(self.ask(planned, begun_s + at_s)),
                lambda: self.clock() - begun_s,
            )

    async def ask(
        self, planned: PlannedRequest, scheduled_s: float, first: int | None = None
    ) -> Record:
        """Ask the gateways in turn, from one on, until one answers; return and keep the record."""
        first = planned.index if first is None else first
        for turn in range(2 * len(self.gateways)):
            url = self.gateways[(first + turn) % len(self.gateways)]
            client = OpenAIClient(self.session, url, self.model, PATIENCE)
            exchange = HttpExchange(client, planned, self.clock, scheduled_s, self._ids)
            await exchange.run()
            record = exchange.record()
            if not _is_refused(record):
                break
            self.refusals += 1
        self.records.append(record)
        return record

    async def changed(self, at_once: int) -> list[str]:
        """Ask all that were answered again, so many at a time; return whose answer is another now.

        Nobody disturbs the cluster meanwhile. Texts and ends are compared within a numerics class.
        """
        before, self.records = self.records, []
        waiting = [record for record in before if record.verdict == Verdict.OK]
        changed = list[str]()

        async def client() -> None:
            while waiting:
                old = waiting.pop()
                new = await self.ask(old.planned, self.clock())
                assert new.verdict == Verdict.OK, new.detail
                assert _class_of(new) == _class_of(old)
                if difference := first_difference(old, new):
                    changed.append(f"{difference}; resumed: {resumes_of(old)}")

        await asyncio.gather(*(client() for _ in range(at_once)))
        self.records = before
        return changed


@asynccontextmanager
async def clients_of(*gateways: str) -> AsyncIterator[Clients]:
    """Clients of these gateways; connections are closed at the end."""
    async with open_session() as session:
        yield Clients(session, gateways, await first_model(session, gateways[0]))


def resumes_of(record: Record) -> list[object]:
    """Return what the answer tells of how it went on with other workers."""
    return (record.metrics or {}).get("resumes") or []


def _class_of(record: Record) -> object:
    return (record.metrics or {}).get("numerics_class")


def _is_refused(record: Record) -> bool:
    if record.verdict == Verdict.NO_CONNECTION:
        return True
    return record.status == 503 and any(code in record.detail for code in REFUSED)


def _until(asked: Iterator[PlannedRequest], over: asyncio.Event) -> Iterator[PlannedRequest]:
    for planned in asked:
        if over.is_set():
            return
        yield planned
