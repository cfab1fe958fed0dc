"""How much of their `max_tokens` the requests of a tenant generate."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

MOST_TENANTS: Final = 4096
"""Tenants to remember; the least recently used is forgotten first."""

FORGETTING: Final = 0.98
"""Decay per finished sequence: the last fifty decide. (Chosen: lengths change with the application,
within minutes.)"""

PRIOR_SEQUENCES: Final = 5.0
"""Weight of the mean of all tenants in that of one tenant, and of the safe guess, `max_tokens`, in
the mean of all; in sequences."""


class _Ratio(NamedTuple):
    """A decaying number of sequences and the sum of their output / max_tokens."""

    sequences: float = 0.0
    used: float = 0.0

    def shrunk(self, to: float) -> float:
        return (self.used + PRIOR_SEQUENCES * to) / (self.sequences + PRIOR_SEQUENCES)

    def plus(self, used: float) -> _Ratio:
        return _Ratio(self.sequences * FORGETTING + 1.0, self.used * FORGETTING + used)


class OutputHistory:
    """The mean ratio of output to `max_tokens`, for each tenant and for all."""

    def __init__(self, most_tenants: int = MOST_TENANTS) -> None:
        self._most = most_tenants
        self._tenants = OrderedDict[str, _Ratio]()  # the latest last
        self._all = _Ratio()

    def expected_tokens(self, tenant: str, max_tokens: int) -> float:
        """Return the expected output tokens of a sequence of a tenant."""
        ratio = self._tenants.get(tenant, _Ratio())
        return max_tokens * ratio.shrunk(self._all.shrunk(1.0))

    def add_sequence(self, tenant: str, output_tokens: int, max_tokens: int) -> None:
        """Learn from a sequence that ended by itself or at its limit."""
        if max_tokens < 1:
            return
        used = min(max(output_tokens / max_tokens, 0.0), 1.0)
        self._tenants[tenant] = self._tenants.get(tenant, _Ratio()).plus(used)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)
        self._all = self._all.plus(used)
