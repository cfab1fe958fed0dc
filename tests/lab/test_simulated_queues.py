"""Tests that compare simulated workers and the production dispatcher with queueing theory.

A worker that serves one request at a time with a given service time is a single-server queue. The
dispatcher with several such workers is a multi-server system with known waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heapify, heapreplace
from itertools import pairwise
from math import factorial, sqrt
from random import Random

import pytest

from draftgate.backends.sim.device_model import ServiceTimeDevice
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.simulate.cluster import ADMIT_ALL, SimulatedCluster, never, simulate_requests
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec

SERVICE_S = 0.01


class ServiceTimeEnvironment(SimEnvironment):
    """Devices with a given service time per request, in seconds."""

    service_s: Callable[[GenerationRequest], float] = staticmethod(lambda _request: SERVICE_S)

    def _device(self, profile, index):
        return ServiceTimeDevice(type(self).service_s)


def exponential_s(seed: int) -> float:
    return Random(f"service/{seed}").expovariate(1 / SERVICE_S)


def constant_s(_number: int) -> float:
    return SERVICE_S


class ExponentialEnvironment(ServiceTimeEnvironment):
    service_s = staticmethod(lambda request: exponential_s(request.sampling.seed))


def poisson(count: int, rate: float, seed: int) -> list[float]:
    random, at_s, instants = Random(seed), 0.0, []
    for _ in range(count):
        at_s += random.expovariate(rate)
        instants.append(at_s)
    return instants


ROUTINGS = ("least_cost", "least_loaded", "power_of_two", "round_robin")


def run(
    arrivals: list[float],
    workers: int,
    routing: str,
    environment: SimEnvironment,
    on_record: Callable[[Record], None] = lambda _record: None,
    is_over: Callable[[], bool] = never,
) -> list[Record]:
    config = WorkerConfig(speculation="off", profile="h100-8b", max_num_seqs=1)
    planned = [
        PlannedRequest(i, at_s, RequestSpec("", (), 1, i)) for i, at_s in enumerate(arrivals)
    ]

    def to_job(request: PlannedRequest) -> Job:
        return Job(f"completion/{request.index}", ((1,),), SamplingParams(1, request.index), 1)

    rules = replace(ADMIT_ALL, routing=routing)
    return simulate_requests(
        SimulatedCluster(config, workers, environment, rules),
        planned,
        on_record,
        to_job=to_job,
        is_over=is_over,
    )


def waits(records: list[Record], service_s: Callable[[int], float]) -> list[float]:
    return [r.end_s - r.scheduled_s - service_s(r.planned.index) for r in records]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def central_queue_waits(
    arrivals: list[float], servers: int, service_s: Callable[[int], float]
) -> list[float]:
    """Return the waits in one first-come, first-served queue for all servers, in seconds.

    Args:
        service_s: the service time of a request by its number.

    Source: Kiefer and Wolfowitz (1955), On the Theory of Queues with Many Servers.
    """
    free = [0.0] * servers
    heapify(free)
    found = []
    for number, at_s in enumerate(arrivals):
        begins_s = max(at_s, free[0])
        heapreplace(free, begins_s + service_s(number))
        found.append(begins_s - at_s)
    return found


def erlang_c(servers: int, load: float) -> float:
    """Return the probability of waiting in M/M/c at a load in Erlangs."""
    last = load**servers / factorial(servers) * servers / (servers - load)
    return last / (sum(load**k / factorial(k) for k in range(servers)) + last)


def test_one_worker_is_an_mm1_queue() -> None:
    """The waits at a worker with exponential service follow Lindley's recursion."""
    arrivals = poisson(2000, 0.6 / SERVICE_S, seed=3)
    found = waits(run(arrivals, 1, "least_cost", ExponentialEnvironment()), exponential_s)
    wait = 0.0
    for number, (before, now) in enumerate(pairwise(arrivals)):
        wait = max(0.0, wait + exponential_s(number) - (now - before))
        assert found[number + 1] == pytest.approx(wait, abs=1e-7)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 5])
def test_workers_share_one_queue(workers: int, routing: str) -> None:
    """Workers with constant service form an M/D/c queue, request by request.

    No request waits while a worker is free, whichever free worker the policy chooses.
    """
    arrivals = poisson(800, 0.8 * workers / SERVICE_S, seed=workers)
    found = waits(run(arrivals, workers, routing, ServiceTimeEnvironment()), constant_s)
    expected = central_queue_waits(arrivals, workers, constant_s)
    assert found == pytest.approx(expected, abs=1e-7)
    assert mean(found) > 0


def test_workers_with_exponential_service_are_an_mmc_queue() -> None:
    """The waits for several workers with exponential service are those of one queue for all."""
    arrivals = poisson(2000, 0.7 * 4 / SERVICE_S, seed=11)
    found = waits(run(arrivals, 4, "least_cost", ExponentialEnvironment()), exponential_s)
    assert found == pytest.approx(central_queue_waits(arrivals, 4, exponential_s), abs=1e-7)


@pytest.mark.parametrize(("workers", "rho"), [(1, 0.6), (4, 0.7)])
def test_mean_wait_in_one_queue_follows_erlang_c(workers: int, rho: float) -> None:
    """The mean wait in the queue of these tests equals the M/M/c mean within 4 errors.

    A mean over n customers of a queue at load rho has the relative variance `2 (1 + 1) /
    (1 - rho)^2 / n` (heavy traffic, c_a^2 + c_s^2 = 2). M/M/1 has the mean `rho / (mu - lambda)`.
    """
    count, random = 40_000, Random(7)
    arrivals = poisson(count, rho * workers / SERVICE_S, seed=11)
    found = central_queue_waits(arrivals, workers, lambda _: random.expovariate(1 / SERVICE_S))
    central = erlang_c(workers, rho * workers) * SERVICE_S / (workers * (1 - rho))
    assert mean(found) == pytest.approx(central, rel=4 * sqrt(4 / (1 - rho) ** 2 / count))
    if workers == 1:
        assert central == pytest.approx(rho * SERVICE_S / (1 - rho))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_littles_law_holds_for_a_cluster(routing: str) -> None:
    """The number of requests in the system, integrated over time, equals the sum of their times.

    A request is in the system from its arrival to its last token.
    """
    arrivals = poisson(500, 2.4 / SERVICE_S, seed=5)
    records = run(arrivals, 3, routing, ExponentialEnvironment())
    changes = sorted([(r.scheduled_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    in_system, area, before_s = 0, 0.0, 0.0
    for at_s, change in changes:
        area += in_system * (at_s - before_s)
        in_system, before_s = in_system + change, at_s
    assert in_system == 0
    assert area == pytest.approx(sum(r.end_s - r.scheduled_s for r in records))
    throughput = len(records) / before_s
    sojourn_s = mean([r.end_s - r.scheduled_s for r in records])
    assert area / before_s == pytest.approx(throughput * sojourn_s)


def test_work_is_conserved() -> None:
    """The busy time of a cluster equals the sum of the service times for any placement of
    requests."""
    arrivals = poisson(400, 2.0 / SERVICE_S, seed=9)
    records = run(arrivals, 3, "least_cost", ExponentialEnvironment())
    served: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        own_s = exponential_s(record.planned.index)
        served.setdefault(record.metrics["worker_id"], []).append((record.end_s - own_s, own_s))
    assert set(served) == {"w-0", "w-1", "w-2"}
    for spans in served.values():
        spans.sort()
        for (begin_s, own_s), (next_s, _) in pairwise(spans):
            assert begin_s + own_s <= next_s + 1e-9  # a worker serves one request at a time


def test_simulation_that_is_over_cancels_the_open_requests() -> None:
    """A simulation ends after the record that decides it, and has no record of later requests."""
    arrivals, records = poisson(500, 250.0, 3), list[Record]()
    environment = ServiceTimeEnvironment(roofline=False)
    whole = run(arrivals, 2, "least_cost", environment)
    again = ServiceTimeEnvironment(roofline=False)
    found = run(arrivals, 2, "least_cost", again, records.append, lambda: len(records) >= 100)
    ends_s = sorted(record.end_s for record in whole)
    assert len(found) == len(records) == 100
    assert sorted(record.end_s for record in found) == ends_s[:100]
