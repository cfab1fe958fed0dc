"""Requests that move by the rescheduling policy while workers are drained and killed.

`make test-long` runs ten minutes for each policy. `CLUSTER_S=120` shortens the runs.
`CLUSTER_MOVES_JSON=FILE` writes the measurements of the last run to a file.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.loadgen.types import PlannedRequest
from draftgate.policies.moves import MoveReason
from draftgate.policies.rescheduling.types import LEAST_INTERVAL_S
from tests.cluster.clients import planned_requests
from tests.cluster.nodes import NodeProcess, cluster, eventually, until_known
from tests.cluster.results import write_results
from tests.cluster.test_chaos import (
    CLUSTER_S,
    KILL_EVERY_S,
    MOST_USAGE,
    SEED,
    chaos,
    results_of,
)
from tests.cluster.troubles import NodeFailures
from tests.gateway.redis_server import RedisServer

A10 = Path(__file__).parents[2] / "bench/simulation/a10-7b.json"

WORKER = (
    *("--backend", "sim", "--profile", str(A10)),
    *("--kv-bytes", "2GiB", "--drain-timeout-s", "300"),
)
"""A simulated worker with steps of 25 ms and KV memory for 4,096 tokens."""

RATE_RPS = 2.0
MOST_TOKENS = 512
"""A rate of requests of 64 and 512 tokens that fills most of the KV memory of three workers."""

READ_S = 2.0
CONCURRENCY = 16


def planned_with_priorities() -> Iterator[PlannedRequest]:
    """Yield requests of three classes in turn."""
    for planned in planned_requests(RATE_RPS, SEED, MOST_TOKENS):
        extra = (*planned.request.extra, ("priority", planned.index % 3 - 1))
        yield replace(planned, request=replace(planned.request, extra=extra))


class ReportedMove(NamedTuple):
    """A completed move.

    Attributes:
        ended_s: Unix time of its end.
        reason: its reason.
        policy: the policy that has chosen it, or empty.
    """

    ended_s: float
    reason: str
    policy: str


class ReportedMoves:
    """The completed moves that the decisions of gateways report."""

    def __init__(self, gateways: Sequence[NodeProcess]) -> None:
        self._gateways = gateways
        self._by_request: defaultdict[str, set[ReportedMove]] = defaultdict(set)

    @property
    def all(self) -> list[ReportedMove]:
        """The moves of all requests."""
        return [move for moves in self._by_request.values() for move in moves]

    @property
    def num_chosen(self) -> int:
        """Number of moves that the policy has chosen."""
        return sum(bool(move.policy) for move in self.all)

    @property
    def most_chosen(self) -> int:
        """Maximum number of moves of a request that the policy has chosen."""
        return max(sum(bool(one.policy) for one in moves) for moves in self._by_request.values())

    @property
    def too_soon(self) -> list[tuple[str, ReportedMove, ReportedMove]]:
        """Pairs of moves of a request of which the policy has chosen the second too soon."""
        return [
            (request_id, first, second)
            for request_id, moves in self._by_request.items()
            for first, second in pairwise(sorted(moves))
            if second.policy and second.ended_s - first.ended_s < LEAST_INTERVAL_S
        ]

    async def watch(self) -> None:
        """Read the latest decisions until cancelled."""
        while True:
            await self._read()
            await asyncio.sleep(READ_S)

    async def until_more(self) -> None:
        """Wait until the policy has moved another request."""
        before = self.num_chosen

        async def moved() -> bool:
            return self.num_chosen > before

        await eventually(moved)

    async def _read(self) -> None:
        for gateway in self._gateways:
            for decision in (await gateway.json("/decisions?limit=500"))["decisions"]:
                for move in decision["moves"]:
                    # A failover to another worker is no move.
                    if move["end"] == "moved" and move["reason"] in set(MoveReason):
                        found = ReportedMove(move["ended_s"], move["reason"], move["policy"])
                        self._by_request[decision["request_id"]].add(found)


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
    flags = ("--rescheduling", policy)
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
    results = {
        **results_of(outcome),
        "policy": policy,
        "moves_by_policy": moves.num_chosen,
        "most_moves_of_a_request_by_policy": moves.most_chosen,
        "moves_by_reason": Counter(move.reason for move in moves.all),
    }
    command = f'CLUSTER_S={CLUSTER_S:g} make test-long ARGS="tests/cluster/test_rescheduling.py -s"'
    write_results("CLUSTER_MOVES_JSON", command, results)
    assert outcome.clients.failed == []
    assert outcome.changed_responses == []
    assert moves.num_chosen
    assert not moves.too_soon
    assert not outcome.watch.wrong
    assert outcome.watch.usage <= MOST_USAGE
    assert outcome.watch.overdue_s < LEASE_S
