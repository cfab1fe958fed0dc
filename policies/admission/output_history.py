"""The share of `max_tokens` that each tenant's requests generate."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_MOST_TENANTS: Final = 4096
"""Maximum number of tenants. The least recently used tenant is forgotten first."""

_FORGETTING: Final = 0.98
"""Decay per finished sequence, which averages about the last fifty. (Chosen: output lengths change
with the application, within minutes.)"""

PRIOR_SEQUENCES: Final = 5.0
"""Weight of the mean of all tenants in the mean of one tenant, in sequences. The safe guess,
`max_tokens`, has the same weight in the mean of all tenants."""


class _Ratio:
    """The decaying number of sequences, and the decaying sum of output / max_tokens."""

    __slots__ = ("sequences", "used")

    def __init__(self) -> None:
        self.sequences = self.used = 0.0

    def shrunk(self, to: float) -> float:
        return (self.used + PRIOR_SEQUENCES * to) / (self.sequences + PRIOR_SEQUENCES)

    def add(self, used: float) -> None:
        self.sequences = self.sequences * _FORGETTING + 1.0
        self.used = self.used * _FORGETTING + used


class OutputHistory:
    """The mean ratio of output tokens to `max_tokens`, for each tenant and for all tenants."""

    def __init__(self, most_tenants: int = _MOST_TENANTS) -> None:
        self._most = most_tenants
        self._tenants = OrderedDict[str, _Ratio]()  # the most recently used tenant is last
        self._all = _Ratio()

    def expected_tokens(self, tenant: str, max_tokens: int) -> float:
        """Return the expected output tokens of a tenant's sequence."""
        share, ratio = self._all.shrunk(1.0), self._tenants.get(tenant)
        return max_tokens * (share if ratio is None else ratio.shrunk(share))

    def add_sequence(self, tenant: str, output_tokens: int, max_tokens: int) -> None:
        """Count a sequence that reached its end or its token limit."""
        if max_tokens < 1:
            return
        used = min(max(output_tokens / max_tokens, 0.0), 1.0)
        ratio = self._tenants.get(tenant)
        if ratio is None:
            ratio = self._tenants[tenant] = _Ratio()
            if len(self._tenants) > self._most:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        ratio.add(used)
        self._all.add(used)
