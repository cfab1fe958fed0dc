"""How many sequences an engine runs at once, where it does not say: learned from its queue.

While requests wait at the engine, the number that runs is its limit. When none waits and as many
run as the estimate allows, the limit may be higher. So the estimate follows the engine down at
once, as long prompts fill its memory, and up step by step, like a sender's window (AIMD: Chiu and
Jain, 1989).
"""

from __future__ import annotations

from typing import Final

GROWTH: Final = 0.25
"""Relative growth of the estimate per reading: from 3 to 256 in twenty readings. At the limit a
quarter of the sequences waits at the engine for one reading, and the next one takes them back.
(Chosen by that reasoning, not tuned; 2026-11-22.)"""


def next_estimate(estimate: int, running: int, waiting: int) -> int:
    """Return the estimated maximum of concurrent sequences after a reading.

    Args:
        estimate: the estimate before; 0 is unknown, and stays so until a request waits.
        running, waiting: sequences that the engine reports.
    """
    if waiting > 0:
        return max(running, 1)
    if estimate and running >= estimate:
        return running + max(1, round(GROWTH * running))
    return estimate
