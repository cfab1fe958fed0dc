"""Whether drafts of a fixed length pay: for engines that draft for all, by their own rule.

Such an engine puts `drafted` slots behind each token, of which `accepted` survive on average, busy
or not. Its step takes `a + c x tokens` seconds; with r sequences the batch's part of that is

    share = c r (1 + drafted) / (a + c r (1 + drafted))

and a token that is verified costs all others `c`. So the price of a slot (design, section 1:
accepted tokens a second by the seconds of one more token) is

    price = r (1 + accepted) / step x c = share x (1 + accepted) / (1 + drafted),

and drafts pay while `accepted > price x drafted`. At share 0, a step bound by the weights it reads,
they always do; at share 1, bound by arithmetic, they never do, for accepted <= drafted. Nobody has
to know a or c: times per token, `step / (1 + accepted)`, rise with r by the same share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KNEE_TOKENS: Final = 320.0
"""Tokens of a step that double it, where nothing was measured: 5.9 to 6.9 ms by 18 to 21 us a token
(Llama-8B bf16 on an H100, the design's reference scale)."""

PRIOR_WEIGHT: Final = 64.0
"""What that weighs against measured times, in streams x squared sequences: 16 streams whose batches
differ by two sequences. (Chosen, not tuned; 2026-11-22.)"""

FORGETTING: Final = 0.98
"""Decay with each stream: the last 50 decide."""

_HALVINGS: Final = 40


@dataclass(frozen=True, slots=True)
class DraftMeans:
    """Mean tokens of an engine's drafts.

    Attributes:
        drafted: that are proposed and verified.
        accepted: of these, that survive; at most as many.
    """

    drafted: float
    accepted: float


def expected_accepted(chance: float, drafted: float) -> float:
    """Return how many of so many drafted tokens survive.

    Args:
        chance: of each, all before it being right; 0 to 1.
    """
    if chance >= 1.0:
        return drafted
    return float(chance * (1.0 - chance**drafted) / (1.0 - chance))


def chance_of(means: DraftMeans) -> float:
    """Return the chance of a token, all before it being right, with which so many survive."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if expected_accepted(middle, means.drafted) < means.accepted:
            low = middle
        else:
            high = middle
    return high


def slot_price(share: float, means: DraftMeans) -> float:
    """Return what a slot must promise, in tokens, 0 to 1.

    Args:
        share: of the step's time that grows with the batch, 0 to 1.
    """
    return share * (1.0 + means.accepted) / (1.0 + means.drafted)


def pays(price: float, means: DraftMeans) -> bool:
    """Return whether drafts bring more than they cost all who are there."""
    return means.accepted > price * means.drafted


class BatchShare:
    """How far an engine's times per token grow with its batch: a line, decayed and shrunk."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self._streams = 0.0
        self._sum_s = self._sum_running = 0.0
        self._sum_squared = self._sum_product = 0.0

    def learn(self, tpot_s: float, running: float) -> None:
        """Learn from a stream.

        Args:
            tpot_s: seconds between two of its tokens, more than 0.
            running: sequences that ran beside it, itself included, 1 or more.
        """
        self._streams = self._streams * FORGETTING + 1.0
        self._sum_s = self._sum_s * FORGETTING + tpot_s
        self._sum_running = self._sum_running * FORGETTING + running
        self._sum_squared = self._sum_squared * FORGETTING + running * running
        self._sum_product = self._sum_product * FORGETTING + running * tpot_s

    def share(self, running: float, step_tokens: float) -> float:
        """Return the share of a step's time that grows with the batch, 0 to 1.

        Args:
            running: sequences there.
            step_tokens: of each of them in a step, drafts included.
        """
        if not self._streams:
            return _prior_share(running, step_tokens)
        mean_s, usual = self._sum_s / self._streams, self._sum_running / self._streams
        slope_s = self.slope_s(step_tokens)
        return min(slope_s * running / (mean_s + slope_s * (running - usual)), 1.0)

    def slope_s(self, step_tokens: float) -> float:
        """Return by how much one more sequence lengthens times per token; 0 while none is known.

        Args:
            step_tokens: as `share` has it.
        """
        if not self._streams:
            return 0.0
        mean_s, usual = self._sum_s / self._streams, self._sum_running / self._streams
        prior_s = _prior_share(usual, step_tokens) * mean_s / usual
        spread = max(self._sum_squared - self._streams * usual * usual, 0.0)
        together = self._sum_product - self._streams * usual * mean_s
        slope_s = (together + PRIOR_WEIGHT * prior_s) / (spread + PRIOR_WEIGHT)
        return min(max(slope_s, 0.0), mean_s / usual)  # no step takes less than no time


def _prior_share(running: float, step_tokens: float) -> float:
    tokens = running * step_tokens
    return tokens / (tokens + KNEE_TOKENS)
