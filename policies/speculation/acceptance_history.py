"""Acceptance of drafts in earlier requests, by tenant and model.

Greedy and sampled texts are counted separately. The history contains counts only, and nothing of a
prompt or an output.

Gateways share their histories. A *tally* sums choices, and two tallies add up to the tally of all
their choices. A gateway sends the tallies of its new choices, and gets the sums over all gateways.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from draftgate.policies.types import UNTESTED, DraftCounts

MOST_KEYS: Final = 4096
"""Maximum number of keys, about a megabyte. The least recently used key is forgotten first."""

FORGETTING: Final = 0.99
"""Decay per finished choice, which averages about the last hundred and follows a change of texts
within minutes. (Chosen, not fitted: recorded texts do not change.)"""

Key = tuple[str | None, str, bool]
"""Tenant, model, and whether decoding is greedy (temperature 0). The tenant None stands for the sum
over all tenants."""


class Tally(NamedTuple):
    """Draft counts of finished choices, where earlier choices count less.

    Attributes:
        choices: number of choices.
        accepted, rejected: counts as in `DraftCounts`.
    """

    choices: int = 0
    accepted: float = 0.0
    rejected: float = 0.0

    def then(self, later: Tally) -> Tally:
        """Return the tally of these choices and later ones."""
        kept = FORGETTING**later.choices
        return Tally(
            self.choices + later.choices,
            self.accepted * kept + later.accepted,
            self.rejected * kept + later.rejected,
        )


NOTHING: Final = Tally()
"""The tally of no choices."""

KeyTally = tuple[Key, Tally]


@dataclass(slots=True)
class _Entry:
    """The tallies of a key: what the store has, what is on its way to the store, and the rest."""

    stored: Tally = NOTHING
    sent: Tally = NOTHING
    new: Tally = NOTHING

    @property
    def counts(self) -> DraftCounts:
        total = self.stored.then(self.sent).then(self.new)
        return DraftCounts(total.accepted, total.rejected)


class AcceptanceHistory:
    """Draft counts for each tenant and model, and for each model."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most = most_keys
        self._entries = OrderedDict[Key, _Entry]()  # the most recently used entry is last
        self._new: dict[Key, None] = {}  # keys with new choices
        self._sent: tuple[Key, ...] = ()

    def counts(self, tenant: str, model: str, *, greedy: bool) -> tuple[DraftCounts, DraftCounts]:
        """Return the counts of a tenant with a model, and of all tenants with the model."""
        own = self._entries.get((tenant, model, greedy))
        all_ = self._entries.get((None, model, greedy))
        return (
            UNTESTED if own is None else own.counts,
            UNTESTED if all_ is None else all_.counts,
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
        counts = draft_counts(drafted, histogram)
        choice = Tally(1, counts.accepted, counts.rejected)
        for owner in (tenant, None):
            key = owner, model, greedy
            entry = self._entry(key)
            entry.new = entry.new.then(choice)
            self._new[key] = None

    def take(self, most: int) -> list[KeyTally]:
        """Return the tallies of new choices for the store, of at most this number of keys.

        The same tallies are returned until `confirm`, because the store may have got them already.
        """
        if not self._sent:
            self._sent = tuple(islice(self._new, most))
            for key in self._sent:
                del self._new[key]
                entry = self._entries[key]
                entry.sent, entry.new = entry.new, NOTHING
        known = (key for key in self._sent if key in self._entries)
        return [(key, self._entries[key].sent) for key in known]

    def confirm(self) -> None:
        """Note that the store has the tallies that `take` has returned."""
        for key in self._sent:
            entry = self._entries.get(key)
            if entry is not None:
                entry.stored, entry.sent = entry.stored.then(entry.sent), NOTHING
        self._sent = ()

    def merge(self, totals: Collection[KeyTally]) -> None:
        """Use the totals of the store, which contain every confirmed tally."""
        for key, total in totals:
            self._entry(key).stored = total

    def totals(self) -> Iterator[KeyTally]:
        """Yield the known totals of the store, from which the store can recover its memory."""
        return ((key, one.stored) for key, one in self._entries.items() if one.stored.choices)

    def _entry(self, key: Key) -> _Entry:
        """Return the entry of a key, which is now the most recently used one."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
            if len(self._entries) > self._most:
                forgotten, _ = self._entries.popitem(last=False)
                self._new.pop(forgotten, None)
        else:
            self._entries.move_to_end(key)
        return entry


def draft_counts(drafted: int, histogram: Sequence[int]) -> DraftCounts:
    """Return how many draft tokens of a choice were accepted, and how many drafts were rejected.

    A draft is tested up to its first wrong token, but outcomes do not contain its length. A draft
    that accepted fewer tokens than the mean length of drafts therefore counts as rejected. The
    number of rejections is at most the number of tokens that were not accepted.
    """
    drafts, accepted = sum(histogram), sum(n * steps for n, steps in enumerate(histogram))
    shorter = sum(steps for n, steps in enumerate(histogram) if n * drafts < drafted)
    return DraftCounts(accepted, min(shorter, max(drafted - accepted, 0)))
