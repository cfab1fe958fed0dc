"""A batch of a pool whose gateway and worker are killed beside online requests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from tests.cluster.clients import Clients, clients_of
from tests.cluster.nodes import Cluster, cluster, eventually
from tests.gateway.redis_server import RedisServer

LINES = 2000

MODEL = "draftgate-demo"


def input_file() -> bytes:
    """Return the requests of the batch as JSON Lines."""
    rows = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": f"def f{number}(", "max_tokens": 8},
        }
        for number in range(LINES)
    )
    return "\n".join(map(json.dumps, rows)).encode()


async def send_online(clients: Clients, ended: asyncio.Event) -> list[Verdict]:
    """Send streams one after the other until the event, and return their verdicts."""
    verdicts = []
    while not ended.is_set():
        number = len(verdicts)
        spec = RequestSpec(f"class C{number}:", (), 32, number, extra=(("ignore_eos", True),))
        record = await clients.send_request(PlannedRequest(number, None, spec), clients.clock())
        verdicts.append(record.verdict)
    return verdicts


async def kill_nodes(nodes: Cluster, api: AsyncOpenAI, batch_id: str) -> None:
    """Kill a worker, and then the gateway that runs the batch, each in the middle of it."""

    async def reached(lines: int) -> None:
        async def done() -> bool:
            counts = (await api.batches.retrieve(batch_id)).request_counts
            return counts is not None and counts.completed >= lines

        await eventually(done)

    await reached(LINES // 10)
    await nodes.workers[0].kill()
    await reached(LINES // 5)
    await nodes.gateways[0].kill()
    await nodes.workers[0].start()


@pytest.mark.long
async def test_a_batch_answers_each_line_once_after_kills_of_gateway_and_worker(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    """After SIGKILL of a worker and of its gateway, the batch has one result for each of its 2,000
    lines, and no online stream of the other gateway fails."""
    files = ("--files", str(tmp_path / "files"))
    profile = ("--backend", "sim", "--profile", "cpu-demo")
    async with (
        cluster(tmp_path, own_redis.url, *profile, gateway_flags=files) as nodes,
        clients_of(nodes.gateways[1].url) as clients,
        AsyncOpenAI(base_url=f"{nodes.gateways[0].url}/v1", api_key="unused") as first,
        AsyncOpenAI(base_url=f"{nodes.gateways[1].url}/v1", api_key="unused") as other,
    ):
        file = await first.files.create(file=("in.jsonl", input_file()), purpose="batch")
        batch = await first.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="1h"
        )
        ended = asyncio.Event()
        online = asyncio.create_task(send_online(clients, ended))
        await kill_nodes(nodes, other, batch.id)

        async def completed() -> bool:
            found = await other.batches.retrieve(batch.id)
            assert found.status in {"in_progress", "finalizing", "completed"}
            return found.status == "completed"

        await eventually(completed)
        ended.set()
        assert set(await online) == {Verdict.OK}
        batch = await other.batches.retrieve(batch.id)
        assert batch.error_file_id is None
        text = (await other.files.content(batch.output_file_id)).text
    rows = [json.loads(line) for line in text.splitlines()]
    assert Counter(row["custom_id"] for row in rows) == Counter(map(str, range(LINES)))
