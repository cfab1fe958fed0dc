"""What admission may see, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from draftgate.policies.types import ANYTIME, UNKNOWN_SPEED, ServiceLevel, WorkerSpeed


@dataclass(frozen=True, slots=True)
class PoolView:
    """The workers that a request may go to, taken together (`wait_forecast.pool_of`).

    Attributes:
        workers: how many there are.
        max_sequences: sequences that can run at once; 0 if unknown. Fewer than the workers' own
            where KV memory or TPOT targets allow no more.
        running: sequences that run or wait on the workers.
        prompt_tokens: prompt tokens on the workers that are still to be computed.
        speed: what their steps take, on average.
    """

    workers: int = 1
    max_sequences: float = 0.0
    running: int = 0
    prompt_tokens: int = 0
    speed: WorkerSpeed = UNKNOWN_SPEED


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queue, as the request that asks would find it.

    Attributes:
        length, capacity: requests that wait, and the most that may.
        tenant_length: those of its tenant.
        work_s: seconds of the pool that all of them take.
        ahead_s: of these, what would start before the request (`OrderingPolicy.ahead_s`).
        place_s: the same if it had no deadline: its place in the line, not counting that it is
            let past those who have more time.
        prompt_tokens: their prompt tokens.
        class_s: of `ahead_s`, what is of the request's own class.
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
    """A request that asks to be let in, and what it meets.

    Attributes:
        fingerprint: 64 bits over its tenant and body, by which it is known when it comes back.
        prompt_tokens: of all its prompts.
        output_tokens: that are expected of a sequence (`OutputHistory`).
        sequences: how many it makes.
        max_wait_s: seconds it may wait if it has no target for its first token.
        service: how soon its tokens are wanted, and how much they matter.
        tenant, share: whose it is, and that tenant's weight.
        sheddable: the first to go when there is no room.
        retries: how often its client says to have tried before; None where it does not say.
        pool, queue: what it meets.
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
        wait_s: seconds that it is expected to wait.
        ttft_s: seconds to its first token: the wait, and those that its prompt takes.
        work_s: seconds of the whole pool that it takes, for its `Ticket`.
        service: what it asked for.
        reason: in words.
    """

    wait_s: float
    ttft_s: float
    work_s: float
    service: ServiceLevel
    reason: str


class RefusalKind(StrEnum):
    """What stood against a request."""

    QUEUE_FULL = "queue_full"
    """No place to wait, or none for its tenant."""
    DEADLINE = "deadline"
    """Its first token would come too late."""
    TPOT = "tpot"
    """Its tokens would come too slowly."""
    SHED = "shed"
    """It may be shed, and others wait."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request may not wait; it may come back.

    Attributes:
        retry_after_s: seconds after which it will be let in, as far as can be told.
        kind: what stood against it.
        reason: in words that a client can use: what was predicted, what was asked for.
    """

    retry_after_s: float
    kind: RefusalKind
    reason: str
