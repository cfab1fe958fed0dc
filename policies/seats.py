"""How many sequences an engine runs at once, where it does not say: learned from who waits there.

While some wait, what runs is all that fits. When nobody waits and all seats that are believed in
are taken, there may be more. So the figure follows the engine down at once, as memory fills up with
long prompts, and up step by step, as a sender's window does (AIMD: Chiu and Jain, 1989).
"""

from __future__ import annotations

from typing import Final

GROWTH: Final = 0.25
"""By what share of them more seats are tried with each reading. From 3 to 256 in twenty readings;
at the limit as many wait at the engine for one reading, and the next one takes them back. (Chosen
by that reasoning, not tuned; 2026-11-22.)"""


def next_seats(seats: int, running: int, waiting: int) -> int:
    """Return how many seats are believed in after a reading; 0 stays 0 until somebody waits.

    Args:
        seats: that were believed in before.
        running, waiting: sequences that the engine tells of.
    """
    if waiting > 0:
        return max(running, 1)
    if seats and running >= seats:
        return running + max(1, round(GROWTH * running))
    return seats
