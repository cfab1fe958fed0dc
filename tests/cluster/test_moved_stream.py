"""A stream whose worker receives SIGTERM, and which moves to another node with its KV blocks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from tests.cluster.clients import clients_of, resumes_of
from tests.cluster.nodes import cluster, eventually
from tests.cluster.pool import read_pool
from tests.cluster.test_resumed_stream import busy_worker, long_prompt
from tests.gateway.redis_server import RedisServer

WORKER = ("--backend", "sim", "--drain-timeout-s", "300")
OUTPUT_TOKENS = 2000
EXTRA = (("ignore_eos", True),)


async def test_a_drained_node_stops_while_its_stream_runs_elsewhere(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    """A node that receives SIGTERM gives its stream to another node, and exits before the stream
    ends. The text equals that of an undisturbed request, and Redis keeps no lease or claim."""
    async with (
        cluster(tmp_path, own_redis.url, *WORKER, gateways=1, workers=2) as nodes,
        clients_of(*(gateway.url for gateway in nodes.gateways)) as clients,
    ):
        (gateway,) = nodes.gateways
        spec = RequestSpec(long_prompt(), (), OUTPUT_TOKENS, 0, extra=EXTRA)
        planned = PlannedRequest(0, None, spec)
        stream = asyncio.create_task(clients.send_request(planned, clients.clock()))
        worker = await busy_worker(nodes.workers)

        async def decodes() -> bool:
            return await gateway.metric_sum("draftgate_generation_tokens_total") > 0

        await eventually(decodes)
        assert await worker.stop() == 0
        assert not stream.done()
        moved = await stream
        assert moved.verdict == Verdict.OK, moved.detail
        (resume,) = resumes_of(moved)
        assert resume["from_worker_id"] == worker.worker_id
        assert resume["same_numerics_class"]
        assert await gateway.metric_sum("draftgate_move_gap_seconds_count") == 1
        plain = await clients.send_request(planned, clients.clock())
        assert plain.texts == moved.texts

        async def is_empty() -> bool:
            return (await asyncio.to_thread(read_pool, own_redis)).is_empty

        await eventually(is_empty)
