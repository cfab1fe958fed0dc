"""Flows: requests that name a flow get a share of the flow's remaining time.

The first hop of a flow is refused if the flow would miss its deadline. Later hops of an admitted
flow are not refused by prediction. `SETTLE_S` after the deadline, the gateway of the first hop
takes the flow out of the store, counts its outcome, and learns the lengths of its hops.

Requests without a flow never reach this module, so they cost no call of the store.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Final, TypeAlias

from draftgate.gateway.dispatch.admission import (
    MOST_RETRY_S,
    AdmissionController,
    Entry,
)
from draftgate.gateway.dispatch.job import FlowTag
from draftgate.gateway.dispatch.promised_work import PromisedWork
from draftgate.gateway.errors import Overloaded, TooMany
from draftgate.gateway.state.commands import BeginHop, CancelFlow, EndHop, TakeFlow
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import FlowHop, FlowKey, HopArrival, HopLengths
from draftgate.policies.admission.types import AdmissionView
from draftgate.policies.flows.division import (
    LEAST_HOP_S,
    divide,
    judged,
    refuse_flow,
    targets,
)
from draftgate.policies.flows.history import FlowHistory
from draftgate.policies.flows.outcome import FlowOutcome, judge_flow
from draftgate.policies.flows.types import Division, HopForecast
from draftgate.policies.types import ANYTIME, ServiceLevel
from draftgate.policies.values import immutable

SETTLE_S: Final = 5.0
"""Seconds from the deadline of a flow to its end.

A hop that arrives in this time still belongs to the flow, which has then missed its deadline. The
history learns from the flow only then. (Chosen, not tuned.)"""


FOLLOW_S: Final = 1.0
"""Seconds after the end of a hop, in addition to the usual gaps, for which its gateway expects the
next hop. A later hop, or one at another gateway, was not needed here. (Chosen, not tuned.)"""


@immutable
class HopJoined:
    """A request named a flow.

    Attributes:
        number: the number of the hop, or None if the request names no known flow.
    """

    number: int | None


@immutable
class HopEnded:
    """A hop ended, after a share of the whole time of its flow."""

    number: int
    share: float


FlowEvent: TypeAlias = HopJoined | HopEnded | FlowOutcome
"""What happens to a flow, whose outcome is its last event."""


def _ignore(_: FlowEvent) -> None:
    """Ignore an event."""


@dataclass(slots=True, eq=False)
class Hop:
    """A request in its flow.

    Attributes:
        key: name of the flow.
        tag: what the request says about the flow.
        place: the place of the request in the flow.
        service: the latency targets of the request, with those of its budget once it has one.
        division: its part of the remaining time, or None before its admission and after the
            deadline.
        started_s: time at which its first prompt got a worker, or None before.
    """

    key: FlowKey
    tag: FlowTag
    place: FlowHop
    service: ServiceLevel = ANYTIME
    division: Division | None = None
    started_s: float | None = None

    @property
    def is_first(self) -> bool:
        """Whether the request begins its flow."""
        return self.place.number == 1

    def start(self) -> None:
        """Record that a prompt has got a worker."""
        if self.started_s is None:
            self.started_s = asyncio.get_running_loop().time()


class Flows:
    """The flows whose requests this gateway serves, on any of its models.

    Use the object only on the thread of the event loop.

    Attributes:
        history: the hops of earlier flows.
        watch: a function that takes their events, and returns at once.
    """

    def __init__(self, store: Store, now_s: Callable[[], float]) -> None:
        """Start without flows.

        Args:
            now_s: the clock of `FlowTag.arrived_s`.
        """
        self.history = FlowHistory()
        self.watch: Callable[[FlowEvent], None] = _ignore
        self._store = store
        self._now_s = now_s
        self._promised = defaultdict[str, PromisedWork](PromisedWork)  # by model
        self._settling: set[asyncio.TimerHandle | asyncio.Task[None]] = set()

    async def begin(self, tenant: str, tag: FlowTag) -> Hop | None:
        """Add a request to its flow, and return its place, or None for an ordinary request."""
        key = FlowKey(tenant, tag.flow_id)
        ago_s = max(self._now_s() - tag.arrived_s, 0.0)
        arrival = HopArrival(tag.kind, ago_s, tag.deadline_s)
        place = await self._store.call(BeginHop(key, arrival))
        self.watch(HopJoined(None if place is None else place.number))
        return None if place is None else Hop(key, tag, place)

    def divide(self, hop: Hop, request: Entry, admission: AdmissionController) -> ServiceLevel:
        """Set the division and the service level of a hop.

        A hop after the deadline keeps the service level of its request.

        Args:
            admission: the admission of the hop's model, which predicts waits. The waits of later
                hops on other models are unknown.

        Returns:
            The targets by which admission decides about the hop.

        Raises:
            Overloaded: the hop is the first one, and the flow cannot end in time.
        """
        remaining_s = hop.place.remaining_s
        hop.service, anytime = request.service, ServiceLevel(priority=request.service.priority)
        if remaining_s <= 0.0 and not hop.is_first:
            return anytime
        remaining_s = max(remaining_s, LEAST_HOP_S)
        view, _ = admission.outlook(request)
        pool, place = view.pool, (hop.key.tenant, hop.place.number, hop.tag.kind)
        own = _own_forecast(self.history.own(*place), request, view)
        later = self.history.later(*place)
        # The wait depends on the deadline of the hop, which depends on the wait. Two rounds do.
        unloaded = targets(divide(remaining_s, own, later, pool.speed), own, pool.speed, anytime)
        urgent = request.with_targets(unloaded)
        _, predicted = admission.outlook(urgent)
        promised_s = self._promised[hop.tag.kind.model].others_s(hop.key, self._now_s())
        _, with_promised = admission.outlook(urgent, promised_s)
        returns = any(not one.elsewhere for one in later)
        later_wait_s = with_promised.wait_s - predicted.wait_s if returns else 0.0
        division = divide(remaining_s, own, later, pool.speed, predicted.wait_s, later_wait_s)
        hop.division = division
        hop.service = hop.tag.capped(targets(division, own, pool.speed, request.service))
        if not hop.is_first:
            return anytime
        refused = refuse_flow(remaining_s, division, own, later, pool, predicted.grain_s)
        if refused is not None:
            retry_s = min(refused.retry_after_s, MOST_RETRY_S)
            raise Overloaded(refused.reason, retry_s, refused.kind)
        return judged(remaining_s, division, own, pool.speed, request.service)

    def admitted(self, hop: Hop) -> None:
        """Record that a hop may run."""
        if hop.is_first:
            self._settle_later(hop)
        until_s = self._now_s() + max(hop.place.remaining_s, 0.0)
        later_s = 0.0 if hop.division is None else hop.division.later_here_s
        self._promised[hop.tag.kind.model].put(hop.key, later_s, until_s)

    async def end(self, hop: Hop, entry: Entry) -> None:
        """Record that the response of a hop has ended."""
        now_s = self._now_s()
        if hop.division is not None:
            until_s = now_s + hop.division.gaps_s + FOLLOW_S
            self._promised[hop.tag.kind.model].shorten(hop.key, until_s)
        sequences = entry.sequences
        started_s = now_s if hop.started_s is None else hop.started_s
        lengths = HopLengths(
            entry.prompt_tokens, entry.output_tokens // sequences, now_s - started_s
        )
        share = (now_s - hop.tag.arrived_s) / hop.place.deadline_s
        self.watch(HopEnded(hop.place.number, share))
        await self._store.call(EndHop(hop.key, hop.place, lengths))

    async def fail(self, hop: Hop, error: BaseException) -> None:
        """Record that a hop was refused or has failed.

        A flow whose first hop is refused has not begun, so the client may send it again with the
        whole time. Any other hop just has no end.
        """
        if not hop.is_first:
            return
        if not await self._store.call(CancelFlow(hop.key, hop.place)):
            self._settle_later(hop)  # another hop has arrived in the meantime
        elif isinstance(error, TooMany):
            self.watch(FlowOutcome.REFUSED)

    def close(self) -> None:
        """Settle no more flows."""
        for waiting in self._settling:
            waiting.cancel()
        self._settling.clear()

    def _settle_later(self, hop: Hop) -> None:
        """Settle the flow of a hop `SETTLE_S` after its deadline."""

        def settle() -> None:
            self._settling.discard(timer)
            task = asyncio.create_task(self._settle(hop))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

        delay_s = max(hop.place.remaining_s, 0.0) + SETTLE_S
        # An empty context keeps request ids out of the log lines.
        timer = asyncio.get_running_loop().call_later(delay_s, settle, context=Context())
        self._settling.add(timer)

    async def _settle(self, hop: Hop) -> None:
        """End a flow, count its outcome, and learn from it."""
        hops = await self._store.call(TakeFlow(hop.key, hop.place))
        if not hops:  # the store has lost the flow
            return
        self.watch(judge_flow(hops, hop.place.deadline_s))
        ended = [one for one in hops if one.ended_s is not None]
        self.history.add_flow(hop.key.tenant, ended)


def _own_forecast(known: HopForecast | None, request: Entry, view: AdmissionView) -> HopForecast:
    """Return the expected lengths of a hop that has arrived.

    Args:
        known: the lengths of such hops in earlier flows, or None if unknown.
        view: the view of admission, which predicts the output of a tenant's requests in general.
    """
    output, service_s = view.output_tokens, 0.0
    if known is not None:
        output, service_s = min(known.output_tokens, request.max_tokens), known.service_s
    return HopForecast(1.0, view.prompt_tokens, output, service_s, 0.0)
