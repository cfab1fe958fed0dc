"""Confidence intervals of means, over batches of requests or over seeds.

Requests of one run influence each other through queues. Their mean is therefore less certain than
the mean of the same number of independent requests. The means of consecutive batches are nearly
independent (batch means; Law, Simulation Modeling and Analysis, 2015, section 9.5.3). Runs with
different seeds are also nearly independent.

All policies get the same arrivals, lengths, texts and noise. Their *differences* per batch or per
seed are therefore far more certain than each mean (common random numbers; ibid., section 11.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, sqrt
from typing import Any, Final

from draftgate.loadgen.measuring.confidence import student_quantile

BATCHES: Final = 20
"""Batches per run. Law recommends few batches, because longer batches are less dependent."""

LEAST_SAMPLES: Final = 3
"""The fewest samples for a meaningful interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% confidence interval.

    Attributes:
        half: half the width of the interval, or None with too few samples.
        samples: number of independent values.
    """

    mean: float
    half: float | None
    samples: int

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        ends = None if self.half is None else [self.mean - self.half, self.mean + self.half]
        return {"mean": self.mean, "interval": ends, "samples": self.samples}


def estimate(samples: Sequence[float]) -> Estimate | None:
    """Return the mean of independent values with Student's interval, or None without values."""
    count = len(samples)
    if not count:
        return None
    mean = fsum(samples) / count
    if count < LEAST_SAMPLES:
        return Estimate(mean, None, count)
    variance = fsum((sample - mean) ** 2 for sample in samples) / (count - 1)
    return Estimate(mean, student_quantile(count - 1) * sqrt(variance / count), count)


def batch_means(values: Sequence[float | None], batches: int = BATCHES) -> list[float | None]:
    """Return the means of consecutive batches, without their None values.

    The mean of a batch without values is None. Each value is a batch if the batches outnumber the
    values.
    """
    count = min(batches, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else []
    groups = [known(values[start:end]) for start, end in pairwise(edges)]
    return [fsum(group) / len(group) if group else None for group in groups]


def differences(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Return `ours - theirs` for each pair of known values."""
    pairs = zip(ours, theirs, strict=True)
    return [our - their for our, their in pairs if our is not None and their is not None]


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]
