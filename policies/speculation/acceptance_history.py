"""Acceptance of drafts in earlier requests, by tenant and model.

Greedy and sampled texts are counted separately. The history contains counts only, and nothing of a
prompt or an output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from draftgate.policies.types import UNTESTED, DraftCounts

MOST_TENANTS: Final = 4096
"""Maximum number of tenants, about a megabyte. The least recently used tenant is forgotten first.
"""

FORGETTING: Final = 0.99
"""Decay per finished choice, which averages about the last hundred and follows a change of texts
within minutes. (Chosen, not fitted: recorded texts do not change.)"""

Key = tuple[str, str, bool]
"""Tenant, model, and whether decoding is greedy (temperature 0)."""


class AcceptanceHistory:
    """Draft counts for each tenant and model, and for each model."""

    def __init__(self, most_tenants: int = MOST_TENANTS) -> None:
        self._most = most_tenants
        self._tenants = OrderedDict[Key, DraftCounts]()  # the most recently used entry is last
        self._models: dict[tuple[str, bool], DraftCounts] = {}

    def counts(self, tenant: str, model: str, *, greedy: bool) -> tuple[DraftCounts, DraftCounts]:
        """Return the counts of a tenant with a model, and of all tenants with the model."""
        return (
            self._tenants.get((tenant, model, greedy), UNTESTED),
            self._models.get((model, greedy), UNTESTED),
        )

    def add_choice(
        self, tenant: str, model: str, *, greedy: bool, drafted: int, histogram: Sequence[int]
    ) -> None:
        """Learn from a finished choice, which has no effect without drafts.

        Args:
            drafted: number of draft tokens that the choice verified.
            histogram: number of its steps with drafts that accepted 0, 1, 2, ... tokens.
        """
        if drafted <= 0:
            return
        key, new = (tenant, model, greedy), draft_counts(drafted, histogram)
        self._tenants[key] = _add(self._tenants.get(key, UNTESTED), new)
        self._tenants.move_to_end(key)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)
        self._models[key[1:]] = _add(self._models.get(key[1:], UNTESTED), new)


def draft_counts(drafted: int, histogram: Sequence[int]) -> DraftCounts:
    """Return how many draft tokens of a choice were accepted, and how many drafts were rejected.

    A draft is tested up to its first wrong token, but outcomes do not contain its length. A draft
    that accepted fewer tokens than the mean length of drafts therefore counts as rejected. The
    number of rejections is at most the number of tokens that were not accepted.
    """
    drafts, accepted = sum(histogram), sum(n * steps for n, steps in enumerate(histogram))
    shorter = sum(steps for n, steps in enumerate(histogram) if n * drafts < drafted)
    return DraftCounts(accepted, min(shorter, max(drafted - accepted, 0)))


def _add(counts: DraftCounts, new: DraftCounts) -> DraftCounts:
    return DraftCounts(
        counts.accepted * FORGETTING + new.accepted, counts.rejected * FORGETTING + new.rejected
    )
