"""Searches a real server: each probe is a run, all of them in one session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import aiohttp

from draftgate.loadgen.checking.audit import Verdict as Intact
from draftgate.loadgen.measuring.metrics import latency_s, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.search.search import Search
from draftgate.loadgen.search.types import Aim, Found, Measured, Probe, Verdict
from draftgate.loadgen.search.watch import Watch
from draftgate.loadgen.sending.client import ask, open_session
from draftgate.loadgen.sending.clock import start_clock
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.health import judge_health
from draftgate.loadgen.sending.run import Target, settings_of
from draftgate.loadgen.sending.server_info import Server, look_at
from draftgate.loadgen.sending.stub_server import allow_many_connections
from draftgate.loadgen.types import LoadRun, PlannedRequest, Record

WARM_UP: Final = 8
"""Requests, one after the other, before the first probe: connections, caches, compilers."""

IDLE_TTFT: Final = 2.0
"""Times the first text of an idle server, at most, by which it is taken to be idle again."""

IDLE_MORE_S: Final = 0.01
"""And that much more, for servers that answer at once."""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """What a search gave.

    Attributes:
        probes: with the `summary/1` of each, in their order.
        settings: as of a run.
    """

    aim: Aim
    found: Found
    probes: tuple[tuple[Measured, dict[str, Any]], ...]
    settings: dict[str, Any]


Told: TypeAlias = Callable[[Measured, Found], None]
"""Hears of each probe, and of what is known after it."""


async def search_load(load: Load, target: Target, told: Told, **aim: Any) -> SearchReport:
    """Find the highest rate at which enough requests of a load meet their SLO.

    Cancelling (Ctrl-C) ends the search with what is known so far.

    Args:
        load: an open loop; its rate is the first one tried.
        aim: further fields of `Aim`.

    Raises:
        aiohttp.ClientError, TimeoutError: the server cannot be reached.
        OSError: a file cannot be read.
        ValueError: the plan cannot be made, or the server answers nothing.
    """
    if load.trace is not None or load.rate_rps is None:
        raise ValueError("a search needs arrivals that a seed changes: no trace, no closed loop")
    allow_many_connections()
    corpus = open_corpus(load.text_file) if load.workload is not None else None
    async with open_session(target.api_key) as session:
        server = await look_at(session, target.url, target.model, corpus)
        tried = _Tried(session, target, server, load)
        limit_s, answer_s = await tried.warm_up()
        wanted = Aim(load.rate_rps, limit_s, answer_s, seed=load.seed, **aim)
        found = await tried.search(Search(wanted), wanted, told)
        settings = settings_of(load, target, server, corpus)
        return SearchReport(wanted, found, tuple(tried.probes), settings)


class _Tried:
    """A server, and the probes that it had."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, server: Server, load: Load
    ) -> None:
        self.probes: list[tuple[Measured, dict[str, Any]]] = []
        self._session, self._target, self._server, self._load = session, target, server, load
        self._questions = self._plan(replace(load, requests=WARM_UP))
        self._idle_s = 0.0

    async def warm_up(self) -> tuple[float, float]:
        """Ask a few questions one by one; return the longest TTFT limit and the longest answer.

        Raises:
            ValueError: nothing is promised, or an answer was not intact.
        """
        promised = [planned.request.slo for planned in self._questions]
        if not any(slo.ttft_s or slo.tpot_s for slo in promised):
            raise ValueError("nothing is promised: give --slo-ttft-ms or --slo-tpot-ms")
        records = [await self._ask(planned) for planned in self._questions]
        for record in records:
            if record.verdict != Intact.OK:
                raise ValueError(f"before the search: {record.verdict}: {record.detail}")
        # The first ones may have waited for what is made once.
        self._idle_s = min(ttft_s(record) or 0.0 for record in records)
        answer_s = sorted(map(latency_s, records))[len(records) // 2]
        return max(slo.ttft_s or 0.0 for slo in promised), answer_s

    async def search(self, search: Search, aim: Aim, told: Told) -> Found:
        """Probe until the search has ended, or is cancelled; return what it found."""
        while (probe := search.propose()) is not None:
            measured, run, stopped = await self._probe(probe, aim)
            if stopped:
                search.interrupt()
            else:
                search.observe(measured)
                self.probes.append((measured, summarize(run)))
                told(measured, search.found())
                await self._until_idle()
        return search.found()

    async def _probe(self, probe: Probe, aim: Aim) -> tuple[Measured, LoadRun, bool]:
        """Send a probe until enough is known; return the run so far, and whether it was stopped."""
        load = replace(self._load, rate_rps=probe.rate_rps, seed=probe.seed, requests=probe.longest)
        watch, outcomes, plan = Watch(probe, aim), dict[int, bool](), self._plan(load)
        following, enough = iter(plan), False
        due: PlannedRequest | None = next(following)

        def over(record: Record) -> None:
            nonlocal due, enough
            if record.verdict == Intact.INTERRUPTED or enough:
                return
            outcomes[record.planned.index] = meets_slo(record)
            # In the order of the schedule: quick answers overtake slow ones, and would flatter.
            while due is not None and due.index in outcomes and not enough:
                enough = watch.add(due.at_s or 0.0, met=outcomes.pop(due.index))
                due = next(following, None)
            if enough:
                sending.cancel()

        sending = asyncio.create_task(
            run_plan(
                self._session,
                self._target.url,
                self._server.model,
                plan,
                patience=self._target.patience,
                on_record=over,
            )
        )
        stopped = await _cancelled_while(sending)
        run = sending.result()
        if enough and not stopped:
            _cut(run)
        invalid = () if stopped else tuple(judge_health(run))
        verdict = Verdict.INVALID if invalid else watch.verdict
        return Measured(probe, watch.met, len(run.records), verdict, invalid), run, stopped

    async def _until_idle(self) -> None:
        """Ask until the first text comes as from an idle server, or patience ends."""
        clock, limit_s = start_clock(), IDLE_TTFT * self._idle_s + IDLE_MORE_S
        while clock() < self._target.timeout_s:
            first_s = ttft_s(await self._ask(self._questions[0]))
            if first_s is not None and first_s <= limit_s:
                return

    async def _ask(self, planned: PlannedRequest) -> Record:
        return await ask(
            self._session,
            self._target.url,
            self._server.model,
            planned,
            clock=start_clock(),
            patience=self._target.patience,
        )

    def _plan(self, load: Load) -> list[PlannedRequest]:
        limit = self._server.max_model_len
        return list(make_plan(load, counter=self._server.counter, max_model_len=limit).requests)


async def _cancelled_while(sending: asyncio.Task[LoadRun]) -> bool:
    """Wait for a run; return whether this task was cancelled while it went on. The run is, too."""
    try:
        await asyncio.wait({sending})
    except asyncio.CancelledError:
        sending.cancel()
        await asyncio.wait({sending})
        if (this := asyncio.current_task()) is not None:
            this.uncancel()
        return True
    return False


def _cut(run: LoadRun) -> None:
    """Make of a run that was stopped because enough is known one that ended there."""
    run.interrupted = False
    run.records = [record for record in run.records if record.verdict != Intact.INTERRUPTED]
