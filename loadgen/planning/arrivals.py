"""Seeded arrival processes on an absolute schedule. Performs no I/O.

An arrival time is the sum of the gaps before it, so one late send does not delay later requests.
The schedule is not stretched to reach `requests / rate` exactly, because that would remove some of
the variance that fills queues.

NumPy's PCG64 and its gamma sampler draw the gaps one at a time, so a longer schedule starts with
the same gaps. A seed fixes the gaps for one version of NumPy (NEP 19).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

import numpy as np

_PHASE_S: Final = 5.0
"""Default length of the phases of `onoff`. A phase is longer than most requests, so that queues
build up and drain."""

RAMP_S: Final = 60.0
"""Default length of a ramp."""

_SMALLEST: Final = 1e-3
LARGEST: Final = 1e6
"""Range of the parameters of a process. Only a ramp may also start at 0."""

LARGEST_CV: Final = 100.0
"""Largest coefficient of variation, for bursts of ten thousand requests. A larger value makes
nearly all gaps underflow a float, and a schedule of seconds never ends."""

_EXAMPLES: Final = "poisson, gamma:2, onoff:5,5, ramp:0.5,2,60"


class Arrival(Protocol):
    """An arrival process."""

    def arrival_times(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield the arrival times in seconds from the start, ascending, without end.

        Args:
            rate_rps: mean requests per second.
            seed: the seed of all random draws. The same seed gives the same times.
        """
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every `1 / rate` seconds, the first at the start."""

    def arrival_times(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield multiples of the gap, so that rounding errors do not add up."""
        del seed
        return (index / rate_rps for index in count())


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma-distributed gaps with the coefficient of variation `cv`, Poisson for 1.

    The shape is `1 / cv^2` and the scale is `cv^2 / rate`. BurstGPT (arXiv 2401.17644) and vLLM's
    `--burstiness` (the shape) model bursts in this way.
    """

    cv: float = 1.0

    def arrival_times(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield cumulative sums of the gaps."""
        random, now_s = np.random.default_rng(seed), 0.0
        shape = 1.0 / self.cv**2
        while True:
            now_s += float(random.gamma(shape, 1.0 / (shape * rate_rps)))
            yield now_s


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson arrivals for `on_s`, then none for `off_s`. The mean over both phases is the rate.

    The process starts with a busy phase, so a run of fractional periods exceeds the rate.
    """

    on_s: float = _PHASE_S
    off_s: float = _PHASE_S

    def arrival_times(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield the arrivals of a Poisson process, shifted by the silent phases."""
        share = self.on_s / (self.on_s + self.off_s)
        for busy_s in Gamma().arrival_times(rate_rps / share, seed):
            phases, within_s = divmod(busy_s, self.on_s)
            yield phases * (self.on_s + self.off_s) + within_s


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson at a rate that grows linearly from `first` to `last` times the rate, then stays.

    Unit-rate arrivals are mapped through the inverse of the expected number of arrivals. This is
    the inversion method (Cinlar, Introduction to Stochastic Processes, 1975).
    """

    first: float
    last: float
    over_s: float = RAMP_S

    def arrival_times(self, rate_rps: float, seed: int) -> Iterator[float]:
        """Yield the mapped arrivals of a Poisson process."""
        return (self._inverse(mass / rate_rps) for mass in Gamma().arrival_times(1.0, seed))

    def _inverse(self, expected: float) -> float:
        """Return the time by which that many arrivals are expected at a rate of 1."""
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
        ValueError: the process is unknown, or its parameters are out of range.
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
    if not all(_SMALLEST <= number <= largest for number in checked):
        raise ValueError(f"arrival {spec!r}: numbers must be between {_SMALLEST:g} and {largest:g}")
    match name:
        case "constant":
            return Constant()
        case "onoff":
            return OnOff(*numbers)
        case "ramp":
            return Ramp(*numbers)
    return Gamma(*numbers)
