"""Step costs learned from the steps themselves, from a profile on."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from draftgate.policies.costs.regression import Array, NonNegativeRegression
from draftgate.policies.costs.step_cost import StepCost, StepSize

REFIT_STEPS: Final = 64
"""Measured steps that are learned at once. Microseconds a step for tables of 16 / 67 stairs in
blocks of 16: 10 / 15, of 32: 8 / 12, of 64: 6 / 9, of 128: 6 / 10 (one core, Zen 4, 2026-11-21)."""

# By how much a profile's figures may be wrong by themselves, besides what they share.
OWN_ERROR: Final = 0.3
"""Relative error of each stair's rise and of each linear term."""
RISE_ERROR: Final = 0.01
"""What a stair may rise although the profile says it does not, as a share of its height."""
# What a profile may have left out, as shares of its shortest step: a sequence, a KV token read, a
# pair. (Measured on Zen 4 with the shipped model, 2026-11-21: 0, 2e-4 and 2e-5; on an H100 with 8B
# parameters, published: 0, 7e-6 and 0.)
SEQUENCE_SHARE, KV_TOKEN_SHARE, PAIR_SHARE = 2e-3, 5e-6, 1e-6


class StepCostFit:
    """A `StepCost` that follows what is measured.

    It keeps the stairs of its seed and learns their heights and the linear terms. Rises are
    coefficients of 0 or more, so no table ever falls, whatever is measured.

    Attributes:
        cost: the present estimate.
    """

    def __init__(self, seed: StepCost) -> None:
        """Begin with a profile, measured at start or saved."""
        self.cost = seed
        self._buckets = np.asarray(seed.token_buckets)
        table = np.asarray(seed.step_s)
        rises = np.diff(table, prepend=0.0)
        linear = np.array([seed.kv_token_s, seed.sequence_s, seed.pair_s])
        least_s = max(float(table[0]), float(table[-1]) / len(table), 1e-9)
        shares = np.array([KV_TOKEN_SHARE, SEQUENCE_SHARE, PAIR_SHARE])
        rise_errors = OWN_ERROR * rises + RISE_ERROR * np.maximum(table, least_s)
        self._regression = NonNegativeRegression(
            np.concatenate((rises, linear)),
            np.concatenate((rise_errors, OWN_ERROR * linear + shares * least_s)),
        )
        self._measured: list[tuple[int, int, int, int, float]] = []

    @property
    def relative_error(self) -> float:
        """Running median of |measured / predicted - 1|."""
        return self._regression.relative_error

    def observe(self, size: StepSize, step_s: float) -> None:
        """Note a measured step; each `REFIT_STEPS`-th refits. What is no duration is ignored."""
        if size.tokens > 0 and 0.0 < step_s < math.inf:
            self._measured.append((*size, step_s))
            if len(self._measured) >= REFIT_STEPS:
                self.refit()

    def refit(self) -> None:
        """Learn from the steps noted since the last time."""
        if not self._measured:
            return
        measured = np.array(self._measured, dtype=np.float64)
        self._measured.clear()
        self._regression.learn(self._features(measured), measured[:, -1])
        coefficients = self._regression.coefficients
        stairs = len(self._buckets)
        step_s = np.cumsum(coefficients[:stairs]).tolist()
        self.cost = StepCost(
            self.cost.token_buckets, tuple(step_s), *coefficients[stairs:].tolist()
        )

    def _features(self, measured: Array) -> Array:
        """Return what multiplies each rise and linear term, [steps, stairs + 3]."""
        tokens, kv_tokens, sequences, pairs, _ = measured.T
        buckets, last = self._buckets, self._buckets[-1]
        reached = np.searchsorted(buckets, tokens)
        stairs = (np.arange(len(buckets)) <= reached[:, None]).astype(np.float64)
        # Beyond the table the last rise goes on.
        width = last - (buckets[-2] if len(buckets) > 1 else 0)
        stairs[:, -1] += np.maximum(tokens - last, 0.0) / width
        return np.column_stack((stairs, kv_tokens, sequences, pairs))
