"""Tests of the estimates of rates, which order the simulations of a search."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.lab.planning.bounds import MeanLengths, bounds
from draftgate.lab.planning.deployments import Deployment, Group, bound_rps
from draftgate.lab.planning.forecast import Forecast
from draftgate.lab.planning.queueing import highest_rate_rps
from draftgate.lab.planning.throughput import Machine, Targets
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import Role

COST = StepCost((1, 100, 2048), (0.02, 0.024, 0.2), 1e-6, 1e-4, 1e-8)
DEPTHS = StepCost((1,), (0.0,))
MACHINES = {"a": Machine(COST, 60_000, 256, 2048, DEPTHS)}
REQUESTS = [(500, 200), (1500, 100), (100, 300)] * 20
LENGTHS = MeanLengths.from_requests(REQUESTS, 0.9)
ROLES = st.sampled_from(
    [(Role.ANY,), (Role.PREFILL, Role.DECODE), (Role.ANY, Role.DECODE), tuple(Role)]
)
DEPLOYMENTS = st.builds(
    lambda roles, counts: Deployment(
        tuple(Group("a", role, count) for role, count in zip(roles, counts, strict=False))
    ),
    ROLES,
    st.tuples(*[st.integers(1, 3)] * 3),
)
TARGETS = st.builds(Targets, st.floats(0.1, 2.0), st.floats(0.03, 0.5))


def _forecast(targets: Targets) -> Forecast:
    return Forecast.for_requests(MACHINES, targets, REQUESTS, LENGTHS.context_tokens)


@given(DEPLOYMENTS, TARGETS)
def test_estimate_is_at_most_the_bound(deployment: Deployment, targets: Targets) -> None:
    """An estimate never exceeds the bound that it is given, and meets the share."""
    most_rps = bound_rps(deployment, {"a": bounds(MACHINES["a"], LENGTHS, targets)})
    forecast = _forecast(targets)
    rate_rps = forecast.rate_rps(deployment, most_rps)
    assert 0.0 <= rate_rps <= most_rps
    assert rate_rps == 0.0 or forecast.share(deployment, rate_rps) >= targets.share


@given(DEPLOYMENTS, TARGETS, st.floats(0.1, 20.0), st.floats(1.0, 3.0))
def test_share_falls_with_the_rate(
    deployment: Deployment, targets: Targets, rate_rps: float, more: float
) -> None:
    """No request meets its targets only because others arrive more often."""
    forecast = _forecast(targets)
    share = forecast.share(deployment, rate_rps)
    assert 0.0 <= forecast.share(deployment, more * rate_rps) <= share + 1e-9
    assert share <= 1.0 + 1e-9


@given(DEPLOYMENTS, TARGETS, st.floats(0.0, 50.0))
def test_output_takes_at_most_the_tpot(
    deployment: Deployment, targets: Targets, rate_rps: float
) -> None:
    """A warm-up of the estimated output is never longer than one of the target."""
    output_s = _forecast(targets).output_s(deployment, rate_rps)
    assert 0.0 < output_s <= targets.tpot_s * LENGTHS.output_tokens * (1.0 + 1e-9)


def test_prompts_of_one_length_wait_as_in_heavy_traffic() -> None:
    """The estimate for equal prompts is that of an exponential tail with the mean of M/D/1."""
    machine, targets = MACHINES["a"], Targets(0.4, share=0.6)
    forecast = Forecast.for_requests(MACHINES, targets, [(700, 1)] * 10, 700.0)
    apart = Deployment((Group("a", Role.PREFILL, 1), Group("a", Role.DECODE, 3)))
    found = forecast.rate_rps(apart, 100.0)
    service_s = machine.cost.seconds(1) + float(forecast._prompt_s("a")[0])
    # With a share of 1 - load / e, the limit of the wait is its mean while a prompt waits.
    assert found < 1.0 / service_s
    assert found == pytest.approx(highest_rate_rps(0.4, service_s, service_s), rel=0.15)
