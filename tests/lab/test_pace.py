"""Slow readers in a simulation of many requests, whose worker generates no text."""

from __future__ import annotations

import asyncio

from draftgate.backends.delta_reader import generate
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, Pace, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.types import SpeculationMode, SpeculationPlan

PAUSE_S = 5.0
TOKENS = 100


def request_of(name: str) -> GenerationRequest:
    plan = SpeculationPlan("test", SpeculationMode.AUTO, "ngram", 4, "a test")
    sampling = SamplingParams(TOKENS, 1, 0.8, ignore_eos=True)
    return GenerationRequest(f"completion/{name}-0", compact((1, 2, 3)), sampling, plan)


def test_paused_request_gets_all_its_tokens_later() -> None:
    """A paused request receives no tokens while its neighbour runs, then receives all its
    tokens."""
    environment, slow, fast = (
        SimEnvironment(belief_error=0.0),
        request_of("1"),
        request_of("2"),
    )

    async def main() -> None:
        backend = SimBackend(WorkerConfig(), build=environment.build_worker)
        await backend.start()

        async def read(request: GenerationRequest) -> None:
            async for _ in generate(backend, request):
                pass

        reading = asyncio.gather(read(slow), read(fast))
        await asyncio.sleep(0)
        while sum(environment.log.deliveries[slow.request_id].tokens) < TOKENS // 4:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(1e-3)
        backend.set_pace(slow.request_id, Pace.PAUSED)
        await asyncio.sleep(PAUSE_S)
        backend.set_pace(slow.request_id, Pace.SPARING)
        await reading
        await backend.stop()

    run_virtual(main())
    of_slow, of_fast = (environment.log.pop(request.request_id) for request in (slow, fast))
    assert sum(of_slow.tokens) == sum(of_fast.tokens) == TOKENS
    assert max(b - a for a, b in zip(of_slow.at_s, of_slow.at_s[1:], strict=False)) > 0.9 * PAUSE_S
    assert of_fast.at_s[-1] < PAUSE_S
