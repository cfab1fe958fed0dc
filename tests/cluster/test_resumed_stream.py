"""A stream with a long context whose worker stops while newcomers saturate two gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from tests.cluster.clients import Clients, clients_of, resumes_of
from tests.cluster.nodes import NodeProcess, cluster, eventually
from tests.cluster.pool import read_pool
from tests.gateway.redis_server import RedisServer

WORKER = (
    *("--backend", "sim", "--kv-bytes", "16MiB", "--drain-timeout-s", "0.1"),
    *("--speculation", "off"),
)
"""Flags of workers with memory for 2,720 tokens, which pass their streams on when they stop. With
drafts, the long stream would end too early."""

QUEUE_TIMEOUT_S = 60.0
CLIENTS = 40
LONG_PROMPT, LONG_OUTPUT = 1200, 1300
EXTRA = (("ignore_eos", True),)


def long_prompt() -> str:
    """Return a text of at least `LONG_PROMPT` tokens."""
    tokenizer, text = Tokenizer(SHIPPED_MODEL), ""
    for number in count():
        text += f"def f{number}(x):\n    return x + {number}\n"
        if len(tokenizer.encode(text)) >= LONG_PROMPT:
            return text
    raise AssertionError


@asynccontextmanager
async def crowd(clients: Clients) -> AsyncIterator[list[int]]:
    """Run 40 clients that send small requests to both gateways without a pause.

    Yields:
        A list with the number of each answered request.
    """
    numbers, answered = count(1), list[int]()

    async def client() -> None:
        for number in numbers:
            spec = RequestSpec(f"class C{number}:\n" * 12, (), 150, number, extra=EXTRA)
            planned = PlannedRequest(number, None, spec)
            record = await clients.send_request(planned, clients.clock())
            if record.verdict == Verdict.OK:
                answered.append(number)

    tasks = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    try:
        yield answered
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def busy_worker(workers: list[NodeProcess]) -> NodeProcess:
    """Return the only worker with a running sequence, as soon as one has it."""
    found = list[NodeProcess]()

    async def runs() -> bool:
        found[:] = [one for one in workers if await one.metric_sum("draftgate_running_sequences")]
        return bool(found)

    await eventually(runs)
    (worker,) = found
    return worker


async def until_answered(answered: list[int], number: int) -> None:
    """Wait until this many requests are answered."""

    async def reached() -> bool:
        return len(answered) >= number

    await eventually(reached)


@pytest.mark.long
async def test_a_resumed_stream_is_not_starved_by_newcomers(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    """A stream with a long context survives the stop of its worker under saturation, and its
    claim leaves nothing in Redis."""
    timeout = ("--queue-timeout-s", f"{QUEUE_TIMEOUT_S:g}")
    async with (
        cluster(tmp_path, own_redis.url, *WORKER, gateway_flags=timeout) as nodes,
        clients_of(*(gateway.url for gateway in nodes.gateways)) as clients,
    ):
        spec = RequestSpec(long_prompt(), (), LONG_OUTPUT, 0, extra=EXTRA)
        stream = asyncio.create_task(
            clients.send_request(PlannedRequest(0, None, spec), clients.clock())
        )
        worker = await busy_worker(nodes.workers)
        async with crowd(clients) as answered:
            await until_answered(answered, 10)
            assert not stream.done()
            await worker.stop()
            record = await stream
            assert record.verdict == Verdict.OK, record.detail
            assert len(resumes_of(record)) == 1
            await until_answered(answered, len(answered) + CLIENTS)

        async def is_empty() -> bool:
            pool = await asyncio.to_thread(read_pool, own_redis)
            return pool.is_empty and not any(key.startswith("worker-claim") for key in pool.keys)

        await eventually(is_empty)
