"""The forecast of a request's drafts, whose constants are fitted to recorded drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftgate.policies.speculation.draft_forecast import (
    GOOD_DRAFT,
    HISTORY_TOKENS,
    REPETITION_SLOPE,
    USUAL_REPETITION,
    DraftForecast,
    forecast_drafts,
)
from draftgate.policies.speculation.plan_reason import AcceptanceSource
from draftgate.policies.speculation.repetition import MATCH_TOKENS, TAIL_TOKENS
from draftgate.policies.types import (
    ANY_PROPOSER,
    ANYTIME,
    DraftCounts,
    RequestView,
    ServiceLevel,
    WorkerLoad,
)

MEASURED = Path(__file__).resolve().parents[2] / "bench/results/request-forecast.json"
RESULTS = json.loads(MEASURED.read_text())["results"]


def test_caps_exclude_little_of_the_gain_of_slots() -> None:
    """Caps lose at most 5% of the gain at any price, and 2.5% up to the prices of 256 sequences."""
    rows = [row for row in RESULTS["caps"] if row["good_draft"] == GOOD_DRAFT]
    assert len(rows) >= 12
    assert all(row["lost"] <= 0.05 for row in rows)
    assert all(row["lost"] <= 0.025 for row in rows if row["price"] <= 0.3)


def test_weight_of_a_tenants_history_predicts_best() -> None:
    """No other tested weight lowers the loss by more than a thousandth of a nat."""
    losses = {row["weight_tokens"]: row["nats"] for row in RESULTS["history"]}
    assert losses[HISTORY_TOKENS] <= min(losses.values()) + 1e-3


def test_repetition_constants_match_their_fits() -> None:
    """The slope is within the range of all fits to whole texts, and the mean matches the
    prompts."""
    rows = [
        row
        for row in RESULTS["repetition"]
        if (row["match_tokens"], row["tail_tokens"]) == (MATCH_TOKENS, TAIL_TOKENS)
    ]
    whole = [row for row in rows if row["drafts"] == "whole texts"]
    assert len(rows) == 2 * len(whole) == 4
    assert all(row["slope"] == pytest.approx(REPETITION_SLOPE, abs=0.1) for row in whole)
    slopes = [row["slope"] for row in rows]
    assert min(slopes) < REPETITION_SLOPE < max(slopes)
    assert all(row["mean_share"] == pytest.approx(USUAL_REPETITION, abs=0.02) for row in rows)


def test_acceptance_is_shrunk_from_tenant_to_model_to_worker() -> None:
    """64 tested tokens of a tenant or model move the estimate halfway."""
    load = WorkerLoad(1, 0, 1, 1, 0.1, 0.4, ("ngram",))
    view = RequestView(9, 9, 0.0, model_drafts=DraftCounts(64, 0), tenant_drafts=DraftCounts(0, 64))
    expected = forecast_drafts(view, load, "ngram")
    assert expected.acceptance == pytest.approx(((0.4 + 1.0) / 2 + 0.0) / 2)
    assert (expected.source, expected.weight) == (AcceptanceSource.TENANT, 1.0)
    assert forecast_drafts(RequestView(9, 9, 0.0), load, "ngram").acceptance == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("service", "weight"),
    [
        (ANYTIME, 1.0),
        (ServiceLevel(ttft_s=0.1), 1.0),
        (ServiceLevel(tpot_s=0.1), 4.0),
        (ServiceLevel(priority=1), 0.5),
        (ServiceLevel(tpot_s=0.1, priority=-1), 8.0),
    ],
)
def test_request_with_a_tpot_target_weighs_as_if_late(service, weight) -> None:
    """A TPOT target and the class raise the weight of a request, and a TTFT target does not."""
    load = WorkerLoad(1, 0, 1, 1, 0.1, 0.4, ("ngram",))
    view = RequestView(9, 9, 0.0, service=service)
    assert forecast_drafts(view, load, ANY_PROPOSER).weight == weight


@pytest.mark.parametrize("acceptance", [0.0, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("repetition", [None, 0.0, 1.0])
def test_survivals_of_a_good_draft_are_probabilities_that_fall(acceptance, repetition) -> None:
    """Survivals are probabilities that never rise from slot to slot."""
    expected = DraftForecast(acceptance, "", repetition, 1.0)
    survivals = [expected.survival(slot) for slot in range(1, 17)]
    assert all(0.0 < survival < 1.0 for survival in survivals)
    assert survivals == sorted(survivals, reverse=True)
    assert expected.paying_slots(0.0, 16) == 16
    assert expected.paying_slots(1.0, 16) == 0
