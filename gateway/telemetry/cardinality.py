"""How many series a label may make: what comes beyond is folded into one."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

MOST_VALUES: Final = 100
"""Values of a label. A histogram has some 20 samples for each; a scrape of a few thousand samples
is what Prometheus takes for granted, one of a million is not."""

OTHER: Final = "other"


class LabelBounds:
    """Remembers the first values of each label; further ones become `OTHER`.

    Tenants, endpoints and names that others choose may be labels so: memory and pages stay small
    whoever calls.
    """

    def __init__(self, most: int = MOST_VALUES) -> None:
        """Know no value yet."""
        self._most = most
        self._known: defaultdict[str, set[str]] = defaultdict(set)

    def folded(self, label: str, value: str) -> str:
        """Return the value, or `OTHER` if the label has as many as it may."""
        known = self._known[label]
        if value in known:
            return value
        if len(known) >= self._most:
            return OTHER
        known.add(value)
        return value
