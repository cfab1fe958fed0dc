"""Linear regression with non-negative coefficients, learned from a stream of measurements.

The method is recursive Bayesian least squares (Kalman, 1960), in blocks. Four properties make it
suitable for control. Coefficients share a part of their error, so coefficients without measurements
follow the others. Clipped innovations (Huber's M-estimate) limit the effect of one measurement.
Forgetting returns the covariance to the prior, so the covariance neither freezes nor winds up. A
negative coefficient is conditioned to be 0, and the others compensate.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHARED_ERROR: Final = 0.3
"""Initial relative error that all coefficients share, as for a profile from another machine of the
same kind."""

_FORGETTING: Final = 1e-4
"""Share of the learned covariance that each measurement removes. Chosen for 5% noise: in steady
state a measurement moves estimates by 1 to 2%, and about 200 steps suffice to learn a doubled
cost."""

MOST_DEVIATIONS: Final = 3.0
"""Maximum innovation, in standard deviations."""

FIRST_NOISE: Final = 0.05
LEAST_NOISE, MOST_NOISE = 0.005, 0.3
"""Initial value and bounds of the relative standard deviation of a measurement."""

MEDIAN_RATE: Final = 0.02
"""Relative step of the running median per measurement, which covers about the last hundred."""

_MEDIAN_OF_NORMAL: Final = 0.6745
"""Median of |x| for x ~ N(0, 1)."""

_TINY: Final = 1e-12


class NonNegativeRegression:
    """Coefficients that predict positive values from rows of non-negative features.

    Attributes:
        coefficients: present estimate, never negative.
        relative_error: running median of |measured / predicted - 1|, where each prediction precedes
            the learning of its measurement.
    """

    def __init__(self, seed: Array, spread: Array) -> None:
        """Start with an estimate.

        Args:
            seed: coefficients, 0 or more, [coefficients].
            spread: standard deviation of each coefficient's own error, more than 0, [coefficients].
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
        expected.flat[:: len(expected) + 1] += noise**2  # the diagonal
        bound = MOST_DEVIATIONS * np.sqrt(np.diagonal(expected))
        clipped = np.clip(innovations, -bound, bound)
        gain = np.linalg.solve(expected, np.column_stack((clipped, towards)))
        self._scaled = self._scaled + towards.T @ gain[:, 0]
        self._covariance -= towards.T @ gain[:, 1:]
        share = _FORGETTING * len(values)
        self._covariance += share * (self._prior - self._covariance)
        self._covariance = (self._covariance + self._covariance.T) / 2
        self._forbid_negative()

    def _note_error(self, errors: Array) -> None:
        """Move the running median toward the value that half of the errors exceed."""
        above = np.count_nonzero(errors > self.relative_error) - len(errors) / 2
        moved = self.relative_error * np.exp(MEDIAN_RATE * 2.0 * above)
        self.relative_error = float(np.clip(moved, _TINY, 1.0 / _TINY))

    def _forbid_negative(self) -> None:
        """Condition negative coefficients to be 0, starting with the most negative coefficient."""
        for _ in range(len(self._scaled)):
            worst = int(self._scaled.argmin())
            if self._scaled[worst] >= 0.0:
                return
            column = self._covariance[:, worst]
            self._scaled -= column * (self._scaled[worst] / max(column[worst], _TINY))
            self._scaled[worst] = 0.0
        np.maximum(self._scaled, 0.0, out=self._scaled)
