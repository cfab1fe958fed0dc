"""Admission, which checks quotas and deadlines before a request is queued.

The policies decide. A rejected request gets the time after which to retry. An admitted request
reserves the maximum number of tokens that it may use, at the latest together with its lease. When
the request ends, the used tokens are charged and the rest is released.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Final

from draftgate.gateway.dispatch.pool_totals import PoolReader
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.dispatch.waiting import Waiting
from draftgate.gateway.errors import GatewayError, InvalidRequest, Overloaded, QuotaExceeded
from draftgate.gateway.fleet import Fleet
from draftgate.policies.admission.output_history import OutputHistory
from draftgate.policies.admission.types import AdmissionView, Admitted, QueueView, Refused
from draftgate.policies.admission.wait_forecast import WaitForecast, admit, forecast_wait, work_s
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.protocols import AdmissionPolicy
from draftgate.policies.quotas import Limit, QuotaReservation, Shortage
from draftgate.policies.types import ANYTIME, ServiceLevel, Ticket
from draftgate.policies.values import immutable, replace

_NOT_ADMITTED: Final = Admitted(0.0, 0.0, 0.0, ANYTIME, "")


class Entry:
    """A request at admission, and its accounting once it is admitted.

    A job is its own entry (`run.Run`).

    Attributes:
        needs: the capacity that each of its prompts needs. At least one prompt is required.
        max_tokens: the output limit of each sequence.
        service: the latency targets and priority of the request.
        tenant, share: its owner, and the owner's share relative to the default of 1.
        fingerprint: a hash that is equal for a retry of the same request.
        retries: the number of earlier attempts that the client reports, or None.
        shown_id: the `x-request-id` of its response, which decisions have, or empty for its own id.
        judged: the targets and the priority by which admission decides, or None for those of the
            service. The ticket has the deadline of the service.
        continues: whether the request continues an admitted flow, and so is not refused by
            prediction. It has no targets in `judged`.
        predicted: the forecast of the admission policy.
        since_s: time of its admission.
        expected_tokens: expected output tokens of each sequence.
        ticket_s: work of each prompt for its ticket (`AdmissionController._pool_scale`).
        quota: what the request has to reserve together with its lease, or None.
        prompt_tokens: tokens of the prompts that went to a worker.
        answered_s: time of its first delta, or None before.
        output_tokens: number of generated tokens.
        ended: number of its sequences that ended by themselves or at their limit.
    """

    shown_id = ""
    judged: ServiceLevel | None = None
    continues = False
    predicted = _NOT_ADMITTED  # this and the next attributes once it is admitted
    since_s = expected_tokens = ticket_s = 0.0
    quota: QuotaReservation | None = None
    prompt_tokens = output_tokens = ended = 0
    answered_s: float | None = None

    def __init__(
        self,
        request_id: str,
        needs: tuple[CapacityNeed, ...],
        max_tokens: int,
        service: ServiceLevel = ANYTIME,
        tenant: str = "",
        share: float = 1.0,
        fingerprint: int = 0,
        retries: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.needs = needs
        self.sequences = needs[0].sequences if needs else 0
        self.max_tokens = max_tokens
        self.service = service
        self.tenant = tenant
        self.share = share
        self.fingerprint = fingerprint
        self.retries = retries

    @property
    def decision_id(self) -> str:
        """The id of its decisions, which is that of its response if clients see one."""
        return self.shown_id or self.request_id

    def with_targets(self, service: ServiceLevel) -> Entry:
        """Return a new request with other targets, for a forecast."""
        return Entry(
            self.request_id,
            self.needs,
            self.max_tokens,
            service,
            self.tenant,
            self.share,
            self.fingerprint,
            self.retries,
        )

    def use(self, needs: tuple[CapacityNeed, ...]) -> None:
        """Set the capacity that several prompts need."""
        self.needs = needs
        self.sequences = sum([one.sequences for one in needs])


@immutable
class Bounds:
    """Bounds of the queue.

    Attributes:
        most: maximum number of waiting prompts.
        timeout_s: the longest wait, in seconds.
        shed_priority: the most urgent priority that is rejected while other requests wait, or None
            to reject none.
    """

    most: int = 1024
    timeout_s: float = 60.0
    shed_priority: int | None = None


DEFAULT_BOUNDS: Final = Bounds()

_UNLIMITED_S: Final = 1e9
"""The longest wait in the forecast for a request that continues a flow. It is finite, because
policies calculate with it."""

MOST_RETRY_S: Final = 3600.0
"""The longest Retry-After, in seconds.

Clients would interpret a longer delay as an outage, and a longer forecast depends on requests that
have not arrived yet. A client that returns too early is rejected again."""


class AdmissionController:
    """The admission of requests and the accounting of their tokens.

    Use the object only on the thread of the event loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: CentralQueue,
        policy: AdmissionPolicy,
        quotas: Quotas,
        bounds: Bounds,
        now_s: Callable[[], float],
        on_refusal: Callable[[], None] | None = None,
    ) -> None:
        """Control admission to a queue.

        Args:
            now_s: the clock of the queue's tickets.
            on_refusal: a callback for each request that the policy refuses, or None.
        """
        self.quotas = quotas
        self._pool = PoolReader(fleet, now_s)
        self._queue = queue
        self._policy = policy
        self._bounds = bounds
        self._now_s = now_s
        self._on_refusal = on_refusal
        self._outputs = OutputHistory()
        self._keys = count()
        self._ticket_sequences = 0
        self._empty_queue = QueueView(capacity=bounds.most)

    def admit_now(self, request: Entry) -> bool:
        """Admit a request that will reserve its quota together with its lease (`Entry.quota`).

        Returns:
            False if the request has to reserve its quota first, with `admit`.

        Raises:
            Overloaded: the request is rejected for now. The error has the retry time.
        """
        quota = self._needed_quota(request)
        if quota is not None and not self._may_start(request):
            return False
        self._decide(request, quota)
        return True

    def admit_at_once(self, request: Entry) -> bool:
        """Admit a request as `admit` does, or return False if the store may have to be awaited."""
        quota = self._needed_quota(request) if request.tenant in self.quotas.limited else None
        if quota is not None:
            if not self.quotas.are_local:
                return False
            shortage = self.quotas.reserve_at_once(quota)
            if shortage is not None:
                raise _quota_error(shortage, request)
        self._decide(request, None)
        return True

    async def admit(self, request: Entry) -> None:
        """Reserve the quota of a request, and admit it. The caller reports its end with `settle`.

        Raises:
            InvalidRequest: the request can never fit into its quota.
            QuotaExceeded, Overloaded: the request is rejected for now. The error has the retry
                time.
        """
        quota = self._needed_quota(request)
        if quota is not None:
            shortage = await self.quotas.reserve(quota)
            if shortage is not None:
                raise _quota_error(shortage, request)
        self._decide(request, None)

    def _needed_quota(self, request: Entry) -> QuotaReservation | None:
        needs = request.needs
        several = len(needs) > 1
        tokens = sum([need.most_tokens for need in needs]) if several else needs[0].most_tokens
        return self.quotas.needed(request.tenant, request.request_id, tokens)

    def _decide(self, request: Entry, quota: QuotaReservation | None) -> None:
        """Decide about a request.

        Args:
            quota: what it still has to reserve.
        """
        try:
            now_s = self._now_s()
            view = self._view(request, now_s)
            if not request.service.is_offline:
                decision = self._policy.decide(view, now_s)
            else:  # no client waits for it, and it delays no other
                decision = replace(admit(view, forecast_wait(view)), work_s=0.0)
            if isinstance(decision, Refused):
                refused = self._refusal(decision)
                raise Overloaded(refused.reason, refused.retry_after_s, refused.kind)
            request.predicted, request.since_s, request.quota = decision, now_s, quota
            request.expected_tokens = view.output_tokens
            request.ticket_s = decision.work_s / self._pool_scale() / len(request.needs)
        except BaseException:  # policies can be third-party code
            self.quotas.release(request.request_id)
            raise

    def outlook(
        self, request: Entry, promised_s: float = 0.0
    ) -> tuple[AdmissionView, WaitForecast]:
        """Return the policy's view of a request, and its predicted wait, without a decision.

        Args:
            promised_s: residence of sequences that will arrive ahead of the request, in seconds.
        """
        view = self._view(request, self._now_s())
        if promised_s and view.pool.max_sequences:
            more_s = promised_s / view.pool.max_sequences / view.pool.share
            queue = view.queue
            queue = replace(
                queue,
                work_s=queue.work_s + more_s,
                ahead_s=queue.ahead_s + more_s,
                place_s=queue.place_s + more_s,
                class_s=queue.class_s + more_s,
            )
            view = replace(view, queue=queue)
        return view, forecast_wait(view)

    def waiting(self, entry: Entry, index: int) -> Waiting:
        """Return the queue entry of a prompt, with a ticket of the current time."""
        waiting = Waiting(
            next(self._keys),
            self._now_s(),
            self._deadline_s(entry, entry.since_s),
            entry.service.priority,
            entry.tenant,
            entry.share,
            entry.ticket_s,
            request_id=f"{entry.request_id}-{index}",
            need=entry.needs[index],
            reconsider=partial(self._reconsider, entry),
        )
        if entry.service.is_offline:
            waiting.wait_offline()
        return waiting

    def record_quota(self, entry: Entry, shortage: Shortage | None) -> None:
        """Record the result of a call that reserved the quota of a request with its lease.

        Raises:
            InvalidRequest, QuotaExceeded: the quota is too small, as for `admit`.
        """
        quota, entry.quota = entry.quota, None
        if quota is not None:
            self.quotas.record(quota, shortage)
            if shortage is not None:
                raise _quota_error(shortage, entry)

    def answered(self, entry: Entry) -> None:
        """Report the first delta of a request to the policy.

        First deltas of further prompts have no effect.
        """
        if entry.answered_s is None:
            entry.answered_s = self._now_s()
            if not entry.service.is_offline:
                self._policy.learn(entry.predicted, entry.answered_s - entry.since_s)

    def settle(self, entry: Entry) -> None:
        """Charge the tokens that a request used, and release the other reserved tokens.

        The length of a completed request also improves the forecast.
        """
        self.quotas.settle(entry.request_id, entry.prompt_tokens + entry.output_tokens)
        if entry.ended == entry.sequences:
            self._outputs.add_sequence(
                entry.tenant, entry.output_tokens // entry.ended, entry.max_tokens
            )

    def _reconsider(self, request: Entry, ticket: Ticket, waited_s: float) -> Refused | None:
        """Return the refusal of a waiting request that would wait too long, or None to keep it."""
        now_s = self._now_s()
        view = self._view(request, now_s, ticket)
        refused = self._policy.reconsider(view, waited_s, now_s)
        return refused and self._refusal(refused)

    def _refusal(self, refused: Refused) -> Refused:
        """Return a refusal whose delay is at most `MOST_RETRY_S`."""
        if self._on_refusal is not None:
            self._on_refusal()
        return replace(refused, retry_after_s=min(refused.retry_after_s, MOST_RETRY_S))

    def _may_start(self, request: Entry) -> bool:
        """Return whether a request may reserve its quota with its lease instead of beforehand.

        The request must get a worker at once, so that a tenant that exceeds its quota neither waits
        nor counts in the forecasts of others. It must have one prompt, because several prompts
        would reserve their quota in several calls.
        """
        first, *others = request.needs
        return not (others or self.quotas.is_short(request.tenant)) and self._queue.has_room(first)

    def _view(self, request: Entry, now_s: float, ticket: Ticket | None = None) -> AdmissionView:
        """Return the policy's view of a request, the workers and the queue.

        Args:
            ticket: the ticket of a request that waits, or None for a new request.
        """
        bounds = self._bounds
        service = request.service if request.judged is None else request.judged
        max_wait_s, least = bounds.timeout_s, bounds.shed_priority
        sheddable = least is not None and service.priority >= least
        if request.continues:
            max_wait_s, sheddable = _UNLIMITED_S, False
        needs, sequences = request.needs, request.sequences
        several = len(needs) > 1
        prompt_tokens = sum([n.prompt_tokens for n in needs]) if several else needs[0].prompt_tokens
        expected = request.service.expected_tokens
        if expected is None:
            output_tokens = self._outputs.expected_tokens(request.tenant, request.max_tokens)
        else:
            output_tokens = float(min(expected, request.max_tokens))
        pool = self._pool.view(prompt_tokens / len(needs) + output_tokens)
        if ticket is None and self._queue.places:
            own_s = work_s(pool, prompt_tokens, sequences * output_tokens)
            ticket = Ticket(
                next(self._keys),
                now_s,
                self._deadline_s(request, now_s),
                request.service.priority,
                request.tenant,
                request.share,
                own_s / self._pool_scale(),
            )
        return AdmissionView(
            request.fingerprint,
            prompt_tokens,
            output_tokens,
            max_wait_s,
            sequences,
            service,
            request.tenant,
            request.share,
            sheddable,
            request.retries,
            pool,
            self._empty_queue
            if ticket is None
            else self._queue_view(ticket, now_s, self._pool_scale() / pool.share),
        )

    def _queue_view(self, ticket: Ticket, now_s: float, scale: float) -> QueueView:
        """Return the queue as seen by a request.

        Args:
            scale: seconds of the pool for each second of the tickets' work.
        """
        queue, ordering = self._queue, self._queue.ordering
        undated = dataclasses.replace(ticket, deadline_s=math.inf)
        return QueueView(
            length=len(queue),
            capacity=self._bounds.most,
            tenant_length=ordering.queued_of(ticket.tenant),
            work_s=ordering.work_s * scale,
            ahead_s=ordering.ahead_s(ticket, now_s) * scale,
            place_s=ordering.ahead_s(undated, now_s) * scale,
            prompt_tokens=queue.prompt_tokens,
            class_s=ordering.class_ahead_s(ticket) * scale,
        )

    def _pool_scale(self) -> float:
        """Return how many seconds the pool now takes for a second of the tickets' work.

        Tickets keep the work of their admission. The work takes longer if the pool has lost workers
        since the first waiting request was admitted.
        """
        sequences = self._pool.max_sequences
        if not (self._queue.places and self._ticket_sequences and sequences):
            self._ticket_sequences = sequences
            return 1.0
        return self._ticket_sequences / sequences

    def _deadline_s(self, request: Entry, since_s: float) -> float:
        """Return the latest time at which a request should start.

        Args:
            since_s: time of its admission, when its target starts.
        """
        target_s = request.service.ttft_s
        return since_s + (self._bounds.timeout_s if target_s is None else target_s)


def _quota_error(shortage: Shortage, request: Entry) -> GatewayError:
    """Return the error for a request that its quota does not allow."""
    what, most = map(Limit(shortage.limit).counted, (shortage.requested, shortage.most))
    if shortage.retry_after_s is None:
        return InvalidRequest(
            f"the request may use {what}, but the key's quota never exceeds {shortage.most}",
            "max_tokens" if request.max_tokens else "prompt",
        )
    return QuotaExceeded(
        f"the key's quota allows {most} at once, and {what} will fit in "
        f"{shortage.retry_after_s:.1f} s",
        shortage.retry_after_s,
        f"quota_{shortage.limit}",
    )
