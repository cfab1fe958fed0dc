"""Estimate of an engine's maximum number of concurrent sequences, learned from its queue.

While requests wait at the engine, the number of running sequences is the engine's limit. If no
request waits although the number of running sequences reaches the estimate, the limit may be
higher. The estimate falls immediately, for example when long prompts fill the engine's memory. It
rises step by step, like the window of a sender (AIMD: Chiu and Jain, 1989).
"""

from __future__ import annotations

from typing import Final

GROWTH: Final = 0.25
"""Relative growth of the estimate per reading: from 3 to 256 in twenty readings. At the limit, a
quarter of the sequences waits at the engine for one reading. The next reading lowers the
estimate again. (Chosen by that reasoning, not tuned, 2026-11-22.)"""


def next_estimate(estimate: int, running: int, waiting: int) -> int:
    """Return the estimated maximum number of concurrent sequences after a reading.

    Args:
        estimate: previous estimate. It is 0 (unknown) until the first request waits.
        running, waiting: numbers of sequences that the engine reports.
    """
    if waiting > 0:
        return max(running, 1)
    if estimate and running >= estimate:
        return running + max(1, round(GROWTH * running))
    return estimate
