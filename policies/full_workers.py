"""The workers that had no capacity in the last searches, so that no search repeats another.

A search of all workers takes milliseconds in a large pool, and requests that wait are searched for
with every report of a worker. After a search without success, only workers that have changed can
have capacity. A search thus takes time in proportion to the number of changed workers.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

MOST_KINDS: Final = 16
"""Maximum number of kinds of requests whose searches are kept. Each report of a worker is recorded
for each of them. Requests differ in the number of their choices, and rarely in their TPOT targets.
(Chosen, not tuned, 2026-11-24.)"""

Worker = TypeVar("Worker", bound=Hashable)


class _Search(NamedTuple, Generic[Worker]):
    """A search of all workers without success.

    Attributes:
        longest: upper bound of the prompts for which the unchanged workers have capacity.
        changed: workers that have changed since, in the order of their changes.
    """

    longest: float
    changed: dict[Worker, None]


class FullWorkers(Generic[Worker]):
    """The last searches without success, by kind of request.

    Requests of the same kind differ only in the length of their prompts.
    """

    def __init__(self) -> None:
        self._searches: dict[Hashable, _Search[Worker]] = {}

    def __len__(self) -> int:
        """Return the number of searches."""
        return len(self._searches)

    def candidates(self, kind: Hashable, prompt_tokens: int) -> Collection[Worker] | None:
        """Return the workers that may have capacity for a request, or None if any worker may."""
        search = self._searches.get(kind)
        if search is None or prompt_tokens <= search.longest:
            return None
        return search.changed.keys()

    def record(self, kind: Hashable, longest: float, *, searched_all: bool) -> None:
        """Record that no candidate had capacity for a request.

        Args:
            longest: tokens of the longest prompt for which one of them had capacity.
            searched_all: whether the search compared all workers instead of the candidates.
        """
        if not searched_all:
            longest = max(longest, self._searches[kind].longest)
        elif kind not in self._searches and len(self._searches) >= MOST_KINDS:
            self._searches.clear()
        self._searches[kind] = _Search(longest, {})

    def mark(self, worker: Worker) -> None:
        """Record that a worker may have more capacity than before."""
        for search in self._searches.values():
            search.changed[worker] = None

    def clear(self) -> None:
        """Forget all searches, because any worker may have more capacity than before."""
        self._searches.clear()
