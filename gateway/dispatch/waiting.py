"""A request for a worker, as the queue holds it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from draftgate.gateway.dispatch.routing import Routed, View
from draftgate.policies.admission.types import Refused
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.types import Ticket

Reconsider = Callable[[Ticket, float], Refused | None]
"""A function that decides again about a request, from its ticket and the seconds that it has
waited."""

OFFLINE_S: Final = 1e9
"""Time by which the tickets of offline requests are later than they are, about 30 years. Ordering
policies therefore place them last, and never find them overdue."""


def _keep(ticket: Ticket, waited_s: float) -> None:
    """Keep a request, without a forecast."""


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting(Ticket):
    """A request for a worker, which the queue holds while none has capacity.

    Attributes:
        need: the capacity that the request needs.
        avoid: ids of workers that run the request only if no other worker is available.
        since_s: start of the wait, for the timeout. None means the next call of `turn`.
        timeout_s: the longest wait in seconds, or None for that of the queue.
        reconsider: decides again about the request while it waits.
        claim_tokens: tokens for which a resumed request may claim a worker, or 0 for a new request.
        refused: whether workers had capacity but the store refused the lease.
        has_blocks: whether the request moves with its KV blocks, so that it only decodes.
        view: a function that returns the routing policy's view of the request.
        turn: the future of its worker, while the queue holds it.
        backs_off: whether a resumed request waits for `BACKOFF_S` after a refusal.
        has_preempted: whether another request has lost its place at an upstream for this one.
    """

    request_id: str
    need: CapacityNeed
    avoid: frozenset[str] = frozenset()
    since_s: float | None = None
    timeout_s: float | None = None
    reconsider: Reconsider = _keep
    claim_tokens: int = 0
    refused: bool = False
    has_blocks: bool = False
    view: View = field(init=False)
    turn: asyncio.Future[Routed] = field(init=False)
    backs_off: bool = False
    has_preempted: bool = False

    def for_rest(
        self, request_id: str, need: CapacityNeed, avoid: frozenset[str], claim_tokens: int
    ) -> Waiting:
        """Return the rest of the request, which precedes all requests that never had a worker.

        The rest of an offline request claims no worker, and waits after all others.
        """
        return replace(
            self,
            request_id=request_id,
            need=need,
            avoid=avoid,
            since_s=None,
            reconsider=_keep,
            claim_tokens=0 if need.offline else claim_tokens,
            refused=False,
            has_blocks=False,
            backs_off=False,
        )

    def wait_offline(self) -> None:
        """Wait without limit, and after all other requests in every order."""
        self.arrived_s += OFFLINE_S
        self.deadline_s += OFFLINE_S
        self.timeout_s, self.reconsider = math.inf, _keep

    def wait_again(self, since_s: float) -> None:
        """Prepare another wait with the same place, because the request was not sent.

        Args:
            since_s: time when the unsuccessful wait started.
        """
        if self.since_s is None:
            self.since_s = since_s
        self.returning = self.refused = True

    def wait_for_start(self, timeout_s: float) -> None:
        """Prepare a wait for a server that may start, about which admission cannot forecast."""
        if self.timeout_s is None:
            self.timeout_s, self.reconsider = timeout_s, _keep

    def wait_preempted(self) -> None:
        """Prepare another wait with the same place, after the loss of a worker to another request.

        The wait has no limit but that of the client, which would have got its response.
        """
        self.since_s, self.timeout_s, self.reconsider = None, math.inf, _keep
