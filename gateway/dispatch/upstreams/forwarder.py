"""The choice of the upstreams of a fleet, and what all requests for them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from draftgate.backends.base import Upstream, UpstreamCall, UpstreamPause
from draftgate.backends.errors import BackendFailed
from draftgate.backends.openai.exchange import with_values
from draftgate.backends.openai.kv_transfer_params import SEPARABLE
from draftgate.gateway.dispatch.admission import AdmissionController, Entry
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.routing import Routed, View
from draftgate.gateway.dispatch.run import Fallback, Watch
from draftgate.gateway.dispatch.span_attributes import record_route
from draftgate.gateway.dispatch.upstreams.costs import UpstreamCosts
from draftgate.gateway.dispatch.upstreams.fallbacks import FALLBACK_HEADER, MODEL_HEADER
from draftgate.gateway.dispatch.upstreams.kept_stream import KeptStream
from draftgate.gateway.dispatch.upstreams.pools import PoolDecision, UpstreamPools
from draftgate.gateway.dispatch.upstreams.preemption import PreemptibleRequest, Preemption
from draftgate.gateway.dispatch.upstreams.prefixes import ForwardedPrompt, UpstreamPrefixes
from draftgate.gateway.dispatch.upstreams.refusals import UNAVAILABLE, denied_access
from draftgate.gateway.dispatch.upstreams.rules import ForwardingRules, RetryCause
from draftgate.gateway.dispatch.waiting import Waiting
from draftgate.gateway.dispatch.watchdog import Watchdog
from draftgate.gateway.errors import (
    GatewayError,
    ModelNotFound,
    QueueTimeout,
    UpstreamBusy,
    UpstreamUnavailable,
)
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.tracing import Span
from draftgate.policies.capacity import CapacityNeed, has_capacity
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView, Role
from draftgate.policies.values import replace

MOST_ATTEMPTS: Final = 3
"""Maximum attempts of one request. More would multiply the load on the remaining upstreams during
an outage."""

_MOST_CALLS: Final = 2
"""Maximum calls of one request to one upstream. The first call may have used a closing
connection."""

UPSTREAM_HEADER: Final = "X-Draftgate-Upstream"
"""The header of a response with the name of its upstream, if there are several."""

PREFILL_HEADER: Final = "X-Draftgate-Prefill-Upstream"
"""The header of a response whose prompt another upstream has computed, with its name."""


class Forwarder:
    """The upstreams of a fleet, and what all requests for them share.

    Attributes:
        preemption: aborts running requests for others, or None if no upstream allows it.
    """

    def __init__(  # noqa: PLR0913 - the parts that all requests share
        self,
        fleet: Fleet,
        queue: CentralQueue,
        admission: AdmissionController,
        pools: UpstreamPools,
        budget: RetryBudget,
        *,
        prefixes: UpstreamPrefixes,
        on_retry: Callable[[str, bool], None],
        watchdog: Watchdog,
        rules: ForwardingRules,
    ) -> None:
        """Use a fleet of upstreams, which may start later.

        Args:
            budget: the budget of retries of all requests.
            prefixes: what the upstreams have cached.
            on_retry: a callback for each retry, with its cause and whether the budget allows it.
            watchdog: watches streams that can be continued.
        """
        self.fleet = fleet
        self.queue = queue
        self.admission = admission
        self.pools = pools
        self.budget = budget
        self.prefixes = prefixes
        self.watchdog = watchdog
        self.rules = rules
        self.fallbacks = rules.fallbacks
        self.costs: UpstreamCosts | None = None  # if an upstream has prices
        queue.awaits_start = rules.start_timeout_s > 0
        self.preemption: Preemption | None = None
        if rules.most_preemptions:
            self.preemption = Preemption(fleet, queue, admission, rules.most_preemptions)
        self._on_retry = on_retry

    def record(
        self,
        entry: Entry,
        routed: Routed,
        view: RequestView,
        pool: PoolDecision | None,
        fallback: Fallback | None,
    ) -> Decision:
        """Record the decision for a request before it is sent to an upstream."""
        reason = "" if fallback is None else fallback.reason
        if pool is None:
            return self.pools.record_other(entry, routed, view, reason)
        return self.pools.record(entry, routed, pool, reason)

    def choose_pool(self, entry: Entry, view: RequestView) -> PoolDecision | None:
        """Choose between upstreams with and without speculation, if both are open."""
        if not entry.max_tokens:  # embeddings have no drafts
            return None
        need = entry.needs[0]
        # If other requests wait, either pool may later be the first with capacity.
        waits = len(self.queue) > 0
        fits = (lambda _: False) if waits else partial(has_capacity, need=need)
        return self.pools.choose(view, entry.tenant, need.offer, fits)

    def choose(
        self,
        model: str,
        need: CapacityNeed | None,
        avoid: frozenset[str],
        view: View,
        tried: list[str],
        cause: RetryCause = RetryCause.FAILED,
    ) -> FleetWorker | None:
        """Return the upstream for the next attempt, or None without an upstream or budget.

        Args:
            model: the name of the request's model, or empty for any.
            need: the capacity that the request needs, or None if it needs none.
            avoid: ids of upstreams that are used only if no other is open.
            view: a function that returns the routing policy's view of the request.
            tried: ids of upstreams that were already called. After a failure, they are used if no
                other is left.
            cause: why the last attempt was not the last one.
        """
        if len(tried) >= MOST_ATTEMPTS:
            return None
        usable = [(worker, worker.usage) for worker in self._open(model)]
        usable = [pair for pair in usable if pair[0].role is not Role.PREFILL] or usable
        if need is not None:
            usable = [pair for pair in usable if has_capacity(pair[1], need)]
        found = [pair for pair in usable if pair[0].worker_id not in tried]
        if not found and cause is RetryCause.FAILED:
            found = [pair for pair in usable if tried.count(pair[0].worker_id) < _MOST_CALLS]
        if avoid:
            found = [pair for pair in found if pair[0].worker_id not in avoid] or found
        if not found:
            return None
        if tried and not self.takes_retry(cause):
            return None
        return self.queue.router.choose(view, found, self.fleet.workers).worker

    def choose_prefill(
        self, need: CapacityNeed, view: View, tried: list[str]
    ) -> FleetWorker | None:
        """Return another upstream for a prompt, or None without an upstream or budget.

        Args:
            need: the capacity that the request needs.
            tried: ids of upstreams that have failed.
        """
        found = [
            (worker, worker.usage)
            for worker in self._open(need.offer)
            if worker.role is Role.PREFILL and worker.worker_id not in tried
        ]
        found = [pair for pair in found if has_capacity(pair[1], need)]
        if not found or not self.takes_retry(RetryCause.FAILED):
            return None
        return self.queue.router.choose(view, found, self.fleet.workers).worker

    def first_of(self, model: str, view: View) -> FleetWorker:
        """Return an upstream for a request that generates nothing.

        Raises:
            GatewayError: none is open.
        """
        worker = self.choose(model, None, frozenset(), view, [])
        if worker is None:
            raise self.no_upstream(model)
        return worker

    def takes_retry(self, cause: RetryCause) -> bool:
        """Return whether the budget allows a retry now, and count the retry if so."""
        allowed = self.budget.take_retry(self.queue.now_s())
        self._on_retry(cause, allowed)
        return allowed

    async def turn(
        self,
        entry: Entry,
        avoid: frozenset[str],
        view: View,
        span: Span,
        place: PreemptibleRequest | None = None,
    ) -> Routed:
        """Wait until an upstream has capacity for an admitted request, and reserve it.

        Args:
            place: the place that the request has in the queue, or None for a new one.

        Raises:
            GatewayError: no upstream has.
        """
        waiting = self.admission.waiting(entry, 0) if place is None else place.waiting
        waiting.request_id, waiting.avoid = entry.request_id, avoid
        model = entry.needs[0].offer
        with span.child("queue"):
            try:
                routed = await self._routed(waiting, model, view)
            except BackendFailed as error:
                raise self.no_upstream(model) from error
        record_route(span, routed)
        return routed

    async def _routed(self, waiting: Waiting, model: str, view: View) -> Routed:
        """Wait for the turn of a request, and before for a server of its model if none runs.

        Raises:
            GatewayError, BackendFailed: as `turn`.
        """
        begins_out, timeout_s = self.may_start(model), self.rules.start_timeout_s
        if begins_out:
            waiting.wait_for_start(timeout_s)
            for worker in self.fleet.workers:
                if worker.offers(model):
                    upstream: Upstream = worker.backend  # type: ignore[assignment]
                    upstream.await_start(timeout_s, self.queue.dispatch_waiting)
        try:
            return await self.queue.turn(waiting, view)
        except QueueTimeout:
            if self.may_start(model):
                raise self.no_upstream(model) from None
            if not begins_out:
                raise
        waiting.since_s = waiting.timeout_s = None  # a server has started, which is full
        return await self.queue.turn(waiting, view)

    def may_start(self, model: str) -> bool:
        """Return whether requests for a model wait for a server, because none responds now."""
        if not self.rules.start_timeout_s or self.fleet.serving_with(model):
            return False
        return any(worker.offers(model) for worker in self.fleet.workers)

    def headers(
        self,
        worker: FleetWorker,
        pool: PoolDecision | None,
        fallback: Fallback | None,
        prefilled_by: str,
    ) -> Mapping[str, str]:
        """Return the headers of a response that say how its upstream was chosen.

        Args:
            prefilled_by: id of the upstream that has computed the prompt for it, or empty.
        """
        found: dict[str, str] = {}
        if len(self.fleet.workers) > 1:
            found[UPSTREAM_HEADER] = worker.worker_id
        if prefilled_by:
            found[PREFILL_HEADER] = prefilled_by
        if pool is not None:
            found.update(pool.headers(worker))
        if fallback is not None:
            found[FALLBACK_HEADER] = fallback.reason
            found[MODEL_HEADER] = fallback.model.encode("ascii", "replace").decode()
        return found

    def route_view(
        self, entry: Entry | None, request: RequestView, prompt: ForwardedPrompt | None, path: str
    ) -> RouteView:
        """Return a routing policy's view of a request with what is known of its prompt.

        Args:
            entry: None if the request generates nothing.
            path: the endpoint of the request, with its query.
        """
        if entry is None:
            return RouteView(request, 0, 0.0)
        need = entry.needs[0]
        tokens = need.most_tokens, entry.expected_tokens
        view = RouteView(request, *tokens, need.sequences, entry.tenant, offer=need.offer)
        if self.queue.router.separates:
            view = replace(view, may_separate=path.partition("?")[0] in SEPARABLE)
        return view if prompt is None else self.prefixes.add_to(view, prompt, self.fleet.workers)

    def call_for(self, model: str, call: UpstreamCall) -> UpstreamCall:
        """Return a call for another model."""
        return self.changed_call(call, with_values(call.body, {"model": model}), model)

    def changed_call(self, call: UpstreamCall, body: bytes, model: str) -> UpstreamCall:
        """Return a call with another body, also for upstreams with another name of its model."""
        names = self.fleet.upstream_models.own_names(model)
        renamed = {name: with_values(body, {"model": name}) for name in names}
        return call._replace(body=body, model=model, renamed=renamed)

    def keep(
        self,
        call: UpstreamCall,
        entry: Entry,
        worker: FleetWorker,
        watch: Watch,
        place: PreemptibleRequest | None,
    ) -> KeptStream | None:
        """Keep the stream that an upstream sends, or return None if none could continue it.

        An upstream that may lose a stream to another request can continue it itself.
        """
        if (len(self.fleet.workers) < 2 and place is None) or not self.rules.keeps(call):
            return None
        kept = KeptStream(self, call, entry, worker, watch)
        if place is not None:
            place.kept = kept
        return kept

    def is_offered(self, model: str) -> bool:
        """Return whether an upstream may have a model."""
        return any(one.offers(model) for one in self.fleet.workers)

    def no_upstream(self, model: str) -> GatewayError:
        """Return the error for a request without an available upstream."""
        if model in self.fallbacks and not self.is_offered(model):
            return ModelNotFound(model, *self.fallbacks[model])
        retry_after_s = self.retry_after_s(model)
        pauses = self._pauses(model)
        if all(pause is not None and pause.denied for pause in pauses):
            return denied_access(next(pause.denied for pause in pauses if pause is not None))
        if any(pause is not None and pause.status == UNAVAILABLE for pause in pauses):
            problem = "no upstream is available"
            if model and not self.fleet.upstream_models.is_declared(model):
                problem = (
                    f"no upstream that has sent its models has {model!r}, and another one is down"
                )
            return UpstreamUnavailable(problem, retry_after_s=retry_after_s)
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
