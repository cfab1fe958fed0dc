"""Scores of forecasts."""

from __future__ import annotations

import pytest

from tests.policies.calibration import brier_score, calibration_error, reliability


def test_brier_score_is_the_mean_squared_difference() -> None:
    """A certain forecast scores 0 if right and 1 if wrong, and a coin scores 1/4."""
    assert brier_score([1.0, 0.0], [True, False]) == 0.0
    assert brier_score([1.0, 0.0], [False, True]) == 1.0
    assert brier_score([0.5] * 4, [True, False, True, False]) == 0.25
    assert brier_score([0.9, 0.2], [True, True]) == pytest.approx((0.01 + 0.64) / 2)


def test_reliability_bins_hold_mean_forecast_observed_share_and_size() -> None:
    """Each bin holds its mean forecast, observed share and size, and empty bins are omitted."""
    chances = [*[0.25] * 4, *[0.75] * 4, 1.0]
    came = [True, False, False, False, True, True, True, False, True]
    bins = reliability(chances, came)
    assert bins == ((0.25, 0.25, 4), (0.75, 0.75, 4), (1.0, 1.0, 1))
    assert calibration_error(bins) == 0.0
    assert calibration_error(reliability(chances, [False] * 9)) == pytest.approx(5 / 9)


def test_invalid_forecasts_are_refused() -> None:
    """Missing forecasts, unequal lengths and values outside 0 to 1 raise an error."""
    with pytest.raises(ValueError, match="no forecasts"):
        brier_score([], [])
    with pytest.raises(ValueError, match="shorter"):
        brier_score([0.5, 0.5], [True])
    with pytest.raises(ValueError, match="between 0 and 1"):
        reliability([1.5], [True])
