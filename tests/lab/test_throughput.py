"""Predicted throughputs of machines within latency targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.lab.planning.throughput import (
    NO_DRAFTS,
    DraftPoint,
    Machine,
    Size,
    Targets,
    throughput,
)
from draftgate.policies.costs.step_cost import StepCost

TOKENS = tuple(range(1, 2049))
COST = StepCost(TOKENS, tuple(0.01 + 20e-6 * tokens for tokens in TOKENS), 40e-9)
FREE = StepCost((1,), (0.0,))
MACHINE = Machine(COST, 400_000, 256, 2048, FREE)

_sizes = st.builds(Size, st.floats(1, 8000), st.floats(1, 1000))
_targets = st.builds(
    Targets, st.floats(0.1, 5.0), st.floats(0.005, 0.2), st.sampled_from((0.5, 0.95, 0.995))
)
_drafts = st.builds(
    lambda slots, share, least: DraftPoint(slots, slots * share, 1.0 + least, 4),
    st.floats(0.1, 8.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 2.0),
)


def test_decodes_fill_the_step_that_tpot_allows() -> None:
    """With short prompts, the throughput is the batch of the longest step over its duration."""
    machine = replace(MACHINE, cost=StepCost(TOKENS, COST.step_s))
    found = throughput(machine, Size(1.0, 101.0), Targets(tpot_s=0.0141))
    # A step of 200 decodes takes 14 ms with 2 prompt tokens, and each decodes for 100 steps.
    assert found.rate_rps == pytest.approx(200 / 100 / 0.0141, rel=0.02)
    assert found.drafts is NO_DRAFTS


def test_memory_limits_the_batch() -> None:
    """A machine with memory for ten requests serves ten at a time."""
    small = replace(MACHINE, kv_tokens=10 * 1200)
    found = throughput(small, Size(200.0, 1000.0), Targets())
    step_s = COST.seconds(10 + 2, 10 * 700, 10)
    assert found.rate_rps == pytest.approx(10 / 999 / step_s, rel=0.02)
    assert throughput(replace(small, kv_tokens=1100), Size(200.0, 1000.0), Targets()).rate_rps == 0


def test_prompts_fill_the_steps_without_decodes() -> None:
    """Requests for a single token take the time of their prompts."""
    found = throughput(MACHINE, Size(1000.0, 1.0), Targets())
    assert found.rate_rps == pytest.approx(2.048 / COST.seconds(2048), rel=0.02)


@pytest.mark.parametrize("targets", [Targets(tpot_s=0.009), Targets(ttft_s=0.1)])
def test_machine_that_is_too_slow_serves_nothing(targets: Targets) -> None:
    """A step longer than TPOT or a prompt longer than TTFT leaves no throughput."""
    assert throughput(MACHINE, Size(8000.0, 100.0), targets).rate_rps == 0.0


def test_drafts_make_a_slow_machine_feasible() -> None:
    """A machine whose step exceeds TPOT serves requests whose drafts are always accepted twice."""
    targets, size = Targets(tpot_s=0.009), Size(100.0, 100.0)
    assert throughput(MACHINE, size, targets).rate_rps == 0.0
    sure = DraftPoint(slots=2.0, accepted=1.5, least_tokens=2.0, depth=2)
    found = throughput(MACHINE, size, targets, [sure])
    assert found.rate_rps > 0.0
    assert found.drafts == sure
    unsure = replace(sure, least_tokens=1.0)
    assert throughput(MACHINE, size, targets, [unsure]).rate_rps == 0.0


@given(_sizes, _targets, _drafts)
def test_drafts_never_lower_the_throughput(
    size: Size, targets: Targets, drafts: DraftPoint
) -> None:
    """The better of the throughputs with and without drafts counts."""
    without = throughput(MACHINE, size, targets).rate_rps
    assert throughput(MACHINE, size, targets, [drafts]).rate_rps >= without


@given(_sizes, _targets)
def test_relaxed_targets_never_lower_the_throughput(size: Size, targets: Targets) -> None:
    """Longer limits and a smaller share allow at least the same rate, up to the bisection."""
    strict = throughput(MACHINE, size, targets).rate_rps
    for name, value in (
        ("ttft_s", targets.ttft_s * 1.5),
        ("tpot_s", targets.tpot_s * 1.5),
        ("share", targets.share * 0.9),
    ):
        relaxed = throughput(MACHINE, size, replace(targets, **{name: value})).rate_rps
        assert relaxed >= strict * (1.0 - 1e-3)


@given(_sizes, _targets, st.floats(0.0, 0.02), st.floats(0.0, 1e-4))
def test_host_time_lowers_the_throughput_least_if_it_overlaps(
    size: Size, targets: Targets, host_s: float, sequence_s: float
) -> None:
    """A host that works beside the device is never slower than one for which the device waits."""
    waiting = replace(MACHINE, host_s=host_s, host_sequence_s=sequence_s)
    rates = [
        throughput(machine, size, targets).rate_rps
        for machine in (waiting, replace(waiting, host_overlaps=True), MACHINE)
    ]
    assert rates[0] <= rates[1] * (1 + 1e-6)
    assert rates[1] <= rates[2] * (1 + 1e-6)


def test_short_host_time_is_hidden() -> None:
    """Host time that is shorter than every step costs nothing if it overlaps."""
    size, targets = Size(100.0, 200.0), Targets(tpot_s=0.03)
    hidden = replace(MACHINE, host_s=0.005, host_sequence_s=1e-5, host_overlaps=True)
    assert throughput(hidden, size, targets) == throughput(MACHINE, size, targets)
