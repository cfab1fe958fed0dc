"""A simulated M/D/1 server with a known capacity and equal service times."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np

from draftgate.loadgen.search.search import RateSearch
from draftgate.loadgen.search.sequential_test import SequentialTest
from draftgate.loadgen.search.types import ProbeResult, SearchGoal, SearchProbe


def attainment(rate_rps: float, service_s: float, limit_s: float) -> float:
    """Return the share of requests with a latency within a limit, in equilibrium.

    The share is `(1 - r) sum_k (r (k - t))^k / k! exp(-r (k - t))` over k up to t, the longest wait
    in services (Crommelin, Telephone power plants, 1934). Its terms alternate in sign, so the sum
    needs 60 digits.
    """
    with localcontext() as context:
        context.prec = 60
        load = Decimal(rate_rps) * Decimal(service_s)
        if load >= 1:
            return 0.0
        longest = (Decimal(limit_s) - Decimal(service_s)) / Decimal(service_s)
        total, factorial = Decimal(0), Decimal(1)
        for k in range(int(longest) + 1):
            factorial *= max(k, 1)
            waited = load * (k - longest)
            total += (waited**k if k else 1) / factorial * (-waited).exp()
        return float((1 - load) * total)


def capacity(share: float, service_s: float, limit_s: float) -> float:
    """Return the rate at which exactly that share is within the limit, by bisection."""
    low, high = 0.0, 1.0 / service_s
    for _ in range(50):
        middle = (low + high) / 2
        if attainment(middle, service_s, limit_s) >= share:
            low = middle
        else:
            high = middle
    return low


def waits(rate_rps: float, service_s: float, requests: int, seed: int) -> tuple:
    """Return the times of Poisson arrivals and their waits, by Lindley's recursion."""
    random = np.random.default_rng(seed)
    at_s = np.cumsum(random.exponential(1.0 / rate_rps, requests))
    backlog = np.concatenate([[0.0], np.cumsum(service_s - np.diff(at_s))])
    return at_s, backlog - np.minimum.accumulate(backlog)


def run_search(goal: SearchGoal, outcomes_of: Callable[[SearchProbe], tuple]) -> RateSearch:
    """Search a virtual server, given a function that returns the times and outcomes of a probe."""
    search = RateSearch(goal)
    while (probe := search.propose()) is not None:
        test, outcomes = SequentialTest(probe, goal), zip(*outcomes_of(probe), strict=True)
        for index, (at_s, met) in enumerate(outcomes):
            if test.observe(index, float(at_s), met=bool(met)):
                break
        search.observe(ProbeResult(probe, test.met, index + 1, test.verdict))
    return search


def md1_outcomes(service_s: float, limit_s: float) -> Callable[[SearchProbe], tuple]:
    """Return a function that returns the outcomes of an M/D/1 server."""

    def outcomes_of(probe: SearchProbe) -> tuple:
        at_s, waited = waits(probe.rate_rps, service_s, probe.longest, probe.seed)
        return at_s, waited + service_s <= limit_s

    return outcomes_of
