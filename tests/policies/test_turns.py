"""Turns on a shared device: classes, targets, shares, and bounded waits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.turns import LAG_S, OUTRANKED_S, StepUrgency, TurnOrder
from draftgate.policies.types import BATCH_PRIORITY

BATCH = StepUrgency(BATCH_PRIORITY, step_s=0.05)
STEPS_S = st.lists(st.floats(1e-3, 0.1), min_size=1, max_size=8)
ENGINES = st.lists(st.tuples(STEPS_S, st.floats(0.25, 4.0)), min_size=2, max_size=4)
"""The durations of the steps of each engine, in turn, and its weight."""


class Device:
    """A device in virtual time, on which engines run steps without a pause."""

    def __init__(self, engines: list[tuple[list[float], float]]) -> None:
        self.order = TurnOrder[int]()
        self.steps_s = [steps_s for steps_s, _ in engines]
        self.weights = [weight for _, weight in engines]
        self.runs = [0] * len(engines)
        self.served_s = [0.0] * len(engines)  # per weight
        self.now_s = 0.0

    def run(self, waiting: Mapping[int, StepUrgency]) -> int:
        """Run one step of one of the waiting engines, and return the engine."""
        chosen = self.order.choose(waiting, self.now_s)
        steps_s = self.steps_s[chosen]
        step_s = steps_s[self.runs[chosen] % len(steps_s)]
        self.order.charge(chosen, step_s, self.weights[chosen])
        self.now_s += step_s
        self.runs[chosen] += 1
        self.served_s[chosen] += step_s / self.weights[chosen]
        return chosen

    def longest_s(self) -> float:
        """Return the longest step per weight."""
        pairs = zip(self.steps_s, self.weights, strict=True)
        return max(max(steps_s) / weight for steps_s, weight in pairs)


def alone(engine: int) -> dict[int, StepUrgency]:
    return {engine: StepUrgency()}


@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 3),
            st.builds(
                StepUrgency, st.integers(-1, 1), st.none() | st.floats(0, 0.2), st.floats(0, 0.1)
            ),
            min_size=1,
        ),
        max_size=60,
    ),
    st.floats(1e-3, 1.0),
)
def test_device_is_never_idle_and_serves_the_most_urgent_class(
    choices: list[dict[int, StepUrgency]], step_s: float
) -> None:
    """A waiting engine of the most urgent class runs, unless another one was outranked for long."""
    device, repeated = Device([([step_s], 1.0)] * 4), Device([([step_s], 1.0)] * 4)
    since_s: dict[int, float] = {}
    for waiting in choices:
        since_s = {engine: since_s.get(engine, device.now_s) for engine in waiting}
        outranked = {e for e, begun_s in since_s.items() if device.now_s - begun_s >= OUTRANKED_S}
        chosen = device.run(waiting)
        assert chosen in waiting
        assert waiting[chosen].priority == min(w.priority for w in waiting.values()) or (
            chosen in outranked
        )
        assert repeated.run(waiting) == chosen  # equal calls have equal results
        del since_s[chosen]


@given(ENGINES, st.lists(st.floats(0, 0.1) | st.none(), min_size=4, max_size=4))
def test_shares_follow_weights_whatever_the_targets(
    engines: list[tuple[list[float], float]], slacks_s: list[float | None]
) -> None:
    """While engines of a class always wait, their device time per weight differs by at most the
    lag and a step, even if a target can never be met."""
    device = Device(engines)
    waiting = {index: StepUrgency(0, slacks_s[index], 0.1) for index in range(len(engines))}
    bound_s = device.longest_s() + (LAG_S if any(s is not None for s in slacks_s) else 0.0)
    for _ in range(300):
        device.run(waiting)
        assert max(device.served_s) - min(device.served_s) <= bound_s + 1e-9


@given(ENGINES, st.integers(1, 200), st.booleans())
def test_absent_or_outranked_engine_gains_no_credit(
    engines: list[tuple[list[float], float]], steps: int, outranked: bool
) -> None:
    """An engine that was idle, or of a less urgent class, gets only its share afterwards."""
    device = Device(engines)
    before = {index: StepUrgency() for index in range(1, len(engines))}
    for _ in range(steps):
        device.run({**before, 0: BATCH} if outranked else before)
    served_s, bound_s = list(device.served_s), 2 * device.longest_s() + 1e-9
    for _ in range(100):
        device.run({0: StepUrgency(), **before})
        gained_s = [now - then for now, then in zip(device.served_s, served_s, strict=True)]
        assert gained_s[0] <= min(gained_s[1:]) + bound_s


def test_batch_work_runs_only_while_no_engine_has_other_work() -> None:
    """Batch work waits as long as another engine has interactive work, up to its limit."""
    step_s = 0.0625  # binary, so that times are exact
    device = Device([([step_s], 1.0)] * 2)
    waits = round(OUTRANKED_S / step_s)
    chosen = [device.run({0: BATCH, 1: StepUrgency(step_s=step_s)}) for _ in range(2 * waits)]
    assert chosen == [*[1] * waits, 0, *[1] * (waits - 1)]
    assert device.run({0: BATCH}) == 0


@pytest.mark.parametrize(("slack_s", "first"), [(0.04, 0), (0.06, 1), (None, 1)])
def test_engine_whose_target_cannot_wait_runs_first(slack_s: float | None, first: int) -> None:
    """Slack below the steps of the others precedes device time, and more slack does not."""
    device = Device([([0.01], 1.0)] * 2)
    device.run(alone(0))
    device.run(alone(1))
    device.run(alone(0))
    waiting = {0: StepUrgency(0, slack_s, 0.01), 1: StepUrgency(0, None, 0.05)}
    assert device.run(waiting) == first


def test_least_slack_runs_first_among_pressing_engines() -> None:
    """Of two engines that cannot wait, the one with less slack runs first."""
    device = Device([([0.01], 1.0)] * 3)
    waiting = {
        0: StepUrgency(0, 0.03, 0.02),
        1: StepUrgency(0, 0.01, 0.02),
        2: StepUrgency(0, None, 0.02),
    }
    assert device.run(waiting) == 1


def test_forgotten_engine_starts_anew() -> None:
    """An engine that returns after `forget` owes nothing."""
    device = Device([([1.0], 1.0), ([0.01], 1.0)])
    device.run(alone(0))
    device.order.forget(0)
    assert device.run({0: StepUrgency(), 1: StepUrgency()}) == 0
