"""Revisions on a scheduler with a fake device, as the price of slots rises and falls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.core.sequence import Sequence
from draftgate.policies.speculation.auto import Auto
from draftgate.policies.speculation.revision import (
    LEAST_ON_STEPS,
    OFF_REVIEWS,
    REVIEW_STEPS,
    RevisionCause,
)
from draftgate.policies.types import SpeculationMode
from tests.core.fakes import drafting, request
from tests.core.scheduler_harness import SchedulerHarness


class PricedAuto(Auto):
    """`auto` with a price that the test sets."""

    price = 0.0

    def least_survival(self, step, cost) -> float:
        return type(self).price


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> type[PricedAuto]:
    monkeypatch.setattr(PricedAuto, "price", 0.0)
    return PricedAuto


def run_steps(harness: SchedulerHarness, steps: int) -> None:
    for _ in range(steps):
        harness.step()


def add(harness: SchedulerHarness, **of_plan: object) -> Sequence:
    """Add a long request with these fields of its plan."""
    plan = replace(drafting(3), **of_plan)
    endless = request(prompt=4, max_tokens=2000, drafts=3, ignore_eos=True)
    return harness.add_choices(endless.planned(plan))[0]


def test_drafting_follows_the_price(priced: type[PricedAuto]) -> None:
    """Drafting goes off while no slot can be worth the price, and on when the price falls."""
    harness = SchedulerHarness(num_blocks=600, policy=priced())
    sequence = add(harness)
    run_steps(harness, REVIEW_STEPS)
    drafted = sequence.drafted_tokens
    assert drafted > 0
    assert not sequence.revisions
    priced.price = 7.9
    run_steps(harness, (OFF_REVIEWS + 2) * REVIEW_STEPS)
    (off,) = sequence.revisions
    assert (off.on, off.cause, off.worth.price) == (False, RevisionCause.PRICE, 7.9)
    assert "price 7.9 >" in off.reason
    drafted = sequence.drafted_tokens
    run_steps(harness, REVIEW_STEPS)
    assert sequence.drafted_tokens == drafted
    priced.price = 0.1
    run_steps(harness, 2 * REVIEW_STEPS)
    assert [one.on for one in sequence.revisions] == [False, True]
    run_steps(harness, REVIEW_STEPS)
    assert sequence.drafted_tokens > drafted
    assert sequence.outcome().revisions == tuple(sequence.revisions)


def test_alternating_price_revises_at_a_bounded_rate(priced: type[PricedAuto]) -> None:
    """A price that alternates as fast as reviews allow gives at most two revisions in 80 steps."""
    harness = SchedulerHarness(num_blocks=600, policy=priced())
    sequence, steps = add(harness), 0
    while steps < 640:
        priced.price = 0.0 if steps // (OFF_REVIEWS * REVIEW_STEPS) % 2 else 7.9
        run_steps(harness, REVIEW_STEPS)
        steps += REVIEW_STEPS
    assert 2 <= len(sequence.revisions) <= 2 * (steps // (LEAST_ON_STEPS + REVIEW_STEPS) + 1)


def test_plan_that_is_off_starts_to_draft_when_slots_become_worth_it(
    priced: type[PricedAuto],
) -> None:
    """A plan that is off for its price is switched on, while a plan of the client stays off."""
    harness = SchedulerHarness(num_blocks=600, policy=priced())
    off = {"proposer": None, "max_draft_tokens": 0}
    revisable = add(harness, **off, later_proposer="ngram", later_draft_tokens=2)
    final = add(harness, **off)
    priced.price = 7.9
    run_steps(harness, 2 * REVIEW_STEPS)
    assert not revisable.revisions
    priced.price = 0.1
    run_steps(harness, 3 * REVIEW_STEPS)
    assert [one.on for one in revisable.revisions] == [True]
    assert revisable.drafted_tokens > 0
    assert len(revisable.histogram) <= 3
    assert (final.revisions, final.drafted_tokens) == ([], 0)


def test_named_proposer_is_not_revised(priced: type[PricedAuto]) -> None:
    """A request whose client names a proposer keeps drafting allowed at any price."""
    harness = SchedulerHarness(num_blocks=600, policy=priced())
    sequence = add(harness, mode=SpeculationMode.NGRAM)
    priced.price = 7.9
    run_steps(harness, 6 * REVIEW_STEPS)
    assert sequence.drafting.on
    assert not sequence.revisions


def test_steps_are_planned_ahead_while_drafting_is_off(priced: type[PricedAuto]) -> None:
    """The next step needs no result of the last step while drafting is off."""
    for price, ahead in ((0.1, False), (7.9, True)):
        priced.price = price
        harness = SchedulerHarness(num_blocks=600, policy=priced())
        sequence = add(harness)
        run_steps(harness, 4 * REVIEW_STEPS)
        plan = harness.scheduler.plan()
        assert (harness.scheduler.plan_ahead(plan) is not None) == ahead
        assert sequence.drafting.on != ahead
