"""Seeded arrival processes on an absolute schedule. Pure.

An instant is the sum of the gaps before it, so a sender that is late once does not shift the rest.
The schedule is not stretched to hit `requests / rate` exactly: a process that always meets its mean
would lose the very variance that queues feel.

Gaps come one by one from NumPy's PCG64 and its gamma sampler, so asking for more instants never
changes the earlier ones. A seed fixes them for one version of NumPy (NEP 19).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

import numpy as np

PHASE_S: Final = 5.0
"""Default length of the phases of `onoff`: longer than most requests, so that queues build up and
drain."""

RAMP_S: Final = 60.0
"""Default length of a ramp."""

SMALLEST: Final = 1e-3
LARGEST: Final = 1e6
"""Range of the parameters of a process. A ramp may also start at 0."""

LARGEST_CV: Final = 100.0
"""Largest coefficient of variation: bursts of ten thousand requests. Beyond it nearly all gaps are
smaller than a float can hold, and a schedule of seconds never ends."""

_EXAMPLES: Final = "poisson, gamma:2, onoff:5,5, ramp:0.5,2,60"


class Arrival(Protocol):
    """An arrival process."""

    def instants(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield the instants in seconds from the start, ascending, without end.

        Args:
            rate_rps: mean requests per second.
            seed: the same seed gives the same instants.
        """
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every `1 / rate` seconds, the first at the start."""

    def instants(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield multiples of the gap, so that no rounding error adds up."""
        del seed
        return (index / rate_rps for index in count())


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma-distributed gaps with the coefficient of variation `cv`; 1 is Poisson.

    Shape `1 / cv^2`, scale `cv^2 / rate`, as BurstGPT and vLLM's `--burstiness` (its shape) model
    bursts (arXiv 2401.17644).
    """

    cv: float = 1.0

    def instants(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield cumulative sums of the gaps."""
        random, now_s = np.random.default_rng(seed), 0.0
        shape = 1.0 / self.cv**2
        while True:
            now_s += float(random.gamma(shape, 1.0 / (shape * rate_rps)))
            yield now_s


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson in phases of `on_s`, silence for `off_s`; the mean over both is the rate.

    It starts with a busy phase, so a run of fractional periods has more than the rate.
    """

    on_s: float = PHASE_S
    off_s: float = PHASE_S

    def instants(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield a Poisson process of busy time with the silences inserted."""
        share = self.on_s / (self.on_s + self.off_s)
        for busy_s in Gamma().instants(rate_rps / share, seed):
            phases, within_s = divmod(busy_s, self.on_s)
            yield phases * (self.on_s + self.off_s) + within_s


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson at a rate that grows linearly from `first` to `last` times the rate, then stays.

    Unit-rate arrivals are mapped through the inverse of the expected number of arrivals (inversion;
    Cinlar, Introduction to Stochastic Processes, 1975).
    """

    first: float
    last: float
    over_s: float = RAMP_S

    def instants(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield the instants."""
        return (self._inverse(mass / rate_rps) for mass in Gamma().instants(1.0, seed))

    def _inverse(self, expected: float) -> float:
        """Return the instant by which that many arrivals are expected at a rate of 1."""
        slope = (self.last - self.first) / self.over_s
        on_ramp = self.over_s * (self.first + self.last) / 2
        if expected >= on_ramp:
            return self.over_s + (expected - on_ramp) / self.last
        # first * t + slope * t^2 / 2 = expected, in the form that is stable for a flat ramp.
        return 2 * expected / (self.first + math.sqrt(self.first**2 + 2 * slope * expected))


def parse_arrival(spec: str) -> Arrival:
    """Return the arrival process that a flag names.

    Args:
        spec: `constant`, `poisson`, `gamma:CV`, `onoff[:ON_S,OFF_S]` or
            `ramp:FIRST,LAST[,SECONDS]`, where FIRST and LAST are multiples of the rate, and FIRST
            may be 0.

    Raises:
        ValueError: there is no such process, or its parameters are out of range.
    """
    name, _, rest = spec.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        raise ValueError(f"arrival {spec!r}: expected numbers, e.g. {_EXAMPLES}") from None
    counts = {"constant": (0,), "poisson": (0,), "gamma": (1,), "onoff": (0, 2), "ramp": (2, 3)}
    if name not in counts:
        raise ValueError(f"unknown arrival {spec!r}: expected {', '.join(counts)}")
    if len(numbers) not in counts[name]:
        expected = " or ".join(map(str, counts[name]))
        raise ValueError(f"arrival {spec!r}: expected {expected} numbers, e.g. {_EXAMPLES}")
    largest = LARGEST_CV if name == "gamma" else LARGEST
    checked = numbers[1:] if name == "ramp" and numbers[0] == 0.0 else numbers
    if not all(SMALLEST <= number <= largest for number in checked):
        raise ValueError(f"arrival {spec!r}: numbers must be between {SMALLEST:g} and {largest:g}")
    match name:
        case "constant":
            return Constant()
        case "onoff":
            return OnOff(*numbers)
        case "ramp":
            return Ramp(*numbers)
    return Gamma(*numbers)
