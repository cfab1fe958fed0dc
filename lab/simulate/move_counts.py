"""The numbers of moves of a simulation."""

from __future__ import annotations

from collections import Counter

from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.run import Move, Resume
from draftgate.policies.resilience.failover import Cause, GivenUp


class MoveCounts:
    """An observer that counts moves by reason and end, as in `faster moved`."""

    def __init__(self) -> None:
        self.ends = Counter[str]()

    def placed(self, placed: Placement) -> None:
        """Ignore a placement."""

    def resumed(self, resume: Resume) -> None:
        """Ignore a resume."""

    def given_up(self, cause: Cause, why: GivenUp) -> None:
        """Ignore the end of a prompt."""

    def fetched(self, fetch: KvFetch) -> None:
        """Ignore a fetch."""

    def moved(self, move: Move) -> None:
        """Count a move."""
        self.ends[f"{move.reason.value} {move.end.value}"] += 1
