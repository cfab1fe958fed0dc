"""The time that drafts saved lately, by tenant and over all processes of a node."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.telemetry.ending import Ending
from draftgate.gateway.telemetry.live import Activity
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.recent_drafts import (
    BUCKET_S,
    PERIOD_S,
    DraftTimes,
    RecentDrafts,
    recent_drafts,
)
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.gateway.tracing import NO_SPAN
from tests.gateway.harness import client, running
from tests.gateway.troubles import (
    DeviceFault,
    Dispatched,
    after_tokens,
    dispatching,
    run_scenario,
    simulated,
)

TENANTS = ("", "a", "b")
TOKENS = 120


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


ENDED_CHOICES = st.lists(
    st.tuples(
        st.integers(0, 40),  # seconds since the last one
        st.integers(0, 2),  # its process
        st.sampled_from(TENANTS),
        st.integers(-50, 50),  # saved seconds
        st.integers(50, 90),  # seconds of decoding
        st.integers(0, 9),  # draft tokens
    ),
    max_size=40,
)


@given(ENDED_CHOICES)
def test_the_share_is_that_of_the_last_minutes_of_all_processes(
    ended: list[tuple[int, int, str, int, int, int]],
) -> None:
    """Each tenant gets the sums of its own choices over all processes, and an operator those of
    all tenants. Choices leave the sums after five minutes, less the length of a bucket."""
    clock = Clock()
    processes = [DraftTimes(clock) for _ in range(3)]
    added = []
    for wait_s, process, tenant, saved_s, decode_s, drafted in ended:
        clock.now_s += wait_s
        processes[process].add(tenant, saved_s, decode_s, drafted)
        added.append((clock.now_s, tenant, saved_s, decode_s, drafted))
    for tenant in (*TENANTS, None):
        found = recent_drafts([process.sums() for process in processes], tenant)
        own = [one for one in added if tenant in {None, one[1]}]
        newest, all_ = (
            [one for one in own if one[0] >= clock.now_s - age_s]
            for age_s in (PERIOD_S - BUCKET_S, PERIOD_S)
        )
        assert sum(one[4] for one in newest) <= found.drafted_tokens <= sum(one[4] for one in all_)
        if len(newest) == len(all_):
            saved_s, decode_s = (sum(one[place] for one in all_) for place in (2, 3))
            assert (found.saved_s, found.decode_s) == (saved_s, decode_s)
            plain_s = saved_s + decode_s
            assert found.saved_share == (saved_s / plain_s if plain_s else None)


def test_kept_sums_are_bounded_in_time() -> None:
    """A process keeps one sum for each five seconds, however many choices end."""
    clock = Clock()
    times = DraftTimes(clock)
    for _ in range(5000):
        clock.now_s += 0.5
        times.add("", 1.0, 2.0, 3)
    assert len(times._buckets) <= PERIOD_S / BUCKET_S + 1
    assert times.sums()[""][2] == pytest.approx(3 * PERIOD_S / 0.5, rel=0.02)
    clock.now_s += PERIOD_S + 1.0
    assert times.sums() == {}


# --- a dispatcher in virtual time -----------------------------------------------------------------


class Session:
    """Requests to a dispatcher in virtual time, whose watches record them."""

    def __init__(self, dispatched: Dispatched) -> None:
        self._dispatched = dispatched
        self._metrics = Metrics(dict, lambda: "m")
        self._metrics.recent.draft_times = DraftTimes(loop_time_s)
        self.arrivals_s: list[float] = []  # of the last request's tokens

    async def run(self, number: int, seed: int | None = None) -> None:
        """Run a request to its end, whose seed is its number unless given."""
        ids = compact(Tokenizer(SHIPPED_MODEL).encode("def area(r):\n    return"))
        sampling = SamplingParams(1, seed=number if seed is None else seed, ignore_eos=True)
        job = Job(str(number), (ids,), sampling, TOKENS)
        series, self.arrivals_s = RequestSeries(self._metrics), []
        watch = RequestWatch(series, NO_SPAN, "/v1/completions", "text_completion", loop_time_s)
        watch.parsed(job, "m", stream=True)
        async with self._dispatched.dispatcher.run(job, watch=watch) as run:
            async for delta in run.deltas:
                watch.observe(delta)
                self.arrivals_s.append(loop_time_s())
        watch.end(Ending.FINISHED, 200)

    @property
    def recent(self) -> RecentDrafts:
        return recent_drafts([self._metrics.recent.draft_times.sums()], None)


def test_the_share_agrees_with_runs_without_drafts() -> None:
    """The share is within a tenth of the time that drafts save in a comparison of both, and 0
    without drafts."""

    async def run_pairs(speculation: str) -> RecentDrafts:
        config = WorkerConfig(speculation=speculation)
        async with dispatching(simulated({}), 1, config=config) as dispatched:
            session = Session(dispatched)
            for number in range(0, 12, 2):
                await asyncio.gather(session.run(number), session.run(number + 1))
            return session.recent

    off, on = (run_scenario(run_pairs(speculation)) for speculation in ("off", "fixed:3"))
    assert (off.saved_s, off.saved_share, off.drafted_tokens) == (0.0, 0.0, 0)
    measured = 1.0 - on.decode_s / off.decode_s
    assert on.saved_share == pytest.approx(measured, rel=0.1)
    assert on.drafted_tokens > 0


def test_saved_seconds_are_summed_over_requests_that_run_together() -> None:
    """Two equal requests that run together save twice the seconds by which both end earlier, within
    15%: a step without drafts is predicted."""

    async def run_pair(speculation: str) -> tuple[float, float]:
        config = WorkerConfig(speculation=speculation)
        async with dispatching(simulated({}), 1, config=config) as dispatched:
            session = Session(dispatched)
            await session.run(1)
            begun_s, before_s = loop_time_s(), session.recent.saved_s
            await asyncio.gather(session.run(2, seed=1), session.run(3, seed=1))
            passed_s = loop_time_s() - begun_s
            return session.recent.saved_s - before_s, passed_s

    (_, plain_s), (saved_s, drafted_s) = (run_scenario(run_pair(one)) for one in ("off", "fixed:3"))
    assert saved_s == pytest.approx(2.0 * (plain_s - drafted_s), rel=0.15)


def test_only_the_last_worker_of_a_choice_counts() -> None:
    """A lost worker reports no saved time, so its time of decoding does not count either. The time
    between both workers does not count."""

    async def scenario() -> tuple[RecentDrafts, list[float]]:
        config = WorkerConfig(speculation="fixed:3")
        factory = simulated({0: DeviceFault(breaks=after_tokens(TOKENS // 2))})
        async with dispatching(factory, 2, config=config) as dispatched:
            session = Session(dispatched)
            await session.run(1)
            return session.recent, session.arrivals_s

    recent, arrivals_s = run_scenario(scenario())
    gaps_s = [later - before for before, later in pairwise(arrivals_s)]
    resumed_s = arrivals_s[gaps_s.index(max(gaps_s)) + 1]
    assert recent.decode_s == pytest.approx(arrivals_s[-1] - resumed_s)
    assert recent.drafted_tokens > 0
    assert 0.3 < recent.saved_share < 0.7


# --- HTTP -----------------------------------------------------------------------------------------

KEYS = """
keys:
  - {name: a, key: sk-a}
  - {name: b, key: sk-b}
  - {name: boss, key: sk-boss, role: operator}
"""


class OtherProcess:
    """Another process of a node, with a decision of two tenants."""

    def __init__(self, *activities: Activity) -> None:
        self._activities = list(activities)

    async def activities(self) -> list[Activity]:
        return self._activities

    async def records(
        self, _kind: str, _most: int, tenant: str | None
    ) -> list[tuple[float, bytes]]:
        return [(1.0, b'{"tenant":"%b"}' % one.encode()) for one in "ab" if tenant in {None, one}]


@pytest.mark.parametrize("processes", [1, 2])
async def test_tenants_see_only_what_drafts_brought_them(tmp_path: Path, processes: int) -> None:
    """`/decisions` reports the saved time of the key's own requests over all processes of the
    node. An operator sees that of all tenants."""
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    other = OtherProcess(Activity(drafts={"a": (1.0, 4.0, 10), "c": (9.0, 9.0, 9)}))
    async with running(api_keys_file=str(path)) as gateway, client(gateway) as http:
        gateway.node.metrics.recent.draft_times.add("a", 1.0, 1.0, 20)
        gateway.node.metrics.recent.draft_times.add("b", -1.0, 5.0, 5)
        if processes > 1:
            gateway.node.siblings = other
        gateway.node.take_sample(await other.activities() if processes > 1 else ())

        async def drafts(key: str) -> dict:
            response = await http.get("/decisions", headers={"authorization": f"Bearer {key}"})
            return response.json()["drafts"]

        assert await drafts("sk-b") == {
            "period_s": 300.0,
            "tenant": "b",
            "drafted_tokens": 5,
            "saved_s": -1.0,
            "decode_s": 5.0,
            "saved_share": -0.25,
        }
        mine, all_ = await drafts("sk-a"), await drafts("sk-boss")
    assert (mine["tenant"], all_["tenant"]) == ("a", None)
    figures = [(one["saved_s"], one["decode_s"], one["drafted_tokens"]) for one in (mine, all_)]
    alone, whole = [(1.0, 1.0, 20), (0.0, 6.0, 25)], [(2.0, 5.0, 30), (10.0, 19.0, 44)]
    assert figures == (alone if processes == 1 else whole)


async def test_the_share_is_unknown_without_requests() -> None:
    """A node without ended requests reports no share instead of one of 0."""
    async with running() as gateway, client(gateway) as http:
        gateway.node.take_sample()
        drafts = (await http.get("/decisions")).json()["drafts"]
    assert (drafts["decode_s"], drafts["saved_share"], drafts["tenant"]) == (0.0, None, None)
