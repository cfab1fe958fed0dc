"""How fast an upstream is, as far as its answers show."""

from __future__ import annotations

from typing import Final

from policies.types import WorkerSpeed

WEIGHT: Final = 0.2
"""Of the newest answer in the running means: about the last ten count."""


class ObservedSpeed:
    """Running means over the streams that ended rightly."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._tpot_s = 0.0
        self._prompt_token_s = 0.0

    def begun(self, seconds: float, prompt_tokens: float) -> None:
        """Note the time from the request to its first byte; it contains the upstream's queue."""
        self._prompt_token_s = _mean(self._prompt_token_s, seconds / max(1.0, prompt_tokens))

    def streamed(self, seconds: float, tokens: int, choices: int) -> None:
        """Note a stream: the time from its first to its last byte, and all its choices' tokens."""
        gaps = tokens - choices
        if gaps > 0:
            self._tpot_s = _mean(self._tpot_s, seconds * choices / gaps)

    def speed(self) -> WorkerSpeed:
        """Return the means."""
        return WorkerSpeed(self._tpot_s, self._prompt_token_s)


def _mean(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + WEIGHT * (newest - mean)
