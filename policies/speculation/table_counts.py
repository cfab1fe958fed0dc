"""The counts of a table of survivals, which a worker stores for its next start.

They contain nothing of a text: only how many tokens were accepted at each position, by the evidence
of the draft.
"""

from __future__ import annotations

import math

from msgspec import Struct


class TableCounts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The counts of a `survival.SurvivalTable`.

    Attributes:
        drafts: number of drafts, where earlier drafts count less.
        rows: for each row with drafts, its index, and its numbers of accepted and of rejected
            tokens by position.
    """

    drafts: float = 0.0
    rows: tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...] = ()

    def check(self, rows: int, positions: int) -> None:
        """Check that the counts fit a table.

        Raises:
            ValueError: a number is negative or not finite, or a row or a position is unknown.
        """
        numbers = [self.drafts]
        for row, accepted, rejected in self.rows:
            longest = max(len(accepted), len(rejected))
            if not 0 <= row < rows or longest > positions:
                raise ValueError(f"the table has no row {row} with {longest} positions")
            numbers += accepted + rejected
        if not all(0.0 <= number < math.inf for number in numbers):
            raise ValueError("the counts of a table must be finite and at least 0")
