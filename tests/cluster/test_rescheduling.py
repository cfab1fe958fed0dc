"""Requests that move by the rescheduling policy while workers are drained and killed.

`make test-long` runs ten minutes for each policy. `CLUSTER_S=120` shortens the runs.
`CLUSTER_MOVES_JSON=FILE` writes the measurements of the last run to a file.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bench.simulation.rescheduling import DEVICES
from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.loadgen.types import PlannedRequest, Record
from draftgate.policies.rescheduling.types import LEAST_INTERVAL_S
from tests.cluster.clients import planned_requests
from tests.cluster.nodes import NodeProcess, cluster, eventually, until_known
from tests.cluster.results import write_results
from tests.cluster.test_chaos import CLUSTER_S, KILL_EVERY_S, SEED, chaos, results_of
from tests.cluster.troubles import NodeFailures
from tests.gateway.redis_server import RedisServer

WORKER = (
    *("--backend", "sim", "--profile", str(DEVICES / "a10-7b.json")),
    *("--kv-bytes", "1GiB", "--drain-timeout-s", "300"),
)
"""A simulated worker with steps of 25 ms and KV memory for 2,048 tokens."""

RATE_RPS = 1.0
MOST_TOKENS = 512
"""A rate of requests of 64 and 512 tokens that fills most of the KV memory of three workers."""

READ_S = 2.0
CONCURRENCY = 16


def planned_with_priorities() -> Iterator[PlannedRequest]:
    """Yield requests of three classes in turn."""
    for planned in planned_requests(RATE_RPS, SEED, MOST_TOKENS):
        extra = (*planned.request.extra, ("priority", planned.index % 3 - 1))
        yield replace(planned, request=replace(planned.request, extra=extra))


@dataclass
class ReportedMoves:
    """The completed moves that the decisions of gateways report.

    Attributes:
        reasons: reasons of the moves from each placement of a request. The key has the id of the
            request, and the time and worker of the placement.
    """

    gateways: Sequence[NodeProcess] = ()
    reasons: dict[tuple[str, float, str], tuple[str, ...]] = field(default_factory=dict)

    @property
    def by_policy(self) -> Counter[str]:
        """The number of moves that the policy has chosen, by request."""
        counts = Counter[str]()
        for (request_id, _, _), reasons in self.reasons.items():
            counts[request_id] += sum(reason != "drain" for reason in reasons)
        return counts

    async def watch(self) -> None:
        """Read the latest decisions until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(READ_S)

    async def read(self) -> None:
        """Read the latest decisions of all gateways."""
        for gateway in self.gateways:
            for one in (await gateway.json("/decisions?limit=500"))["decisions"]:
                key = one["request_id"], one["decided_s"], one["worker_id"]
                moves = (move for move in one["moves"] if move["end"] == "moved")
                self.reasons[key] = tuple(move["reason"] for move in moves)

    async def until_more(self) -> None:
        """Wait until the policy has moved another request."""
        before = self.by_policy.total()

        async def moved() -> bool:
            return self.by_policy.total() > before

        await eventually(moved)


def moved_too_often(moves: ReportedMoves, records: Sequence[Record]) -> list[str]:
    """Return descriptions of requests that the policy moved more often than once in
    `LEAST_INTERVAL_S`."""
    durations_s = {record.stream_id: record.end_s - record.sent_s for record in records}
    return [
        f"{request_id}: {count} moves in {durations_s[request_id]:.1f} s"
        for request_id, count in moves.by_policy.items()
        if request_id in durations_s and (count - 1) * LEAST_INTERVAL_S > durations_s[request_id]
    ]


Play = Callable[[NodeFailures, ReportedMoves], Awaitable[None]]


async def drain_and_kill(troubles: NodeFailures, moves: ReportedMoves) -> None:
    """Drain a worker and kill another, and wait each time until the policy moves a request."""
    drained, killed, _ = troubles.cluster.workers
    await troubles.restart(drained)
    await moves.until_more()
    await troubles.kill(killed)
    await moves.until_more()


async def minutes(troubles: NodeFailures, moves: ReportedMoves) -> None:
    """Drain a worker and kill another at the same time every 30 s."""
    workers, begun_s = troubles.cluster.workers, troubles.now_s()
    for number in range(round(CLUSTER_S / KILL_EVERY_S)):
        for gateway in troubles.cluster.gateways:
            await until_known(gateway, len(workers))
        await asyncio.gather(
            troubles.restart(workers[number % len(workers)]),
            troubles.kill(workers[(number + 1) % len(workers)]),
        )
        next_s = begun_s + (number + 1) * KILL_EVERY_S
        await asyncio.sleep(max(0.0, next_s - troubles.now_s()))


@pytest.mark.parametrize(
    ("policy", "play"),
    [
        ("least_time", drain_and_kill),
        pytest.param("llumnix", drain_and_kill, marks=pytest.mark.long),
        pytest.param("least_time", minutes, marks=pytest.mark.long),
        pytest.param("llumnix", minutes, marks=pytest.mark.long),
    ],
)
async def test_rescheduling_loses_no_stream_while_workers_fail(
    tmp_path: Path, own_redis: RedisServer, policy: str, play: Play
) -> None:
    """Every stream stays intact and unchanged while the policy moves it and workers fail.

    The policy moves a request at most once in two seconds. No lease, move slot, claim or block
    remains afterwards.
    """
    flags = ("--rescheduling", policy, "--admission", "none")  # a slow machine refuses none
    async with cluster(tmp_path, own_redis.url, *WORKER, gateway_flags=flags) as nodes:
        moves = ReportedMoves(nodes.gateways)
        watching = asyncio.create_task(moves.watch())
        outcome = await chaos(
            nodes,
            own_redis,
            planned_with_priorities(),
            lambda troubles: play(troubles, moves),
            CONCURRENCY,
        )
        watching.cancel()
        await asyncio.wait({watching})
        assert watching.cancelled()
    counts = moves.by_policy
    results = {
        **results_of(outcome),
        "policy": policy,
        "moves_by_policy": counts.total(),
        "most_moves_of_a_request": max(counts.values(), default=0),
        "moves_by_reason": Counter(one for reasons in moves.reasons.values() for one in reasons),
    }
    command = f'CLUSTER_S={CLUSTER_S:g} make test-long ARGS="tests/cluster/test_rescheduling.py -s"'
    write_results("CLUSTER_MOVES_JSON", command, results)
    assert outcome.clients.failed == []
    assert outcome.changed_responses == []
    assert counts.total() > 0
    assert moved_too_often(moves, outcome.clients.records) == []
    assert not outcome.watch.wrong
    assert outcome.watch.overdue_s < LEASE_S
