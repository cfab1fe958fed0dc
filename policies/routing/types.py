"""What a routing policy sees of a request and of the workers, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftgate.policies.capacity import WorkerUsage, active_sequences
from draftgate.policies.types import RequestView, WorkerLoad

Draw = Callable[[], float]
"""A source of randomness: uniform in [0, 1), independent from call to call."""


@dataclass(frozen=True, slots=True)
class RouteView:
    """A request that needs a worker.

    Attributes:
        request: its lengths, service level and the record of its tenant's drafts.
        most_tokens: prompt and output tokens of all its sequences, which a lease reserves.
        output_tokens: expected output tokens of each sequence.
        sequences: its choices.
        tenant: its tenant.
        block_hashes: hashes of the prompt's full KV blocks. Each covers all blocks before it and
            the tenant, so no two tenants share one. Empty if they were not computed.
        block_tokens: tokens of such a block.
    """

    request: RequestView
    most_tokens: int
    output_tokens: float
    sequences: int = 1
    tenant: str = ""
    block_hashes: Sequence[bytes] = ()
    block_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker with capacity for the request.

    Attributes:
        usage: its load, and the unfinished requests that this gateway sent there.
        sent_tokens: most prompt and output tokens of these requests.
        leased_tokens: prompt and output tokens of known requests that the load does not include.
        age_s: age of the load; 0 for a worker in this process.
        numerics_class: workers of one class generate identical texts; None without that promise.
        own: whether the worker belongs to this process.
    """

    worker_id: str
    usage: WorkerUsage
    sent_tokens: int = 0
    leased_tokens: int = 0
    age_s: float = 0.0
    numerics_class: str | None = None
    own: bool = True

    @property
    def load(self) -> WorkerLoad:
        """The load that the worker reports."""
        return self.usage.load

    @property
    def sequences(self) -> int:
        """Sequences on the worker: those that this gateway sent, or more if it reports more."""
        return max(active_sequences(self.usage), self.load.running + self.load.waiting)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens ahead of a new request, by the larger count likewise."""
        return max(self.load.prompt_tokens, self.usage.unstarted_prompt_tokens)

    @property
    def tokens(self) -> int:
        """Tokens on the worker without leases: those sent there, or those in its memory.

        The larger of the two: the first includes tokens still to come, the second other gateways'.
        """
        load = self.load
        return max(
            self.sent_tokens, (load.kv_blocks_total - load.kv_blocks_free) * load.kv_block_tokens
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """The workers that a request may go to.

    Attributes:
        workers: at least one, each once.
        rivals: other gateways that place requests on the same workers, unseen until the next
            report. 0 without any, or if an atomic reservation settles who goes where.
    """

    workers: tuple[Candidate, ...]
    rivals: int = 0


@dataclass(frozen=True, slots=True)
class ScoredWorker:
    """The cost of placing the request on a worker, in the policy's unit; the least wins.

    Attributes:
        score: the cost, without leases that the load does not include.
        score_per_token: by how much it rises with each leased token, 0 or more.
        leased_tokens, age_s: the candidate's, for the record.
    """

    worker_id: str
    score: float
    score_per_token: float = 0.0
    leased_tokens: int = 0
    age_s: float = 0.0

    @property
    def level(self) -> float:
        """The score with the known leases."""
        return self.score + self.score_per_token * self.leased_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """A routing decision.

    Attributes:
        policy: the name of the policy that decided.
        offers: the chosen worker, then alternatives, best first. A state store that knows all
            leases takes the one with the least score including them.
        reason: the decision in words.
        ttft_s, tpot_s: predicted on the chosen worker; None without a prediction.
        cached_tokens: prompt tokens that are probably in the chosen worker's cache.
        draft_tokens: slots per step that would pay there; None if prices were not looked at.
    """

    policy: str
    offers: tuple[ScoredWorker, ...]
    reason: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached_tokens: int = 0
    draft_tokens: int | None = None

    @property
    def worker_id(self) -> str:
        """The worker that was chosen."""
        return self.offers[0].worker_id
