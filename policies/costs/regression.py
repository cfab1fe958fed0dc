"""Linear regression with non-negative coefficients, learned from a stream of measurements.

Recursive Bayesian least squares (Kalman, 1960), in blocks. Four properties make it suitable for
control. Coefficients share a part of their error, so those without measurements follow the others.
Innovations are clipped (Huber's M-estimate), which limits the effect of one measurement. Forgetting
returns the covariance to the prior, so it neither freezes nor winds up. And a negative coefficient
is conditioned to be 0, so the others make up for it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHARED_ERROR: Final = 0.3
"""Relative error that all coefficients initially share: that of a profile from another machine of
the same kind."""

FORGETTING: Final = 1e-4
"""Share of the learned covariance that each measurement gives up. Chosen for 5% noise: in steady
state a measurement moves estimates by 1 to 2%, and a doubled cost is learned in about 200 steps."""

MOST_DEVIATIONS: Final = 3.0
"""Limit of innovations, in their standard deviations."""

FIRST_NOISE: Final = 0.05
LEAST_NOISE, MOST_NOISE = 0.005, 0.3
"""Relative standard deviation of a measurement: initial value, and bounds."""

MEDIAN_RATE: Final = 0.02
"""Relative step of the running median per measurement: the last hundred or so decide."""

_MEDIAN_OF_NORMAL: Final = 0.6745
"""Median of |x| for x ~ N(0, 1)."""

_TINY: Final = 1e-12


class NonNegativeRegression:
    """Coefficients that predict positive values from rows of non-negative features.

    Attributes:
        coefficients: the present estimate, never negative.
        relative_error: running median of |measured / predicted - 1|, each prediction made before
            its measurement was learned.
    """

    def __init__(self, seed: Array, spread: Array) -> None:
        """Start with an estimate.

        Args:
            seed: the coefficients, 0 or more, [coefficients].
            spread: standard deviation of each one's own error, more than 0, [coefficients].
        """
        self._spread = spread
        self._scaled = seed / spread
        self._prior = np.diag(np.ones(len(seed)))
        self._prior += SHARED_ERROR**2 * np.outer(self._scaled, self._scaled)
        self._covariance = self._prior.copy()
        self.relative_error = FIRST_NOISE * _MEDIAN_OF_NORMAL

    @property
    def coefficients(self) -> Array:
        """The present estimate, never negative."""
        return self._scaled * self._spread

    def learn(self, rows: Array, values: Array, known: Array | float = 0.0) -> None:
        """Learn from a block of measurements.

        Args:
            rows: features, 0 or more, [measurements, coefficients].
            values: measured values, finite and more than 0, [measurements].
            known: known parts of the values, finite and 0 or more, [measurements].
        """
        rows = rows * self._spread
        predicted = np.maximum(rows @ self._scaled + known, _TINY)
        innovations = np.minimum(values, predicted / _TINY) / predicted - 1.0
        self._note_error(np.abs(innovations))
        rows /= predicted[:, None]
        noise = np.clip(self.relative_error / _MEDIAN_OF_NORMAL, LEAST_NOISE, MOST_NOISE)
        towards = rows @ self._covariance
        expected = towards @ rows.T
        expected[np.diag_indices_from(expected)] += noise**2
        bound = MOST_DEVIATIONS * np.sqrt(np.diagonal(expected))
        clipped = np.clip(innovations, -bound, bound)
        gain = np.linalg.solve(expected, np.column_stack((clipped, towards)))
        self._scaled = self._scaled + towards.T @ gain[:, 0]
        self._covariance -= towards.T @ gain[:, 1:]
        share = FORGETTING * len(values)
        self._covariance += share * (self._prior - self._covariance)
        self._covariance = (self._covariance + self._covariance.T) / 2
        self._forbid_negative()

    def _note_error(self, errors: Array) -> None:
        """Move the running median until half of the errors are above it."""
        above = np.count_nonzero(errors > self.relative_error) - len(errors) / 2
        moved = self.relative_error * np.exp(MEDIAN_RATE * 2.0 * above)
        self.relative_error = float(np.clip(moved, _TINY, 1.0 / _TINY))

    def _forbid_negative(self) -> None:
        """Condition negative coefficients to be 0, the most negative one first."""
        for _ in range(len(self._scaled)):
            worst = int(self._scaled.argmin())
            if self._scaled[worst] >= 0.0:
                return
            column = self._covariance[:, worst]
            self._scaled -= column * (self._scaled[worst] / max(column[worst], _TINY))
            self._scaled[worst] = 0.0
        np.maximum(self._scaled, 0.0, out=self._scaled)
