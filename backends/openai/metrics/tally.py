"""Counters of drafts as means of the last ones."""

from __future__ import annotations

from typing import Final

from draftgate.backends.openai.metrics.reading import DraftTotals
from draftgate.policies.speculation.survival import PRIOR_ACCEPTANCE
from draftgate.policies.speculation.upstream_speculation import DraftMeans, expected_accepted

HALF_LIFE_DRAFTS: Final = 2000.0
"""After so many drafts what was counted weighs half: a second or two of a busy engine, minutes of a
quiet one. (Chosen, not tuned; 2026-11-22.)"""

PRIOR_DRAFTS: Final = 8.0
"""What is believed first weighs as much as so many drafts."""

PRIOR_DRAFT_TOKENS: Final = 4.0
"""Believed first: the middle of what people set (vLLM's examples have 3 to 5)."""

PRIOR: Final = DraftMeans(
    PRIOR_DRAFT_TOKENS, expected_accepted(PRIOR_ACCEPTANCE, PRIOR_DRAFT_TOKENS)
)


class DraftTally:
    """Follows the counters of one engine, which begin anew when it does."""

    def __init__(self) -> None:
        """Begin with what is believed of any."""
        self._drafts = PRIOR_DRAFTS
        self._drafted = PRIOR_DRAFTS * PRIOR.drafted
        self._accepted = PRIOR_DRAFTS * PRIOR.accepted
        self._last = DraftTotals(0.0, 0.0, 0.0)

    @property
    def means(self) -> DraftMeans:
        """The means of the last drafts."""
        drafted = self._drafted / self._drafts
        return DraftMeans(drafted, min(self._accepted / self._drafts, drafted))

    def learn(self, totals: DraftTotals) -> None:
        """Take in what was counted since; a long past weighs no more than `HALF_LIFE_DRAFTS`."""
        last = self._last
        begun_anew = any(now < before for now, before in zip(totals, last, strict=True))
        since = last if not begun_anew else DraftTotals(0.0, 0.0, 0.0)
        self._last = totals
        drafts, drafted, accepted = (now - old for now, old in zip(totals, since, strict=True))
        if drafts <= 0.0:
            return
        kept = 0.5 ** (drafts / HALF_LIFE_DRAFTS)
        weight = min(1.0, HALF_LIFE_DRAFTS / drafts)
        self._drafts = self._drafts * kept + drafts * weight
        self._drafted = self._drafted * kept + drafted * weight
        self._accepted = self._accepted * kept + accepted * weight
