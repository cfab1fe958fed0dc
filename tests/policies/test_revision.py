"""Tests of revisions: drafting is switched at a bounded rate, by values that support the switch."""

from __future__ import annotations

import operator
import re

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.speculation.revision import (
    HYSTERESIS,
    LEAST_ON_STEPS,
    MOST_REVISIONS,
    OFF_REVIEWS,
    REVIEW_STEPS,
    DraftingSwitch,
    PlanRevision,
    RevisionCause,
    SlotWorth,
    revision_cause,
)

SIGNS = {"<": operator.lt, "=": operator.eq, ">": operator.gt}
WORTHS = st.builds(
    SlotWorth,
    st.sampled_from([0.0, 0.4, 0.9, 1.0, 7.9]) | st.floats(0, 8),
    st.sampled_from([0.25, 1.0, 4.0]),
    st.floats(0.01, 1.0),
)


@given(st.booleans(), st.lists(WORTHS, max_size=200))
def test_revisions_follow_the_worth_at_a_bounded_rate(on: bool, worths: list[SlotWorth]) -> None:
    """Drafting goes off only after reviews without profit, on only with profit, and stays on for at
    least `LEAST_ON_STEPS` steps."""
    switch, switched_on_step = DraftingSwitch(on), None
    for index, worth in enumerate(worths):
        step = REVIEW_STEPS * (index + 1)
        before, switch = switch, switch.review(worth, step)
        if switch.on is before.on:
            assert switch.revisions == before.revisions
        elif switch.on:
            assert worth.most > HYSTERESIS * worth.price
            switched_on_step = step
        else:
            latest = worths[index + 1 - OFF_REVIEWS : index + 1]
            assert len(latest) == OFF_REVIEWS
            assert all(one.most <= one.price for one in latest)
            assert switched_on_step is None or step - switched_on_step >= LEAST_ON_STEPS
    assert switch.revisions <= MOST_REVISIONS


@given(st.booleans(), st.floats(0.01, 1.0), st.lists(st.floats(1.0, HYSTERESIS), max_size=50))
def test_price_near_the_worth_revises_nothing_twice(
    on: bool, survival: float, factors: list[float]
) -> None:
    """A price that varies by less than the hysteresis below the worth never switches drafting."""
    switch = DraftingSwitch(on)
    for index, factor in enumerate(factors):
        worth = SlotWorth(survival / factor, 1.0, survival)
        if worth.most > worth.price and worth.most <= HYSTERESIS * worth.price:
            switch = switch.review(worth, REVIEW_STEPS * (index + 1))
    assert (switch.on, switch.revisions) == (on, 0)


def test_revision_names_the_value_that_changed() -> None:
    """The cause is the value whose ratio moved most in favour of the revision."""
    before = SlotWorth(0.5, 1.0, 0.9)
    causes = {
        RevisionCause.PRICE: before._replace(price=2.0),
        RevisionCause.EVIDENCE: before._replace(survival=0.1),
        RevisionCause.DEADLINE: before._replace(weight=0.25),
    }
    for cause, after in causes.items():
        assert revision_cause(before, after, on=False) is cause
        assert revision_cause(after, before, on=True) is cause


@given(WORTHS, st.sampled_from([one for one in RevisionCause if one != "drafts_lose"]))
def test_reason_of_a_revision_agrees_with_its_figures(
    worth: SlotWorth, cause: RevisionCause
) -> None:
    """The comparison in the words of a revision holds for the printed numbers."""
    reason = PlanRevision(worth.most > worth.price, cause, 40, worth, 1.0).reason
    found = re.search(r"by (\w+): price (\S+) ([<=>]) (\S+), the most", reason)
    assert SIGNS[found[3]](float(found[2]), float(found[4]))
    assert found[1] == cause.value
    assert reason.startswith(f"drafting switched {'on' if found[3] == '<' else 'off'} after 40")


@given(st.booleans(), st.lists(st.tuples(WORTHS, st.booleans()), max_size=100))
def test_loss_of_the_worker_switches_drafting_at_once(
    on: bool, reviews: list[tuple[SlotWorth, bool]]
) -> None:
    """Drafting is never on while drafts lose time, whatever a slot is worth. Exactly the stopped
    sequences are switched on again."""
    switch = DraftingSwitch(on)
    for index, (worth, stops) in enumerate(reviews):
        before = switch
        switch = switch.review(worth, REVIEW_STEPS * (index + 1), stops=stops)
        assert not (switch.on and stops)
        assert switch.stopped == (stops and (before.on or before.stopped))
        if before.stopped and not stops:
            assert switch.on
