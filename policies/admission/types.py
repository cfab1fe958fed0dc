"""The inputs and results of an admission policy."""

from __future__ import annotations

from enum import StrEnum

from draftgate.policies.types import ANYTIME, UNKNOWN_SPEED, ServiceLevel, WorkerSpeed
from draftgate.policies.values import immutable


@immutable
class PoolView:
    """The workers that a request may use, as one pool (`wait_forecast.pool_of`).

    Attributes:
        workers: number of workers.
        max_sequences: maximum number of concurrent sequences, or 0 if it is unknown. This is less
            than the workers' own limits if KV memory or TPOT targets allow fewer sequences.
        running: number of sequences that run or wait on the workers.
        prompt_tokens: prompt tokens that the workers have not computed yet.
        speed: mean speed of the workers.
        share: this gateway's share of the sequences on the workers. The rest belongs to other
            gateways.
    """

    workers: int = 1
    max_sequences: float = 0.0
    running: int = 0
    prompt_tokens: int = 0
    speed: WorkerSpeed = UNKNOWN_SPEED
    share: float = 1.0


@immutable
class QueueView:
    """The queue of this gateway at the arrival of a request.

    Seconds of the pool include the work that other gateways' requests get meanwhile
    (`PoolView.share`).

    Attributes:
        length, capacity: number of waiting requests, and the maximum number.
        tenant_length: number of waiting requests of the same tenant.
        work_s: work of all waiting requests, in seconds of the pool.
        ahead_s: part of that work that would start before the request (`OrderingPolicy.ahead_s`).
        place_s: the same part if the request had no deadline.
        prompt_tokens: prompt tokens of the waiting requests.
        class_s: part of `ahead_s` in the request's own class.
    """

    length: int = 0
    capacity: int = 1024
    tenant_length: int = 0
    work_s: float = 0.0
    ahead_s: float = 0.0
    place_s: float = 0.0
    prompt_tokens: int = 0
    class_s: float = 0.0


@immutable
class AdmissionView:
    """A request that needs admission, with the pool and the queue.

    Attributes:
        fingerprint: 64-bit hash of the tenant and the body, which identifies the request when it
            returns, or 0.
        prompt_tokens: total tokens of its prompts.
        output_tokens: expected output tokens of each sequence (`OutputHistory`).
        max_wait_s: longest wait without a TTFT target, in seconds.
        sequences: number of choices over all prompts.
        service: latency targets and priority.
        tenant, share: tenant, and the tenant's weight.
        sheddable: whether the request is refused first when capacity is short.
        retries: number of earlier attempts that the client reports, or None.
    """

    fingerprint: int
    prompt_tokens: int
    output_tokens: float
    max_wait_s: float
    sequences: int = 1
    service: ServiceLevel = ANYTIME
    tenant: str = ""
    share: float = 1.0
    sheddable: bool = False
    retries: int | None = None
    pool: PoolView = PoolView()
    queue: QueueView = QueueView()


@immutable
class Admitted:
    """A request that may wait.

    Attributes:
        wait_s: predicted wait in seconds.
        ttft_s: predicted time to first token, in seconds.
        work_s: work of the request in seconds of the whole pool, for its `Ticket`.
        service: latency targets and priority.
        reason: the decision in words.
    """

    wait_s: float
    ttft_s: float
    work_s: float
    service: ServiceLevel
    reason: str


class RefusalKind(StrEnum):
    """The cause of a refusal."""

    QUEUE_FULL = "queue_full"
    """The queue has no free place for the request or its tenant."""
    DEADLINE = "deadline"
    """The first token would miss its deadline."""
    TPOT = "tpot"
    """The tokens would miss the TPOT target."""
    SHED = "shed"
    """The request is sheddable, and other requests wait."""
    FLOW = "flow"
    """The flow that the request begins would miss its deadline, even without waits."""


@immutable
class Refused:
    """A request that may not wait now, but may return.

    Attributes:
        retry_after_s: seconds after which the pool will probably admit the request.
        kind: cause of the refusal.
        reason: message for the client with the prediction and the limit.
    """

    retry_after_s: float
    kind: RefusalKind
    reason: str
