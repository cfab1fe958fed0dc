"""Tests of the recommendations of `draftgate plan placement` and `pools`, without simulations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from draftgate.lab.plan import planner as planning
from draftgate.lab.plan.answer import PlanAnswer
from draftgate.lab.plan.machines import MachineTypes, Rentable
from draftgate.lab.plan.planner import MORE, Planner
from draftgate.lab.planning.best_deployment import (
    DeploymentCandidate,
    DeploymentSearch,
    Measured,
)
from draftgate.lab.planning.deployments import Deployment, Group
from draftgate.lab.planning.throughput import Targets
from draftgate.loadgen.search.types import SearchGoal
from draftgate.policies.types import Role

TOGETHER = DeploymentCandidate(Deployment((Group("a", Role.ANY, 1),)), 9.0, weight=2.0)
APART = DeploymentCandidate(
    Deployment((Group("a", Role.PREFILL, 1), Group("a", Role.DECODE, 1))), 8.0, weight=4.0
)
UNUSED: Any = None
PLANNER = Planner(
    MachineTypes({"a": Rentable("a", UNUSED, 7.0)}),
    UNUSED,
    Targets(0.2, 0.1, 0.9),
    {},
    UNUSED,
    SearchGoal(1.0, 1.0, share=0.9),
)


@pytest.mark.parametrize("sufficient", [4, 9])
def test_machines_that_miss_the_targets_are_no_plan(
    sufficient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More copies are tried until a simulation meets the share. If none does, there is no plan."""
    tried: list[int] = []

    def records(_self: Planner, deployment: Deployment, _rate_rps: float) -> list[bool]:
        tried.append(deployment.machines)
        return [deployment.machines >= sufficient] * 10

    monkeypatch.setattr(Planner, "records", records)
    monkeypatch.setattr(planning, "meets_slo", bool)
    deployment, _ = PLANNER.enough(Measured(TOGETHER, 2.0, 1.9, 2.1), 5.0)
    if sufficient == 4:
        assert deployment == TOGETHER.deployment.repeated(4)
        assert tried == [3, 4]
    else:
        assert deployment is None
        assert tried == list(range(3, 3 + MORE + 1))


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (Measured(TOGETHER, None, 1.2, math.inf, converged=False), "from 1.20, not converged"),
        (Measured(TOGETHER, None, 0.0, 3.1, converged=False), "below 3.10, not converged"),
        (Measured(TOGETHER, 2.0, 1.2, 3.1, converged=False), "1.20 to 3.10, not converged"),
    ],
)
def test_rate_without_a_bound_on_both_sides_is_not_printed(
    measured: Measured,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that did not converge says so, and gives an estimate only within a bracket."""
    monkeypatch.setenv("COLUMNS", "200")
    search = DeploymentSearch((measured,), (), complete=True)
    deployment = TOGETHER.deployment if search.best else None
    PlanAnswer("placement", PLANNER, search, deployment, None).show()
    text = " ".join(capsys.readouterr().out.split())
    assert words in text
    assert "did not converge within 6000 requests: 1 of 1" in text
    assert ("2.00" in text) == (measured.rate_rps is not None)
    assert ("no search found the highest rate" in text) == (measured.rate_rps is None)


@pytest.mark.parametrize(("low", "equal"), [(2.8, True), (3.2, False)])
def test_recommendation_of_an_equal_layout_is_explained(
    low: float, equal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Together is recommended if its interval reaches that of a higher goodput, with the reason."""
    measured = (Measured(TOGETHER, 1.5, 1.4, 1.55), Measured(APART, 3.3, low, 3.5))
    search = DeploymentSearch(measured, (), complete=True)
    assert search.best is not None
    deployment = search.best.candidate.deployment
    PlanAnswer("placement", PLANNER, search, deployment, None, per="USD").show()
    text = capsys.readouterr().out
    assert "2970" in text  # requests per USD, of 3.3 requests/s for 4 USD per hour
    words = " ".join(text.split())
    if equal:
        assert "1 x a (together) for 7.00 USD per hour serves 1.50 requests/s (1.40 to" in words
    else:
        assert "(apart) for 14.00 USD per hour serve 3.30 requests/s (3.20 to 3.50)" in words
    assert "with a TTFT of 200 ms and a TPOT of 100 ms for 90% of the requests" in words
    assert ("has a higher goodput, but the intervals overlap" in text) == equal
