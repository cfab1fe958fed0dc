"""Lines of batches on simulated workers, which take nothing from other requests."""

from __future__ import annotations

import asyncio
import math
from itertools import accumulate
from random import Random

import pytest
from msgspec import structs

from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.sim.virtual_time import loop_time_s
from draftgate.policies.types import OFFLINE_PRIORITY, ServiceLevel
from tests.gateway.troubles import dispatching, run_job, run_scenario

PROFILE = load_profile("cpu-demo")
STEP_TOKENS = 128
CONFIG = WorkerConfig(
    kv_bytes=1600 * PROFILE.kv_token_bytes,
    max_num_seqs=8,
    max_step_tokens=STEP_TOKENS,
    speculation="off",
)
"""A worker whose sequences and memory the lines below fill several times over."""

LONGEST_STEP_S = PROFILE.cost.seconds(STEP_TOKENS, 8 * 1600, 8)
LINES = 24


def job(name: str, tokens: int, output: int, *, offline: bool = False, prompts: int = 1) -> Job:
    """Return a job whose prompts have no prefix in common."""
    random = Random(name)
    ids = [compact([random.randrange(8, 500) for _ in range(tokens)]) for _ in range(prompts)]
    sampling = SamplingParams(output, seed=7, ignore_eos=True)
    service = ServiceLevel(priority=OFFLINE_PRIORITY if offline else 0)
    return Job(name, tuple(ids), sampling, output, service=service)


async def waits(*, lines: int, config: WorkerConfig = CONFIG) -> tuple[list[float], int]:
    """Return the TTFT of each online request beside some lines, and the tokens of all lines."""
    random = Random(5)
    arrivals = list(accumulate(random.expovariate(12.0) for _ in range(120)))
    tokens = 0
    async with dispatching(SimBackend, 1, config=config, timeout_s=math.inf) as dispatched:

        async def line(number: int) -> None:
            nonlocal tokens
            while True:
                name = f"line-{number}-{loop_time_s()}"
                work = job(name, 180, 60, offline=True, prompts=1 + number % 2)
                for choice in await run_job(dispatched.dispatcher, work):
                    tokens += len(choice.token_ids)

        async def online(number: int) -> float:
            await asyncio.sleep(arrivals[number] - loop_time_s())
            work = job(f"online-{number}", 20 + 37 * number % 300, 4)
            async with dispatched.dispatcher.run(work) as run:
                found = [delta.phases async for delta in run.deltas if delta.phases]
            return found[0].scheduled_s - arrivals[number]

        background = [asyncio.create_task(line(number)) for number in range(lines)]
        found = await asyncio.gather(*map(online, range(len(arrivals))))
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        return found, tokens


@pytest.mark.parametrize("memory_tokens", [1600, 100_000])
def test_a_request_waits_at_most_one_step_longer_for_batches(memory_tokens: int) -> None:
    """Beside lines that fill the sequences (and the memory) of a worker, no first token is later by
    more than one step. The lines use the rest of the time."""
    config = structs.replace(CONFIG, kv_bytes=memory_tokens * PROFILE.kv_token_bytes)
    alone, none = run_scenario(waits(lines=0, config=config))
    beside, tokens = run_scenario(waits(lines=LINES, config=config))
    assert none == 0
    assert tokens > 1000
    later_s = [there - here for here, there in zip(alone, beside, strict=True)]
    assert max(later_s) <= LONGEST_STEP_S
