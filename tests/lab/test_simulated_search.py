"""A test of the load generator's search on simulated workers in virtual time."""

from __future__ import annotations

import pytest

from draftgate.loadgen.search.types import SearchGoal, SearchProbe
from tests.lab.test_simulated_queues import SERVICE_S, ServiceTimeEnvironment, poisson
from tests.lab.test_simulated_queues import run as simulated
from tests.loadgen.md1_server import capacity
from tests.loadgen.md1_server import run_search as search

LIMIT_S = 5 * SERVICE_S


@pytest.mark.long
def test_search_finds_the_theoretical_capacity_of_a_worker() -> None:
    """The search finds an interval of at most ±5% that contains the capacity of M/D/1."""

    def probe_latencies(probe: SearchProbe):
        at_s = poisson(probe.longest, probe.rate_rps, probe.seed)
        records = simulated(at_s, 1, "least_cost", ServiceTimeEnvironment())
        return at_s, [record.end_s - record.scheduled_s <= LIMIT_S for record in records]

    found = search(SearchGoal(30.0, LIMIT_S), probe_latencies).result()
    assert found.low_rps <= capacity(0.95, SERVICE_S, LIMIT_S) <= found.high_rps
    assert found.relative_half_width <= 0.05
