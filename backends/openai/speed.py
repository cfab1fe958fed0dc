"""How fast an upstream is, as far as its answers show."""

from __future__ import annotations

from typing import Final

from draftgate.policies.speculation.upstream_speculation import BatchShare
from draftgate.policies.types import WorkerSpeed

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
        self._tpot_s = self._running = 0.0
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
        tpot_s, running = seconds * choices / gaps, max(running, 1.0)
        self._tpot_s, self._running = _mean(self._tpot_s, tpot_s), _mean(self._running, running)
        self.batch.add_stream(tpot_s, running)

    def speed(self, running: int = 1, step_tokens: float = 1.0) -> WorkerSpeed:
        """Return the means, for what runs there now: who was busy is not taken for slow since.

        Args:
            running: sequences there; none is as one.
            step_tokens: of each of them in a step, drafts included.
        """
        if not self._tpot_s:
            return WorkerSpeed(0.0, self._prompt_token_s)
        slope_s, there = self.batch.slope_s(step_tokens), max(running, 1)
        tpot_s = max(self._tpot_s + slope_s * (there - self._running), slope_s * there)
        return WorkerSpeed(tpot_s, self._prompt_token_s, slope_s)


def _mean(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + WEIGHT * (newest - mean)
