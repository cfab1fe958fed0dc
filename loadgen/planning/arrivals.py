"""Seeded arrival processes on an absolute schedule. Performs no I/O.

An arrival time is the sum of the gaps before it, so one late send does not delay later requests.
The schedule is not stretched to reach `requests / rate` exactly, because that would remove some of
the variance that fills queues.

NumPy's PCG64 and its gamma sampler draw the gaps one at a time, so a longer schedule starts with
the same gaps. A seed fixes the gaps for one version of NumPy (NEP 19).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, TypeAlias

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


Arrival: TypeAlias = Callable[[float, int], Iterator[float]]
"""An arrival process, which yields arrival times in seconds from the start, ascending, without end.
Its arguments are the mean requests per second, and the seed of all random draws."""


def constant(rate_rps: float, seed: int) -> Iterator[float]:
    """Yield one request every `1 / rate` seconds, the first at the start."""
    del seed
    # Multiples of the gap, so that rounding errors do not add up.
    return (index / rate_rps for index in count())


def gamma(rate_rps: float, seed: int, cv: float = 1.0) -> Iterator[float]:
    """Yield arrivals with independent gamma-distributed gaps, Poisson for a `cv` of 1.

    `cv` is the coefficient of variation. The shape is `1 / cv^2` and the scale is `cv^2 / rate`.
    BurstGPT (arXiv 2401.17644) and vLLM's `--burstiness` (the shape) model bursts in this way.
    """
    random, now_s = np.random.default_rng(seed), 0.0
    shape = 1.0 / cv**2
    while True:
        now_s += float(random.gamma(shape, 1.0 / (shape * rate_rps)))
        yield now_s


def on_off(
    rate_rps: float, seed: int, on_s: float = _PHASE_S, off_s: float = _PHASE_S
) -> Iterator[float]:
    """Yield Poisson arrivals for `on_s`, then none for `off_s`. The mean over both is the rate.

    The process starts with a busy phase, so a run of fractional periods exceeds the rate.
    """
    share = on_s / (on_s + off_s)
    for busy_s in gamma(rate_rps / share, seed):
        phases, within_s = divmod(busy_s, on_s)
        yield phases * (on_s + off_s) + within_s


def ramp(
    rate_rps: float, seed: int, first: float, last: float, over_s: float = RAMP_S
) -> Iterator[float]:
    """Yield Poisson arrivals at a rate that grows linearly from `first` to `last` times the rate.

    It then stays. Unit-rate arrivals are mapped through the inverse of the expected number of
    arrivals. This is the inversion method (Cinlar, Introduction to Stochastic Processes, 1975).
    """
    slope, on_ramp = (last - first) / over_s, over_s * (first + last) / 2
    for mass in gamma(1.0, seed):
        expected = mass / rate_rps
        if expected >= on_ramp:
            yield over_s + (expected - on_ramp) / last
        else:
            # first * t + slope * t^2 / 2 = expected, in the form that is stable for a flat ramp.
            yield 2 * expected / (first + math.sqrt(first**2 + 2 * slope * expected))


_PROCESSES: Final[dict[str, tuple[Callable[..., Iterator[float]], tuple[int, ...]]]] = {
    "constant": (constant, (0,)),
    "poisson": (gamma, (0,)),
    "gamma": (gamma, (1,)),
    "onoff": (on_off, (0, 2)),
    "ramp": (ramp, (2, 3)),
}
"""The processes by name, with the possible numbers of their parameters."""


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
    if name not in _PROCESSES:
        raise ValueError(f"unknown arrival {spec!r}: expected {', '.join(_PROCESSES)}")
    process, counts = _PROCESSES[name]
    if len(numbers) not in counts:
        expected = " or ".join(map(str, counts))
        raise ValueError(f"arrival {spec!r}: expected {expected} numbers, e.g. {_EXAMPLES}")
    largest = LARGEST_CV if name == "gamma" else LARGEST
    checked = numbers[1:] if name == "ramp" and numbers[0] == 0.0 else numbers
    if not all(_SMALLEST <= number <= largest for number in checked):
        raise ValueError(f"arrival {spec!r}: numbers must be between {_SMALLEST:g} and {largest:g}")
    return lambda rate_rps, seed: process(rate_rps, seed, *numbers)
