"""The acceptance of drafts before a worker has verified any."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.simulation.priors import FITTED, NAMES, fit_effects
from draftgate.lab.sim.recording import load_recording
from draftgate.policies.speculation.draft_prior import (
    BAND_ENDS,
    BAND_TEMPERATURES,
    EFFECTS,
    draft_prior,
    temperature_band,
)
from draftgate.policies.speculation.survival import (
    EVIDENCE_ROWS,
    OUTCOME_ROWS,
    POSITIONS,
    RequestRecord,
    SurvivalModel,
)


@pytest.mark.long
@pytest.mark.parametrize("proposer", FITTED)
def test_effects_are_those_of_the_shipped_recordings(proposer: str) -> None:
    """The benchmark fits the effects in the code to the shipped recordings."""
    recordings = {name: load_recording(name) for name in NAMES}
    fitted, stated = fit_effects(recordings, proposer), EFFECTS[proposer]
    assert fitted.matches == stated.matches
    for name, value in stated._asdict().items():
        assert getattr(fitted, name) == pytest.approx(value, abs=0.011), name


def test_each_temperature_has_a_band_with_a_similar_prior() -> None:
    """Bands cover all temperatures, and only temperature 0 belongs to the first one."""
    bands = [temperature_band(each) for each in (0.0, 1e-6, 0.7, BAND_ENDS[-1], 0.86, 1.0, 2.0)]
    assert bands == [0, 1, 1, 1, 2, 2, 2]
    assert [temperature_band(each) for each in BAND_TEMPERATURES] == [0, 1, 2]


@pytest.mark.parametrize("source", [*EFFECTS, "other"])
def test_prior_has_a_value_for_each_row_and_falls_with_temperature(source: str) -> None:
    """Every table starts with a probability of each token, which is lower at a high temperature."""
    chances = []
    for band in range(len(BAND_TEMPERATURES)):
        model = SurvivalModel(*draft_prior(source, band))
        rows = [model.by_evidence.row(row) for row in range(EVIDENCE_ROWS)]
        rows += [model.by_outcome.row(row) for row in range(OUTCOME_ROWS)]
        assert all(0.0 < chance < 1.0 for row in rows for chance in row.chances)
        assert all(len(row.chances) == POSITIONS for row in rows)
        chances.append(sum(row.chances[0] for row in rows))
    assert all(later <= sooner for sooner, later in pairwise(chances))


def test_longer_matches_that_agree_are_expected_to_be_right() -> None:
    """Before the first draft, the estimate grows with the length of a match and its agreement."""
    model, record = SurvivalModel(*draft_prior("ngram", 0)), RequestRecord()
    lengths = [model.draft(record, length).chances[0] for length in (1, 2, 4, 9, 32)]
    agreements = [model.draft(record, 3, share).chances[0] for share in (100, 600, 1000)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 0.5
    assert lengths[-1] > 0.8
    assert agreements == sorted(agreements)


def test_bad_drafts_outweigh_the_prior() -> None:
    """Rows without drafts follow those with drafts, against the prior."""
    model = SurvivalModel(*draft_prior("ngram", 0))
    before = model.draft(RequestRecord(), 32).chances[0]
    for _ in range(1000):
        model.add_draft(RequestRecord(), 1, 0, rejected=True)
        model.add_draft(RequestRecord(), 4, 0, rejected=True)
    assert model.draft(RequestRecord(), 32).chances[0] < before - 0.2
    assert model.draft(RequestRecord(), 4).chances[0] < 0.02
