"""The requests of the last minute: rates, percentiles, how long drafts were. Bounded memory."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from draftgate.backends.types import SpeculationOutcome

WINDOW_S: Final = 60.0
"""What is older is forgotten."""

MOST_KEPT: Final = 2048
"""Values of each kind; of a busier minute the latest are kept. Sorting them takes under 1 ms."""


class Percentiles(msgspec.Struct, frozen=True):
    """Nearest-rank percentiles, in seconds."""

    p50: float
    p90: float
    p99: float


class Speculated(msgspec.Struct, frozen=True):
    """What speculation did for a request that has ended.

    Attributes:
        steps: its decode steps, those without a draft too.
        drafted: draft tokens they verified.
    """

    steps: int
    drafted: int


T = TypeVar("T")


class _Sliding(Generic[T]):
    """The values of the last `WINDOW_S` seconds, at most `MOST_KEPT`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: deque[tuple[float, T]] = deque(maxlen=MOST_KEPT)

    def add(self, value: T) -> None:
        """Note a value."""
        self._values.append((self._clock(), value))

    def values(self) -> list[T]:
        """Return those that are not too old, in order of time."""
        oldest_s = self._clock() - WINDOW_S
        while self._values and self._values[0][0] < oldest_s:
            self._values.popleft()
        return [value for _, value in self._values]


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return the nearest-rank percentiles of some values, None of none."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = (math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.9, 0.99))
    return Percentiles(*(ordered[rank] for rank in ranks))


class Recent:
    """What requests did lately. Use on the event loop's thread.

    Attributes:
        requests: how many ended, ever.
        tokens: how many were generated, ever; whoever sees them adds them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing; `clock` tells seconds from any origin."""
        self.requests = 0
        self.tokens = 0
        self._clock = clock
        self._ttft_s = _Sliding[float](clock)
        self._tpot_s = _Sliding[float](clock)
        self._speculated = _Sliding[Speculated](clock)

    def first_token(self, seconds: float) -> None:
        """Note a time to first token."""
        self._ttft_s.add(seconds)

    def ended(self, tpot_s: float | None, tokens: int, outcome: SpeculationOutcome) -> None:
        """Note the end of a request: its mean gap between tokens, its tokens, its drafts."""
        self.requests += 1
        if tpot_s is not None:
            self._tpot_s.add(tpot_s)
        # Each step adds what was accepted and one token of the target's.
        steps = tokens - outcome.num_accepted_tokens
        if steps > 0:
            self._speculated.add(Speculated(steps, outcome.num_drafted_tokens))

    def ttft_s(self) -> Percentiles | None:
        """Return the times to first token, None where there was none."""
        return percentiles(self._ttft_s.values())

    def tpot_s(self) -> Percentiles | None:
        """Return the gaps between tokens, a mean for each request; None where there was none."""
        return percentiles(self._tpot_s.values())

    def chosen_k(self) -> float | None:
        """Return the mean draft tokens of a step, of requests that ended; None without one."""
        found = self._speculated.values()
        if not found:
            return None
        return sum(one.drafted for one in found) / sum(one.steps for one in found)
