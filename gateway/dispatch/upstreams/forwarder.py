"""The choice of the upstreams of a fleet, and what all requests for them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from draftgate.backends.base import Exchange, UpstreamPause
from draftgate.backends.errors import UpstreamFailed
from draftgate.gateway.dispatch.admission import AdmissionController
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.routing import View
from draftgate.gateway.dispatch.upstreams.pools import UpstreamPools
from draftgate.gateway.dispatch.upstreams.prefixes import UpstreamPrefixes
from draftgate.gateway.errors import GatewayError, UpstreamBroken, UpstreamBusy, UpstreamUnavailable
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.resilience.retry_budget import RetryBudget

MOST_ATTEMPTS: Final = 3
"""Maximum attempts of one request. More would multiply the load on the remaining upstreams during
an outage."""

_MOST_CALLS: Final = 2
"""Maximum calls of one request to one upstream. The first call may have used a closing
connection."""

UNAVAILABLE: Final = 503
FIRST_ERROR_STATUS: Final = 400

WHOLE_BYTES: Final = 1 << 20
"""A whole response up to this size is sent once it is complete. The client then gets an error
instead of a part if the upstream breaks off. A completion of 32,000 tokens has 150 kB."""


class Forwarder:
    """The upstreams of a fleet, and what all requests for them share."""

    def __init__(
        self,
        fleet: Fleet,
        queue: CentralQueue,
        admission: AdmissionController,
        pools: UpstreamPools,
        budget: RetryBudget,
        prefixes: UpstreamPrefixes,
        on_retry: Callable[[str, bool], None],
    ) -> None:
        """Use a fleet of upstreams, which may start later.

        Args:
            budget: the budget of retries of all requests.
            prefixes: what the upstreams have cached.
            on_retry: a callback for each retry, with its cause and whether the budget allows it.
        """
        self.fleet = fleet
        self.queue = queue
        self.admission = admission
        self.pools = pools
        self.budget = budget
        self.prefixes = prefixes
        self._on_retry = on_retry

    def choose(
        self,
        model: str,
        need: CapacityNeed | None,
        avoid: frozenset[str],
        view: View,
        tried: list[str],
        *,
        refused: bool,
    ) -> FleetWorker | None:
        """Return the upstream for the next attempt, or None without an upstream or budget.

        Args:
            model: the name of the request's model, or empty for any.
            need: the capacity that the request needs, or None if it needs none.
            avoid: ids of upstreams that are used only if no other is open.
            view: a function that returns the routing policy's view of the request.
            tried: ids of upstreams that were already called. After a failure, they are used if no
                other is left.
            refused: whether the last upstream refused the request.
        """
        if len(tried) >= MOST_ATTEMPTS:
            return None
        usable = [(worker, worker.usage) for worker in self._open(model)]
        if need is not None:
            usable = [pair for pair in usable if has_capacity(pair[1], need)]
        found = [pair for pair in usable if pair[0].worker_id not in tried]
        if not found and not refused:
            found = [pair for pair in usable if tried.count(pair[0].worker_id) < _MOST_CALLS]
        if avoid:
            found = [pair for pair in found if pair[0].worker_id not in avoid] or found
        if not found:
            return None
        if tried:
            allowed = self.budget.take_retry(self.queue.now_s())
            self._on_retry("refused" if refused else "failed", allowed)
            if not allowed:
                return None
        return self.queue.router.choose(view, found, self.fleet.workers).worker

    def no_upstream(self, model: str) -> GatewayError:
        """Return the error for a request without an available upstream."""
        retry_after_s = self.retry_after_s(model)
        pauses = self._pauses(model)
        if all(pause is not None and pause.denied for pause in pauses):
            return denied_access(next(pause.denied for pause in pauses if pause is not None))
        if any(pause is not None and pause.status == UNAVAILABLE for pause in pauses):
            return UpstreamUnavailable("no upstream is available", retry_after_s=retry_after_s)
        return UpstreamBusy("every upstream is overloaded", retry_after_s=retry_after_s)

    def retry_after_s(self, model: str) -> int:
        """Return the whole seconds until an upstream may be called again, at least 1."""
        pauses = self._pauses(model)
        return max(1, math.ceil(min(pause.remaining_s if pause else 0.0 for pause in pauses)))

    def _open(self, model: str) -> list[FleetWorker]:
        return self.fleet.open_among(self.fleet.workers, model)

    def _pauses(self, model: str) -> list[UpstreamPause | None]:
        """Return the pauses of the upstreams of a model, or of all if none has it at present."""
        workers = self.fleet.workers
        return [one.pause for one in workers if one.offers(model)] or [w.pause for w in workers]


def denied_access(status: int) -> UpstreamBroken:
    """Return the error for a request whose upstreams deny this gateway access.

    The message omits the upstream's reason, which may quote a part of the key.
    """
    return UpstreamBroken(
        f"the upstream is misconfigured: it denied this gateway access with status {status}; the "
        "operator must check --upstream-api-key-env"
    )


async def read_first(exchange: Exchange) -> bytes:
    """Return the first bytes of a stream, or a whole response unless it is large.

    Another upstream can still respond if a whole response breaks off.

    Raises:
        UpstreamFailed: the response is incomplete, or has no body although it is a success.
    """
    first = await exchange.read()
    if exchange.streaming or exchange.status >= FIRST_ERROR_STATUS:
        return first
    if not first:
        raise UpstreamFailed("its response is empty")
    begin = bytearray(first)
    while len(begin) <= WHOLE_BYTES and (block := await exchange.read()):
        begin += block
    return bytes(begin)
