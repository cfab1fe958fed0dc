"""What an admission policy sees, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from draftgate.policies.types import ANYTIME, UNKNOWN_SPEED, ServiceLevel, WorkerSpeed


@dataclass(frozen=True, slots=True)
class PoolView:
    """The workers that a request may go to, taken together (`wait_forecast.pool_of`).

    Attributes:
        workers: number of workers.
        max_sequences: sequences that can run at once; 0 if unknown. Fewer than the workers' own
            limits if KV memory or TPOT targets allow no more.
        running: sequences that run or wait on the workers.
        prompt_tokens: prompt tokens on the workers that are still to be computed.
        speed: mean speed of the workers.
    """

    workers: int = 1
    max_sequences: float = 0.0
    running: int = 0
    prompt_tokens: int = 0
    speed: WorkerSpeed = UNKNOWN_SPEED


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queue, as a new request finds it.

    Attributes:
        length, capacity: waiting requests, and the most that may wait.
        tenant_length: waiting requests of its tenant.
        work_s: seconds of the pool that all waiting requests take.
        ahead_s: the part of that which would start before the request (`OrderingPolicy.ahead_s`).
        place_s: the same if the request had no deadline to overtake others with.
        prompt_tokens: prompt tokens of the waiting requests.
        class_s: the part of `ahead_s` in the request's own class.
    """

    length: int = 0
    capacity: int = 1024
    tenant_length: int = 0
    work_s: float = 0.0
    ahead_s: float = 0.0
    place_s: float = 0.0
    prompt_tokens: int = 0
    class_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """A request that asks for admission, the pool and the queue.

    Attributes:
        fingerprint: 64 bits over its tenant and body, by which it is recognised when it returns;
            0 if it cannot be.
        prompt_tokens: tokens of all its prompts.
        output_tokens: expected output tokens of each sequence (`OutputHistory`).
        max_wait_s: seconds that it may wait without a TTFT target.
        sequences: its choices over all prompts.
        service: its targets and priority.
        tenant, share: its tenant, and the tenant's weight.
        sheddable: whether it is refused first if capacity runs short.
        retries: how often its client has tried before, if it says so.
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


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may wait.

    Attributes:
        wait_s: predicted wait.
        ttft_s: predicted time to first token: the wait and its own prompt.
        work_s: seconds of the whole pool that it takes, for its `Ticket`.
        service: its targets and priority.
        reason: the decision in words.
    """

    wait_s: float
    ttft_s: float
    work_s: float
    service: ServiceLevel
    reason: str


class RefusalKind(StrEnum):
    """Why a request was refused."""

    QUEUE_FULL = "queue_full"
    """The queue has no place for it, or none for its tenant."""
    DEADLINE = "deadline"
    """Its first token would be late."""
    TPOT = "tpot"
    """Its tokens would be too slow."""
    SHED = "shed"
    """It may be shed, and others wait."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request may not wait, but may return.

    Attributes:
        retry_after_s: seconds after which it will probably be admitted.
        kind: why it was refused.
        reason: the message for the client: what was predicted, and what was asked for.
    """

    retry_after_s: float
    kind: RefusalKind
    reason: str
