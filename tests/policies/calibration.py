"""Measures of the calibration of forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bin(NamedTuple):
    """Forecasts of about the same probability.

    Attributes:
        forecast: mean forecast.
        observed: share of forecasts whose event occurred.
        size: number of forecasts.
    """

    forecast: float
    observed: float
    size: int


def brier_score(forecasts: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Return the mean squared difference of forecasts and outcomes (G. W. Brier, 1950).

    A perfect score is 0. A constant forecast of the true share p scores p (1 - p).

    Raises:
        ValueError: the list of forecasts is empty, or its length differs from that of the outcomes.
    """
    if not forecasts:
        raise ValueError("no forecasts to score")
    pairs = zip(forecasts, outcomes, strict=True)
    return sum((forecast - came) ** 2 for forecast, came in pairs) / len(forecasts)


def reliability(
    forecasts: Sequence[float], outcomes: Sequence[bool], bins: int = 10
) -> tuple[Bin, ...]:
    """Group forecasts into bins of equal width and omit empty bins.

    The event occurs in a share p of all cases with a calibrated forecast of p.

    Raises:
        ValueError: the lists have different lengths, or a forecast is not a probability.
    """
    gathered: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for forecast, came in zip(forecasts, outcomes, strict=True):
        if not 0.0 <= forecast <= 1.0:
            raise ValueError(f"a forecast must be between 0 and 1, not {forecast}")
        gathered[min(int(forecast * bins), bins - 1)].append((forecast, came))
    return tuple(
        Bin(
            sum(forecast for forecast, _ in one) / len(one),
            sum(came for _, came in one) / len(one),
            len(one),
        )
        for one in gathered
        if one
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    """Return the mean distance between forecast and observed share, weighted by bin size."""
    return sum(b.size * abs(b.forecast - b.observed) for b in bins) / sum(b.size for b in bins)
