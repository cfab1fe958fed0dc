"""How much of what they may generate the requests of a tenant do generate."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

MOST_TENANTS: Final = 4096
"""Tenants that are remembered; those not heard of for longest go first."""

FORGETTING: Final = 0.98
"""What a finished sequence leaves of all before it: the last fifty decide. (Chosen: lengths change
with the application, within minutes.)"""

PRIOR_SEQUENCES: Final = 5.0
"""So many sequences of all tenants stand in for a tenant of which little is known, and so many that
reach `max_tokens` for all: it is the safe guess."""


class _Ratio(NamedTuple):
    """Sequences and the sum of their output / max_tokens; old ones count less."""

    sequences: float = 0.0
    used: float = 0.0

    def shrunk(self, to: float) -> float:
        return (self.used + PRIOR_SEQUENCES * to) / (self.sequences + PRIOR_SEQUENCES)

    def plus(self, used: float) -> _Ratio:
        return _Ratio(self.sequences * FORGETTING + 1.0, self.used * FORGETTING + used)


class OutputHistory:
    """Remembers for each tenant, and for all, the ratio of output to `max_tokens`."""

    def __init__(self, most_tenants: int = MOST_TENANTS) -> None:
        """Remember nothing yet."""
        self._most = most_tenants
        self._of_tenants = OrderedDict[str, _Ratio]()  # the latest last
        self._of_all = _Ratio()

    def expected_tokens(self, tenant: str, max_tokens: int) -> float:
        """Return the tokens that a sequence of a tenant is expected to generate."""
        of_tenant = self._of_tenants.get(tenant, _Ratio())
        return max_tokens * of_tenant.shrunk(self._of_all.shrunk(1.0))

    def learn(self, tenant: str, output_tokens: int, max_tokens: int) -> None:
        """Learn from a sequence that ended by itself or at its limit."""
        if max_tokens < 1:
            return
        used = min(max(output_tokens / max_tokens, 0.0), 1.0)
        self._of_tenants[tenant] = self._of_tenants.get(tenant, _Ratio()).plus(used)
        self._of_tenants.move_to_end(tenant)
        if len(self._of_tenants) > self._most:
            self._of_tenants.popitem(last=False)
        self._of_all = self._of_all.plus(used)
