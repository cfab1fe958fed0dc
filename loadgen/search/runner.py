"""Searches a real server. Each probe is a run, and all probes share one HTTP session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import latency_s, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.search.search import RateSearch
from draftgate.loadgen.search.sequential_test import SequentialTest
from draftgate.loadgen.search.types import (
    ProbeResult,
    ProbeVerdict,
    SearchGoal,
    SearchProbe,
    SearchResult,
)
from draftgate.loadgen.sending.client import (
    OpenAIClient,
    allow_many_connections,
    open_session,
    start_clock,
)
from draftgate.loadgen.sending.driver import resume_after_cancel, run_plan
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.sending.run import describe_settings
from draftgate.loadgen.sending.target import ServerInfo, Target, inspect_server
from draftgate.loadgen.types import LoadRun, PlannedRequest, Record

WARM_UP: Final = 8
"""Requests before the first probe, one after another, which open connections and fill caches."""

IDLE_TTFT: Final = 2.0
"""Multiple of the idle server's TTFT up to which the server counts as idle again."""

IDLE_MORE_S: Final = 0.01
"""Additional TTFT, in seconds, for servers with a TTFT near zero."""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The outcome of a search.

    Attributes:
        probes: the probes in order, each with its `summary/1`.
        settings: as in a run.
    """

    goal: SearchGoal
    result: SearchResult
    probes: tuple[tuple[ProbeResult, dict[str, Any]], ...]
    settings: dict[str, Any]


OnProbe: TypeAlias = Callable[[ProbeResult, SearchResult], None]
"""Called after each probe, with the result so far."""

Report: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a probe, the number of its requests that have ended, and of all."""


async def search_load(
    load: Load,
    target: Target,
    on_probe: OnProbe,
    report: Report = lambda _probe, _done, _of: None,
    **goal: Any,
) -> SearchReport:
    """Find the highest rate at which enough requests of a load meet their SLO.

    Cancelling (Ctrl-C) ends the search with the result so far.

    Args:
        load: an open loop, whose rate is the first rate to try.
        goal: further fields of `SearchGoal`.

    Raises:
        asyncio.CancelledError: the task was cancelled before the first probe.
        aiohttp.ClientError, TimeoutError: the server cannot be reached.
        OSError: a file cannot be read.
        ValueError: the plan cannot be built, or a response during warm-up was not intact.
    """
    if load.trace is not None or load.rate_rps is None:
        raise ValueError(
            "a search requires random arrivals: --trace and --concurrency are excluded"
        )
    allow_many_connections()
    corpus = load.open_corpus()
    async with open_session(target.api_key) as session:
        server = await inspect_server(session, target.url, target.model, corpus)
        prober = _Prober(target.client(session, server.model), server, load)
        limit_s, answer_s = await prober.warm_up()
        wanted = SearchGoal(load.rate_rps, limit_s, answer_s, seed=load.seed, **goal)
        result = await prober.search(RateSearch(wanted), wanted, on_probe, report)
        settings = describe_settings(load, target, server, corpus)
        return SearchReport(wanted, result, tuple(prober.probes), settings)


class _Prober:
    """Sends the probes of a search to a server."""

    def __init__(self, client: OpenAIClient, server: ServerInfo, load: Load) -> None:
        self.probes: list[tuple[ProbeResult, dict[str, Any]]] = []
        self._client, self._server, self._load = client, server, load
        self._requests = self._plan(replace(load, requests=WARM_UP))
        self._idle_s = 0.0

    async def warm_up(self) -> tuple[float, float]:
        """Send a few requests one by one, and return the longest TTFT limit and the median latency.

        Raises:
            ValueError: the load has no SLO, or a response was not intact.
        """
        slos = [planned.request.slo for planned in self._requests]
        if not any(slo.ttft_s or slo.tpot_s or slo.chunk_gap_s for slo in slos):
            raise ValueError(
                "a search requires an SLO: --slo-ttft-ms, --slo-tpot-ms or --slo-gap-ms"
            )
        records = [await self._client.send_request(planned) for planned in self._requests]
        for record in records:
            if record.verdict != Verdict.OK:
                raise ValueError(f"before the search: {record.verdict}: {record.detail}")
        # The first requests may have waited for one-time initialization.
        self._idle_s = min(ttft_s(record) or 0.0 for record in records)
        answer_s = sorted(map(latency_s, records))[len(records) // 2]
        return max(slo.ttft_s or 0.0 for slo in slos), answer_s

    async def search(
        self, search: RateSearch, goal: SearchGoal, on_probe: OnProbe, report: Report
    ) -> SearchResult:
        """Send probes until the search ends or is cancelled, and return its result."""
        try:
            while (probe := search.propose()) is not None:
                result, run, stopped = await self._probe(probe, goal, report)
                if stopped:
                    search.interrupt()
                else:
                    search.observe(result)
                    self.probes.append((result, summarize(run)))
                    on_probe(result, search.result())
                    await self._wait_until_idle()
        except asyncio.CancelledError:
            resume_after_cancel()
            search.interrupt()
        return search.result()

    async def _probe(
        self, probe: SearchProbe, goal: SearchGoal, report: Report
    ) -> tuple[ProbeResult, LoadRun, bool]:
        """Send a probe until its verdict is clear. Return its run and whether Ctrl-C stopped it."""
        load = replace(self._load, rate_rps=probe.rate_rps, seed=probe.seed, requests=probe.longest)
        test, enough, ended = SequentialTest(probe, goal), False, 0
        name = f"probe {len(self.probes) + 1} at {probe.rate_rps:.3g}/s"

        def over(record: Record) -> None:
            nonlocal enough, ended
            ended += 1
            report(name, ended, probe.longest)
            if record.verdict == Verdict.INTERRUPTED or enough:
                return
            planned = record.planned
            enough = test.observe(planned.index, planned.at_s or 0.0, met=meets_slo(record))
            if enough:
                sending.cancel()

        sending = asyncio.create_task(run_plan(self._client, self._plan(load), on_record=over))
        stopped = await _cancelled_while(sending)
        run = sending.result()
        if enough and not stopped:
            # A run that ended by its verdict is complete, so interrupted requests do not count.
            run.interrupted = False
            run.records = [r for r in run.records if r.verdict != Verdict.INTERRUPTED]
        invalid = () if stopped else tuple(invalid_reasons(run))
        verdict = ProbeVerdict.INVALID if invalid else test.verdict
        return ProbeResult(probe, test.met, len(run.records), verdict, invalid), run, stopped

    async def _wait_until_idle(self) -> None:
        """Send requests until the TTFT is that of an idle server, or until the timeout."""
        clock, limit_s = start_clock(), IDLE_TTFT * self._idle_s + IDLE_MORE_S
        while clock() < self._client.timeouts.total_s:
            first_s = ttft_s(await self._client.send_request(self._requests[0]))
            if first_s is not None and first_s <= limit_s:
                return

    def _plan(self, load: Load) -> list[PlannedRequest]:
        limit = self._server.max_model_len
        return list(make_plan(load, counter=self._server.counter, max_model_len=limit).requests)


async def _cancelled_while(sending: asyncio.Task[LoadRun]) -> bool:
    """Wait for a run, and return whether this task was cancelled, which also cancels the run."""
    try:
        await asyncio.wait({sending})
    except asyncio.CancelledError:
        sending.cancel()
        await asyncio.wait({sending})
        resume_after_cancel()
        return True
    return False
