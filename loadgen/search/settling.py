"""How long a queue that starts empty takes to forget it. Pure.

A queue under load forgets its beginning within its relaxation time, about `2 s / (1 - load)^2` for
a service time `s` (reflected Brownian motion; Abate and Whitt, Transient behavior of regulated
Brownian motion, Advances in Applied Probability 19, 1987). At the rate where waits of `limit` are
seldom, `1 - load` is about `1.5 s / limit` (the wait's tail is exp(-2 (1 - load) limit / s)), which
makes it about `rate * limit^2`. But who asks only for a precision needs no more than to tell a load
that much above 1 from one below: then a queue grows past the limit within `limit / precision`.
"""

from __future__ import annotations

from typing import Final

from draftgate.loadgen.search.types import Aim

TIMES: Final = 2.0
"""Relaxation times that are not counted."""

MOST_EXPECTED: Final = 20.0
"""Beyond this, what is expected would make a search long that measures less."""


def settling_s(aim: Aim, rate_rps: float) -> float:
    """Return how many seconds from the start of a probe its requests do not count."""
    queue_s = aim.limit_s * min(TIMES * rate_rps * aim.limit_s, 1.0 / aim.precision)
    return max(queue_s, aim.answer_s)


def expected_dispersion(aim: Aim, rate_rps: float) -> float:
    """Return about how many requests of a queue say as much as an independent one.

    Those of a relaxation time: 12 in M/D/1 at a limit of 5 services and 0.95, where batches show
    12 to 13 (2026-11-21).
    """
    return min(1.0 + rate_rps * settling_s(aim, rate_rps) / TIMES, MOST_EXPECTED)
