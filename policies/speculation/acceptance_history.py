"""What became of drafts in earlier requests: by tenant and model, greedy and drawn apart.

Counts only: nothing of a prompt or an output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from draftgate.policies.types import UNTESTED, DraftCounts

MOST_TENANTS: Final = 4096
"""Tenants that are remembered, a megabyte or so; those not heard of for longest go first."""

FORGETTING: Final = 0.99
"""What a finished choice leaves of all before it: the last hundred decide, so a tenant whose texts
change is followed within minutes. (Chosen, not fitted: recorded texts do not change.)"""

Key = tuple[str, str, bool]
"""Tenant, model, and whether tokens are the likeliest ones (temperature 0)."""


class AcceptanceHistory:
    """Remembers for each tenant and model, and for each model, how drafts fared."""

    def __init__(self, most_tenants: int = MOST_TENANTS) -> None:
        """Remember nothing yet."""
        self._most = most_tenants
        self._of_tenants = OrderedDict[Key, DraftCounts]()  # the latest last
        self._of_models: dict[tuple[str, bool], DraftCounts] = {}

    def of(self, tenant: str, model: str, *, greedy: bool) -> tuple[DraftCounts, DraftCounts]:
        """Return what became of the drafts of a tenant with a model, and of all tenants with it."""
        return (
            self._of_tenants.get((tenant, model, greedy), UNTESTED),
            self._of_models.get((model, greedy), UNTESTED),
        )

    def learn(
        self, tenant: str, model: str, *, greedy: bool, drafted: int, histogram: Sequence[int]
    ) -> None:
        """Learn from a choice that has finished; without drafts there is nothing to learn.

        Args:
            drafted: draft tokens it verified.
            histogram: its steps with drafts that accepted 0, 1, 2, ... tokens.
        """
        if drafted <= 0:
            return
        key, news = (tenant, model, greedy), draft_counts(drafted, histogram)
        self._of_tenants[key] = _with(self._of_tenants.get(key, UNTESTED), news)
        self._of_tenants.move_to_end(key)
        if len(self._of_tenants) > self._most:
            self._of_tenants.popitem(last=False)
        all_of_it = (model, greedy)
        self._of_models[all_of_it] = _with(self._of_models.get(all_of_it, UNTESTED), news)


def draft_counts(drafted: int, histogram: Sequence[int]) -> DraftCounts:
    """Return which draft tokens of a choice agreed, and how many drafts ended with a wrong one.

    Drafts are tested up to their first wrong token, and outcomes do not say how long each was: one
    that accepted less than drafts had on average counts as rejected. No more than had a token left.
    """
    drafts, accepted = sum(histogram), sum(n * steps for n, steps in enumerate(histogram))
    shorter = sum(steps for n, steps in enumerate(histogram) if n * drafts < drafted)
    return DraftCounts(accepted, min(shorter, max(drafted - accepted, 0)))


def _with(counts: DraftCounts, news: DraftCounts) -> DraftCounts:
    return DraftCounts(
        counts.agreed * FORGETTING + news.agreed, counts.rejected * FORGETTING + news.rejected
    )
