"""Survival estimates of draft tokens."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.speculation.survival import (
    AGREEMENT_EDGES,
    EVIDENCE_EDGES,
    EVIDENCE_ROWS,
    OUTCOME_ROWS,
    POSITIONS,
    AcceptanceRate,
    RequestRecord,
    SurvivalModel,
    SurvivalTable,
    evidence_row,
    outcome_row,
)
from tests.policies.calibration import brier_score, calibration_error, reliability

drafts = st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=200)


@given(drafts, st.floats(0.01, 0.99))
def test_rate_is_strictly_between_0_and_1(observed, prior) -> None:
    """The rate stays strictly between 0 and 1 after any drafts."""
    acceptance = AcceptanceRate(forgetting=0.998)
    for accepted, rejected in observed:
        acceptance.add_draft(accepted, rejected=rejected)
    assert 0.0 < acceptance.rate(prior) < 1.0


def test_rate_starts_at_the_prior_and_approaches_the_frequency() -> None:
    """The prior loses its weight as counts grow."""
    acceptance = AcceptanceRate()
    assert acceptance.rate(prior=0.3) == pytest.approx(0.3)
    for _ in range(1000):
        acceptance.add_draft(3, rejected=True)
    assert acceptance.rate(prior=0.3) == pytest.approx(0.75, abs=0.01)


def test_old_drafts_lose_their_weight_in_the_rate() -> None:
    """The rate follows a change within about 500 drafts."""
    acceptance = AcceptanceRate(forgetting=0.998)
    for _ in range(5000):
        acceptance.add_draft(4, rejected=False)
    for _ in range(1500):
        acceptance.add_draft(0, rejected=True)
    assert acceptance.rate() < 0.25


outcomes = st.lists(
    st.tuples(st.integers(0, 1200), st.integers(0, 70), st.booleans()), max_size=120
)


@given(outcomes, st.integers(0, 40))
def test_survivals_are_probabilities_that_never_rise(observed, length) -> None:
    """Any drafts give survivals that are probabilities and never rise."""
    survivals, record = SurvivalModel(), RequestRecord()
    for evidence, accepted, rejected in observed:
        survivals.add_draft(record, evidence, accepted, rejected=rejected)
    for row in (survivals.draft(record, 5), survivals.next_draft(record)):
        chain = row.of_length(length)
        assert len(chain) == length
        assert all(0.0 < survival < 1.0 for survival in chain)
        assert all(later <= earlier for earlier, later in pairwise(chain))
        assert all(0.0 < chance < 1.0 for chance in row.chances)


def test_every_evidence_and_outcome_has_its_row() -> None:
    """The table counts every way in which a draft can end."""
    rows = [
        evidence_row(evidence, agreement)
        for evidence in (0, *EVIDENCE_EDGES)
        for agreement in (0, *AGREEMENT_EDGES)
    ]
    assert rows == list(range(EVIDENCE_ROWS))
    ends = [(0, True), (1, True), (2, True), (3, True), (4, True), (4, False)]
    assert [outcome_row(accepted, rejected=rejected) for accepted, rejected in ends] == [
        *range(1, 7)
    ]
    assert outcome_row(60, rejected=True) < OUTCOME_ROWS


def test_table_starts_at_the_prior_and_approaches_the_counts() -> None:
    """An unseen row starts at one half to the power of the position."""
    table = SurvivalTable(2)
    assert table.row(0).of_length(3) == pytest.approx((0.5, 0.25, 0.125))
    for count in range(2048):
        # Every draft has one accepted token, and every second draft has two more.
        table.add_draft(1, 1 + 2 * (count % 2), rejected=True)
    assert table.row(1).chances[:4] == pytest.approx((1.0, 0.5, 1.0, 0.0), abs=0.02)


def test_unseen_row_follows_the_others() -> None:
    """New evidence starts with the mean of all seen evidence."""
    table = SurvivalTable(2)
    for _ in range(512):
        table.add_draft(1, 8, rejected=False)
    assert table.row(0).chances[0] > 0.95
    assert table.best_survival > table.row(1).chances[0]


def test_unseen_row_of_a_group_follows_its_group() -> None:
    """A row without drafts starts with each position of its group, not of the whole table."""
    table = SurvivalTable(4, group=2)
    for _ in range(512):
        table.add_draft(0, 0, rejected=True)
        table.add_draft(2, 3, rejected=True)
    assert table.row(1).chances[0] < 0.05
    assert table.row(3).chances[:4] == pytest.approx((1.0, 1.0, 1.0, 0.0), abs=0.05)


def test_agreement_of_matches_changes_the_estimates_of_equal_lengths() -> None:
    """Drafts whose matches agree become likelier than drafts whose matches differ."""
    survivals, record = SurvivalModel(), RequestRecord()
    for _ in range(300):
        survivals.add_draft(record, 3, 4, rejected=True, agreement=1000)
        survivals.add_draft(record, 3, 0, rejected=True, agreement=300)
    agreed, differed = survivals.draft(record, 3, 1000), survivals.draft(record, 3, 300)
    assert agreed.chances[0] > 0.9
    assert differed.chances[0] < 0.1


def test_table_follows_drafts_that_turn_bad() -> None:
    """Old drafts lose their weight in the table."""
    table = SurvivalTable(1)
    for _ in range(20_000):
        table.add_draft(0, 4, rejected=False)
    for _ in range(40_000):
        table.add_draft(0, 0, rejected=True)
    assert table.row(0).chances[0] < 0.1


def test_own_drafts_shift_the_estimates_of_a_request() -> None:
    """Better earlier drafts raise the survivals of a request with equal evidence."""
    survivals, others = SurvivalModel(), RequestRecord()
    for count in range(300):
        survivals.add_draft(others, 3, count % 2, rejected=True)
    lucky, unlucky = RequestRecord(), RequestRecord()
    for _ in range(10):
        survivals.add_draft(lucky, 3, 6, rejected=False)
        survivals.add_draft(unlucky, 3, 0, rejected=True)
    firsts = [survivals.draft(r, 3).survivals[0] for r in (unlucky, others, lucky)]
    assert firsts == sorted(firsts)
    assert firsts[0] < 0.6 * firsts[2]


def test_lookups_that_find_nothing_lower_the_next_survival() -> None:
    """A lookup without a match counts as a rejected draft."""
    survivals, record = SurvivalModel(), RequestRecord()
    before = survivals.next_draft(record).survivals[0]
    for _ in range(50):
        survivals.add_outcome(record, 0, rejected=True)
    assert survivals.next_draft(record).survivals[0] < 0.2 < before


def test_forecasts_are_calibrated_for_a_known_distribution() -> None:
    """Survivals are within 3 points of the true probabilities.

    The true probabilities are logistic in evidence, position and request. The Brier score is within
    0.01 of the best possible score, and a constant rate scores worse.
    """
    rng = random.Random(5)
    survivals, overall = SurvivalModel(), AcceptanceRate()
    said: list[float] = []
    ideal: list[float] = []
    flat: list[float] = []
    came: list[bool] = []
    for request in range(400):
        record, own = RequestRecord(), rng.gauss(0.0, 0.5)
        for _ in range(30):
            evidence = rng.choice((1, 3, 8, 20))
            truth = [0.25 * math.sqrt(evidence) + own + 0.05 * p for p in range(6)]
            chances = [1.0 / (1.0 + math.exp(-logit)) for logit in truth]
            accepted = next((p for p in range(6) if rng.random() > chances[p]), 6)
            row = survivals.draft(record, evidence)
            if request >= 100:
                said += row.of_length(6)
                ideal += [math.prod(chances[: p + 1]) for p in range(6)]
                flat += [overall.rate() ** (p + 1) for p in range(6)]
                came += [p < accepted for p in range(6)]
            survivals.add_draft(record, evidence, accepted, rejected=accepted < 6)
            overall.add_draft(accepted, rejected=accepted < 6)
    assert calibration_error(reliability(said, came)) < 0.03
    assert brier_score(said, came) < brier_score(ideal, came) + 0.01
    assert brier_score(said, came) < brier_score(flat, came)


def test_positions_beyond_the_table_count_as_the_last() -> None:
    """A draft of 64 tokens has a survival for every position."""
    row = SurvivalTable(1).row(0)
    chain = row.of_length(64)
    assert chain[:POSITIONS] == row.survivals
    assert chain[-1] == pytest.approx(0.5**64)
