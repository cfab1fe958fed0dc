"""How sure a mean is: intervals over batches of requests, or over seeds.

Requests of one run influence each other through queues, so their mean is not as sure as so many
independent ones. Means of consecutive batches are nearly independent (batch means; Law, Simulation
Modeling and Analysis, 2015, section 9.5.3), and runs with different seeds are. Policies meet the
same arrivals, lengths, texts and weather, so their *differences*, batch by batch or seed by seed,
are far surer than each by itself (common random numbers; ibid., section 11.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, sqrt
from typing import Any, Final

from draftgate.loadgen.measuring.quantiles import student_quantile

BATCHES: Final = 20
"""Batches of a run: Law recommends no more, as longer batches depend less on each other."""

LEAST_SAMPLES: Final = 3
"""Fewer samples give no interval worth the name."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval; `half` is half of that, None where there are too few samples.

    Attributes:
        samples: how many independent values it rests on.
    """

    mean: float
    half: float | None
    samples: int

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        ends = None if self.half is None else [self.mean - self.half, self.mean + self.half]
        return {"mean": self.mean, "interval": ends, "samples": self.samples}


def estimate(samples: Sequence[float]) -> Estimate | None:
    """Return the mean of independent values with Student's interval; None if there are none."""
    count = len(samples)
    if not count:
        return None
    mean = fsum(samples) / count
    if count < LEAST_SAMPLES:
        return Estimate(mean, None, count)
    variance = fsum((sample - mean) ** 2 for sample in samples) / (count - 1)
    return Estimate(mean, student_quantile(count - 1) * sqrt(variance / count), count)


def batch_means(values: Sequence[float | None], batches: int = BATCHES) -> list[float | None]:
    """Return the means of consecutive batches; None values (no answer, say) are left out of them.

    A batch without values gives None. Fewer values than batches are a batch each.
    """
    count = min(batches, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else []
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def differences(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Return ours less theirs where both are known."""
    pairs = zip(ours, theirs, strict=True)
    return [our - their for our, their in pairs if our is not None and their is not None]


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values that are known."""
    return [value for value in values if value is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    found = known(values)
    return fsum(found) / len(found) if found else None
