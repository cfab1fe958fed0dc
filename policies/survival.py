"""Survival: the chance that a draft slot, and every slot before it, is accepted.

The first, simple estimate: a constant chance per token, counted with forgetting for the worker
and shrunk toward it for each sequence. (Calibrated tables by evidence replace it later.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PRIOR_ACCEPTANCE: Final = 0.5
"""Acceptance assumed before anything was seen: neither hopeful nor hopeless."""

PRIOR_WEIGHT: Final = 8.0
"""Slots the worker's estimate weighs in a sequence's own. Per-request averages alone lose to one
global estimate at batches over 16 (recorded traces, B = 64: 1.26x against 1.32x), so shrink."""

FORGETTING: Final = 0.998
"""Decay per observed draft of the worker's counts: the last 500 drafts or so decide."""


@dataclass(slots=True)
class Acceptance:
    """Counts of agreed and refuted draft tokens, with forgetting.

    A draft is evidence up to its first wrong token: slots behind it were never put to the test,
    so `agreed / (agreed + refuted)` estimates the chance of a token given all before it agreed.
    """

    forgetting: float = 1.0
    agreed: float = 0.0
    refuted: float = 0.0

    def observe(self, agreed: int, *, refuted: bool) -> None:
        """Count one draft: `agreed` leading tokens were right, the next was wrong if `refuted`."""
        self.agreed = self.agreed * self.forgetting + agreed
        self.refuted = self.refuted * self.forgetting + refuted

    def rate(self, prior: float = PRIOR_ACCEPTANCE, weight: float = PRIOR_WEIGHT) -> float:
        """Return the chance of a token, in (0, 1), shrunk toward `prior` by `weight` slots."""
        return (self.agreed + prior * weight) / (self.agreed + self.refuted + weight)
