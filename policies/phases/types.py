"""The inputs and results of a phases policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from draftgate.policies.rescheduling.types import LinkBandwidth
from draftgate.policies.routing.types import Candidate, ScoredWorker
from draftgate.policies.types import Role
from draftgate.policies.values import immutable


@immutable
class PhaseWorker:
    """A worker that accepts requests.

    Attributes:
        candidate: its load and its part of the prompt, as for the routing policy.
        kv_format: format of its KV blocks. Workers exchange blocks if their formats are equal and
            not None.
        token_bytes: KV bytes of a token.
        has_capacity: whether it has capacity for the request now.
    """

    candidate: Candidate
    role: Role = Role.ANY
    kv_format: object = None
    token_bytes: int = 0
    has_capacity: bool = True

    @property
    def worker_id(self) -> str:
        """The id of the worker."""
        return self.candidate.worker_id

    def can_supply(self, other: PhaseWorker) -> bool:
        """Return whether another worker can continue a request with the blocks of this worker."""
        same = self.kv_format is not None and self.kv_format == other.kv_format
        return same and self.worker_id != other.worker_id


@immutable
class PhasePool:
    """The workers of a pool.

    Attributes:
        workers: the workers that accept requests, at least one with capacity, without repetition.
        link: the bandwidth between two of them.
        rivals: number of other gateways whose requests to these workers are unknown.
    """

    workers: tuple[PhaseWorker, ...]
    link: LinkBandwidth
    rivals: int = 0

    @property
    def usable(self) -> tuple[PhaseWorker, ...]:
        """The workers that have capacity for the request."""
        return tuple(worker for worker in self.workers if worker.has_capacity)


@immutable
class Together:
    """A request that stays on one worker, which the routing policy chooses.

    Attributes:
        worker_ids: the workers with capacity among which it chooses, at least one.
        reason: the decision in words.
    """

    worker_ids: tuple[str, ...]
    reason: str


@immutable
class Apart:
    """A request whose output is computed on another worker than its prompt.

    Attributes:
        prefill: the worker of the prompt, and then alternatives, best first (`Route.offers`).
        decode: the worker of the output, and then alternatives. None is the first of `prefill`.
        reason: the decision in words.
        gain_s: predicted seconds that all requests save, or 0 without a prediction.
        threshold_s: seconds that `gain_s` must exceed, or 0 without a prediction.
    """

    prefill: tuple[ScoredWorker, ...]
    decode: tuple[ScoredWorker, ...]
    reason: str
    gain_s: float = 0.0
    threshold_s: float = 0.0


PhaseChoice: TypeAlias = Together | Apart | None
"""The choice for a request, or None if the request waits for capacity on other workers."""


def of_role(workers: Sequence[PhaseWorker], role: Role) -> list[PhaseWorker]:
    """Return the workers for a phase, or all workers if none has its role or `any`."""
    return [one for one in workers if one.role in {role, Role.ANY}] or list(workers)


def suppliers(
    prefill: Sequence[PhaseWorker], decode: Sequence[PhaseWorker]
) -> Iterator[PhaseWorker]:
    """Yield the workers of the first phase that can supply a worker of the second phase."""
    return (one for one in prefill if any(map(one.can_supply, decode)))
