"""An hour of a pool in virtual time. `make soak ARGS='--virtual-hours 168'` runs a week."""

from __future__ import annotations

import pytest

from tests.chaos.virtual.week import Week, run_week


@pytest.mark.parametrize(
    "week",
    [
        Week(hours=0.5, rate_per_s=0.06, fault_every_s=15.0),
        pytest.param(Week(hours=6.0, seed=2, fault_every_s=40.0), marks=pytest.mark.long),
    ],
    ids=["short", "long"],
)
def test_no_request_of_a_virtual_pool_is_altered_or_leaves_anything(week: Week) -> None:
    """Every request gets its text once, or is lost with its own gateway, while nodes and the store
    fail. Each hour, no lease, sequence or block remains, and every gateway uses all workers."""
    found = run_week(week)
    assert found["details"] == []
    assert found["remains"] == []
    assert found["requests"]["intact"] > 0.8 * sum(found["requests"].values())
    assert {"failed", "moved"} <= found["resumes"].keys()
