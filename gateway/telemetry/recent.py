"""The requests of the last minute, for the live page: rates, percentiles, draft lengths."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from draftgate.backends.types import SpeculationOutcome

WINDOW_S: Final = 60.0
"""Older values are dropped."""

MOST_KEPT: Final = 2048
"""Values of each kind; in a busier minute the latest are kept. Sorting them takes under 1 ms."""


class Percentiles(msgspec.Struct, frozen=True):
    """Nearest-rank percentiles, in seconds."""

    p50: float
    p90: float
    p99: float


T = TypeVar("T")


class _Window(Generic[T]):
    """The values of the last `WINDOW_S` seconds, at most `MOST_KEPT`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: deque[tuple[float, T]] = deque(maxlen=MOST_KEPT)

    def add(self, value: T) -> None:
        """Add a value at the present time."""
        self._values.append((self._clock(), value))

    def values(self) -> list[T]:
        """Drop old values and return the others, oldest first."""
        oldest_s = self._clock() - WINDOW_S
        while self._values and self._values[0][0] < oldest_s:
            self._values.popleft()
        return [value for _, value in self._values]


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return the nearest-rank percentiles of some values; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = (math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.9, 0.99))
    return Percentiles(*(ordered[rank] for rank in ranks))


class Recent:
    """Values of the last minute's requests, in bounded memory. Use on the event loop's thread.

    Attributes:
        requests: number of requests that have ended since the start.
        tokens: number of tokens generated since the start; callers increase it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `clock` returns seconds from any origin."""
        self.requests = 0
        self.tokens = 0
        self._ttft_s = _Window[float](clock)
        self._tpot_s = _Window[float](clock)
        self._steps = _Window[tuple[int, int]](clock)  # decode steps, and tokens they drafted

    def add_ttft(self, seconds: float) -> None:
        """Add a time to first token."""
        self._ttft_s.add(seconds)

    def add_ended(self, tpot_s: float | None, tokens: int, outcome: SpeculationOutcome) -> None:
        """Add a request that has ended: its TPOT, output tokens and speculation outcome."""
        self.requests += 1
        if tpot_s is not None:
            self._tpot_s.add(tpot_s)
        # Each step adds the accepted tokens and one token of the target.
        steps = tokens - outcome.num_accepted_tokens
        if steps > 0:
            self._steps.add((steps, outcome.num_drafted_tokens))

    def ttft_s(self) -> Percentiles | None:
        """Return the percentiles of the times to first token; None without requests."""
        return percentiles(self._ttft_s.values())

    def tpot_s(self) -> Percentiles | None:
        """Return the percentiles of the requests' TPOT; None without requests."""
        return percentiles(self._tpot_s.values())

    def chosen_k(self) -> float | None:
        """Return the mean draft tokens per step of ended requests; None without one."""
        found = self._steps.values()
        if not found:
            return None
        return sum(drafted for _, drafted in found) / sum(steps for steps, _ in found)
