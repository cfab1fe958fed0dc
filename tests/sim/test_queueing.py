"""The simulator, compared with queueing theory."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from math import sqrt
from random import Random

import pytest

from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.testing import collect, make_request
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.virtual_time import loop_time_s, run_virtual

SERVICE_S = 0.01


def sojourn_times(config: WorkerConfig, arrivals: list[float], max_tokens: int = 1, sample_s=None):
    """Return the seconds of each request in the system and the load sampled every `sample_s`."""

    async def main():
        backend = SimBackend(config)
        await backend.start()
        samples: list[int] = []

        async def client(number: int) -> float:
            await asyncio.sleep(arrivals[number] - loop_time_s())
            await collect(backend, make_request(backend, seed=number, max_tokens=max_tokens))
            return loop_time_s() - arrivals[number]

        async def sampler() -> None:
            while True:
                await asyncio.sleep(sample_s)
                samples.append(backend.load().running + backend.load().waiting)

        watching = asyncio.create_task(sampler()) if sample_s else None
        times = await asyncio.gather(*map(client, range(len(arrivals))))
        if watching is not None:
            watching.cancel()
        await backend.stop()
        return times, samples

    return run_virtual(main())


def poisson(count: int, rate: float, seed: int) -> list[float]:
    random = Random(seed)
    return list(accumulate(random.expovariate(rate) for _ in range(count)))


@pytest.mark.parametrize("max_tokens", [1, 10])
@pytest.mark.parametrize("speculation", ["off", "fixed:3"])
def test_one_request_takes_exactly_its_service_time(max_tokens: int, speculation: str) -> None:
    """A request takes `sim_service_ms`, and the second of two simultaneous requests waits."""
    config = WorkerConfig(sim_service_ms=SERVICE_S * 1e3, speculation=speculation)
    times, _ = sojourn_times(config, [0.0, 1.0, 1.0], max_tokens)
    assert times == pytest.approx([SERVICE_S, SERVICE_S, 2 * SERVICE_S], rel=1e-9)


def test_waiting_follows_lindley_and_pollaczek_khinchine() -> None:
    """The worker is an M/D/1 queue for Poisson arrivals at 70% load.

    The waits equal Lindley's recursion up to rounding. The mean is that of Pollaczek and Khinchine,
    `rho D / 2(1 - rho)`, within 4 standard errors. A mean over n customers has the relative
    variance `2 / (1 - rho)^2 / n` (heavy traffic, c_a^2 + c_s^2 = 1).
    """
    rho, count = 0.7, 6000
    arrivals = poisson(count, rho / SERVICE_S, seed=1)
    times, _ = sojourn_times(WorkerConfig(sim_service_ms=SERVICE_S * 1e3), arrivals)
    waits = [time - SERVICE_S for time in times]
    wait = 0.0
    for number in range(1, count):
        gap = arrivals[number] - arrivals[number - 1]
        wait = max(0.0, wait + SERVICE_S - gap)
        assert waits[number] == pytest.approx(wait, abs=1e-7)
    expected = rho * SERVICE_S / (2 * (1 - rho))
    tolerance = 4 * sqrt(2 / (1 - rho) ** 2 / count)
    assert sum(waits) / count == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_littles_law_holds_for_batches(speculation: str) -> None:
    """The integrated number of requests in the system equals their total time in the system.

    The error per request is at most the sampling interval of 1 ms.
    """
    sample_s, count = 1e-3, 300
    arrivals = poisson(count, 60.0, seed=2)
    config = WorkerConfig(speculation=speculation, max_num_seqs=4)
    times, samples = sojourn_times(config, arrivals, max_tokens=30, sample_s=sample_s)
    assert max(samples) > 4
    assert abs(sum(samples) * sample_s - sum(times)) <= count * sample_s
