"""Step costs that start with a profile and follow measured steps."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from draftgate.policies.costs.regression import Array, NonNegativeRegression
from draftgate.policies.costs.step_cost import StepCost, StepSize

REFIT_STEPS: Final = 64
"""Steps in a block of measurements. Microseconds per step by block size, for tables of 16 / 67
stairs (one core, Zen 4, 2026-11-21):

    block of    16         32        64       128
                10 / 15    8 / 12    6 / 9    6 / 10
"""

# Errors of a profile's values, in addition to their shared error.
OWN_ERROR: Final = 0.3
"""Relative error of each stair's rise and of each linear term."""
RISE_ERROR: Final = 0.01
"""Error of a stair without a rise in the profile, as a share of its height."""
# Errors of the linear terms that a profile omits, as shares of its shortest step: per sequence, per
# KV token read, per pair, per sampled token. (Measured on Zen 4 with the shipped model, 2026-11-21:
# 0, 2e-4 and 2e-5 of the first three. Published values for an H100 with 8B parameters: 0, 7e-6 and
# 0. The head of that model computes a token in 3e-4 of a step by its data sheet.)
SEQUENCE_SHARE, KV_TOKEN_SHARE, PAIR_SHARE, SAMPLE_SHARE = 2e-3, 5e-6, 1e-6, 1e-3


class StepCostFit:
    """A `StepCost` that follows measurements.

    The fit keeps the stairs of its seed, and learns their heights and the linear terms. The rises
    are non-negative coefficients, so the table never falls.

    Attributes:
        cost: present estimate.
    """

    def __init__(self, seed: StepCost) -> None:
        self.cost = seed
        self._buckets = np.asarray(seed.token_buckets)
        table = np.asarray(seed.step_s)
        rises = np.diff(table, prepend=0.0)
        linear = np.array([seed.kv_token_s, seed.sequence_s, seed.pair_s, seed.sample_s])
        least_s = max(float(table[0]), float(table[-1]) / len(table), 1e-9)
        shares = np.array([KV_TOKEN_SHARE, SEQUENCE_SHARE, PAIR_SHARE, SAMPLE_SHARE])
        rise_errors = OWN_ERROR * rises + RISE_ERROR * np.maximum(table, least_s)
        self._regression = NonNegativeRegression(
            np.concatenate((rises, linear)),
            np.concatenate((rise_errors, OWN_ERROR * linear + shares * least_s)),
        )
        self._measured: list[tuple[int, int, int, int, int, float]] = []

    @property
    def relative_error(self) -> float:
        """Running median of |measured / predicted - 1|."""
        return self._regression.relative_error

    def add_step(self, size: StepSize, step_s: float) -> None:
        """Record a measured step, and refit after every `REFIT_STEPS` steps.

        Invalid durations are ignored.
        """
        if size.tokens > 0 and 0.0 < step_s < math.inf:
            self._measured.append((*size, step_s))
            if len(self._measured) >= REFIT_STEPS:
                self.refit()

    def refit(self) -> None:
        """Learn from the steps recorded since the last refit."""
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
        """Return the factor of each rise and linear term, [steps, stairs + 4]."""
        tokens, kv_tokens, sequences, pairs, sampled, _ = measured.T
        buckets, last = self._buckets, self._buckets[-1]
        reached = np.searchsorted(buckets, tokens)
        stairs = (np.arange(len(buckets)) <= reached[:, None]).astype(np.float64)
        # The last rise continues beyond the table.
        width = last - (buckets[-2] if len(buckets) > 1 else 0)
        stairs[:, -1] += np.maximum(tokens - last, 0.0) / width
        return np.column_stack((stairs, kv_tokens, sequences, pairs, sampled))
