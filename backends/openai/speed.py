"""How fast an upstream is, as far as its answers show."""

from __future__ import annotations

from typing import Final

from policies.draft_pay import BatchShare
from policies.types import WorkerSpeed

WEIGHT: Final = 0.2
"""Of the newest answer in the running means: about the last ten count."""


class ObservedSpeed:
    """Running means over the streams that ended rightly.

    Attributes:
        batch: how far its times grow with what runs there.
    """

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self.batch = BatchShare()
        self._tpot_s = 0.0
        self._prompt_token_s = 0.0

    def begun(self, seconds: float, prompt_tokens: float) -> None:
        """Note the time from the request to its first byte; it contains the upstream's queue."""
        self._prompt_token_s = _mean(self._prompt_token_s, seconds / max(1.0, prompt_tokens))

    def streamed(self, seconds: float, tokens: int, choices: int, running: float) -> None:
        """Note a stream: the time from its first to its last byte, and all its choices' tokens.

        Args:
            running: sequences that ran there meanwhile, on average.
        """
        gaps = tokens - choices
        if gaps <= 0 or seconds <= 0.0:
            return
        tpot_s = seconds * choices / gaps
        self._tpot_s = _mean(self._tpot_s, tpot_s)
        self.batch.learn(tpot_s, max(running, 1.0))

    def speed(self) -> WorkerSpeed:
        """Return the means."""
        return WorkerSpeed(self._tpot_s, self._prompt_token_s)


def _mean(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + WEIGHT * (newest - mean)
